"""Mount volumes into the pods of a job, beside those that Makeway and the profile's template give them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ....policy import Document
from ....policy.pod_template import WORKER_CONTAINER
from ..api.client import Object
from .manifest import HOME


@dataclass(frozen=True, slots=True)
class Mount:
    """A PersistentVolumeClaim of the jobs' namespace, and where a job's container mounts it, or a folder of it."""

    name: str
    """of the volume in the pod"""
    claim: str
    path: str
    sub_path: str = ""
    read_only: bool = False
    home: bool = False
    """whether it is the HOME of the job"""


def team_mounts(document: Document | None, team: str) -> list[Mount]:
    """Return the mounts of a team's volumes; none before there is a document."""
    facts = document.team_facts.get(team) if document is not None else None
    return [
        Mount(f"makeway-team-{volume.name}", volume.claim, volume.path, volume.sub_path, volume.read_only)
        for volume in (facts.volumes if facts is not None else ())
    ]


def with_mounts(pod: Object, mounts: Sequence[Mount]) -> Object:
    """Return a pod with these mounts; what the profile's template mounts at the same path stays instead."""
    if not mounts:
        return pod
    result = deepcopy(pod)
    (worker,) = [c for c in result["spec"]["containers"] if c["name"] == WORKER_CONTAINER]
    for mount in mounts:
        if any(other["mountPath"].rstrip("/") == mount.path for other in worker["volumeMounts"]):
            continue
        entry = {
            "name": _volume(result["spec"]["volumes"], mount),
            "mountPath": mount.path,
            "readOnly": mount.read_only,
        }
        worker["volumeMounts"].append({**entry, **({"subPath": mount.sub_path} if mount.sub_path else {})})
        if mount.home:
            for variable in worker["env"]:
                if variable == {"name": "HOME", "value": HOME}:
                    variable["value"] = mount.path
    return result


def _volume(volumes: list[dict[str, Any]], mount: Mount) -> str:
    """Return the name of the pod's volume with a claim, which is added where there is none."""
    source = {"claimName": mount.claim}
    for volume in volumes:
        if volume.get("persistentVolumeClaim") == source:
            return str(volume["name"])
    volumes.append({"name": mount.name, "persistentVolumeClaim": source})
    return mount.name
