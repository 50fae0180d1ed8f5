"""Bound what the pods of jobs write to the disk of their node: pure functions of pod, node and settings.

Kubernetes calls it ephemeral storage: what containers write outside of volumes, their logs, and volumes of the kind
emptyDir. Without a limit one job fills the disk of its node, and the kubelet evicts others for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from makeway_api.quantities import memory

from ....policy.pod_template import WORKER_CONTAINER
from ...base import BackendError
from ..api.client import Object
from ..api.quantities import MIB, in_service_units
from .compute import containers_beside

RESOURCE = "ephemeral-storage"


@dataclass(frozen=True, slots=True)
class Disk:
    """What a pod requests of its node's disk, and the most that it may use, in MiB; 0 is not set."""

    request: int = 0
    limit: int = 0

    def on(self, allocatable: int) -> Disk:
        """Return what a pod has on a node that offers so many MiB of its disk to pods.

        No pod may use more than half of it, so that one alone does not exhaust the node. A node that offers nothing
        does not count its disk, and takes no pod that requests some of it.
        """
        limit = min(self.limit, allocatable // 2) if allocatable else self.limit
        return Disk(min(self.request, limit or self.request) if allocatable else 0, limit)


def parse_disk(request: str, limit: str) -> Disk:
    """Return the disk that two quantities of Kubernetes mean; ValueError where they are none, or contradict."""
    result = Disk(*(in_service_units("memory", text) if text.strip() else 0 for text in (request, limit)))
    if result.limit and result.request > result.limit:
        raise ValueError(f"Pods of jobs cannot request more of a disk than they may use: {request} and {limit}.")
    return result


def bound_disk(pod: Object, disk: Disk, shared_memory: int = 0) -> None:
    """Set the requests and limits of a job's pod, and the sizes of its emptyDir volumes that have none.

    What the template of the profile says stays. `disk` is that of the whole pod, as containers beside the job's write
    to the same node; `shared_memory` is the size of volumes in memory in MiB. BackendError where the others take all.
    """
    worker = next(one for one in pod["spec"]["containers"] if one["name"] == WORKER_CONTAINER)
    resources = worker.setdefault("resources", {})
    limits, requests = (resources.setdefault(kind, {}) for kind in ("limits", "requests"))
    own = RESOURCE in limits or RESOURCE in requests
    if not own and disk.limit:
        limits[RESOURCE] = f"{_worker_share(disk.limit, _limits_beside(pod, 'limits'))}Mi"
    if not own and (disk.request or disk.limit):  # without a request of its own its limit would be the request
        requests[RESOURCE] = f"{max(0, disk.request - _limits_beside(pod, 'requests'))}Mi"
    size = _pod_limit(pod) if RESOURCE in limits else 0
    for volume in pod["spec"].get("volumes") or ():
        if (empty := volume.get("emptyDir")) is None or empty.get("sizeLimit"):
            continue
        bound = shared_memory if empty.get("medium") == "Memory" else size
        if bound:
            empty["sizeLimit"] = f"{bound}Mi"


def _limits_beside(pod: Object, kind: str) -> int:
    return sum(_mebibytes(container, kind) for container in containers_beside(pod["spec"]))


def _pod_limit(pod: Object) -> int:
    """Return the limit of the pod as the kubelet has it: those of its containers in sum."""
    worker = next(one for one in pod["spec"]["containers"] if one["name"] == WORKER_CONTAINER)
    return _mebibytes(worker, "limits") + _limits_beside(pod, "limits")


def _mebibytes(container: Object, kind: str) -> int:
    text = ((container.get("resources") or {}).get(kind) or {}).get(RESOURCE)
    return -(-in_service_units(RESOURCE, str(text)) // MIB) if text is not None else 0


def _worker_share(planned: int, beside: int) -> int:
    if beside < planned:
        return planned - beside
    raise BackendError(
        f"The containers beside the job's in the pod template of its profile may use {memory(beside)} of a disk, and "
        f"the whole pod {memory(planned)}: raise disk in the profile, or lower their limits."
    )
