"""What a cluster left of itself on this machine, beside the clusters of others."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from kube_cluster.folder import Folder, folders
from kube_cluster.network import NAMESPACES, Network
from kube_cluster.processes import marked


def left(folder: Folder, facts: dict[str, Any]) -> list[str]:
    """Return what is there of a cluster: processes, folders, devices, namespaces, routes, control groups and mounts.

    `facts` are those that its folder had while it ran.
    """
    result = [f"process {pid}" for pid in marked(folder)]
    places = [folder.path, *map(Path, facts.get("cgroups", []))]
    if (number := facts.get("network")) is not None:
        bridge = Network(number).bridge
        devices = Path("/sys/class/net")
        names = [devices / bridge, *devices.glob(f"{bridge}p*"), *NAMESPACES.glob(f"{bridge}-*")]
        networks = [str(place) for place in names if os.path.lexists(place)]
        routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
        networks += [line for line in routes.splitlines() if bridge in line.split()]
        # A number is taken again by the next cluster, maybe just now.
        others = [other.facts().get("network") for other in folders() if other.path != folder.path]
        result += networks if number not in others else []
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):
            if str(folder.path) in mounts.read_text(encoding="utf-8"):
                result.append(f"mount of {mounts}")
    return result + [str(place) for place in places if os.path.lexists(place)]
