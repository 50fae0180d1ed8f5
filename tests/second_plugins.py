"""A second device plugin on a real node of the tests: MIG slices and time-sliced GPUs beside whole ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pods import wait_until

from kube_cluster.cluster import Cluster
from kube_cluster.node import Node

MIG, SHARED = "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"
PLUGINS = "/var/lib/kubelet/device-plugins"


@contextmanager
def offered(cluster: Cluster, node: Node, resource: str) -> Iterator[None]:
    """Have a second device plugin of a real node offer two devices of another resource during the block."""
    kubelet = node.service("kubelet")
    command = [sys.executable, "-m", "makeway_device_plugin", "--count", "2", "--resource", resource]
    plugin = subprocess.Popen(["nsenter", "--target", str(kubelet), "--mount", *command, "--folder", PLUGINS])

    def allocatable() -> str:
        return str(cluster.api.get(f"/api/v1/nodes/{node.name}")["status"]["allocatable"].get(resource))

    try:
        wait_until(lambda: allocatable() == "2", f"the node offers {resource}")
        yield
    finally:
        plugin.terminate()
        plugin.wait(60)
