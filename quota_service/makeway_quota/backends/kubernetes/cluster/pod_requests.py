"""Count what a pod requests, as the scheduler of Kubernetes counts it, and keep of foreign pods only that.

Pure: no requests to the API server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from sys import intern

from makeway_api.pods import INSTANCE, MANAGED_BY, MANAGER, SESSION

from ..api.client import Object
from ..api.quantities import resource_requests

ENDED = ("Succeeded", "Failed")
JOB = "makeway/job"
ATTEMPT = "makeway/attempt"
WORKER = "makeway/worker"
MACHINE = "makeway/machine"
"""The label of what belongs to a machine of a deployment"""

Requests = tuple[tuple[str, int], ...]
"""Amounts by resource, in the order of the resources' names."""


@dataclass(frozen=True, slots=True)
class PodShare:
    """The resources that a pod holds on its node; it is foreign without a `workload` of ours."""

    node: str
    requests: Requests
    workload: str = ""
    attempt: int | None = None
    """of a job"""
    worker: int | None = None
    """of a job"""
    ends_at: float | None = None
    """when it is killed at the latest, in Unix seconds; None while it is not deleted"""
    grace: float = 0.0
    """the seconds that it got when it was deleted"""
    claims: tuple[str, ...] = ()
    """the keys of the ResourceClaims that were generated for it"""


def project_share(item: Object, instance: str, namespace: str = "") -> PodShare | None:
    """Return the resources that a pod holds on its node; None while it holds none.

    `namespace` is that of the pods of our jobs ("": any). A pod of a workload may outlive it: its worker has reported
    its end, containers beside it run on, its node is out of reach, or a process of it cannot be killed. A pod of ours
    that is of no workload, as one that removes checkpoints, is in no plan and counts as foreign; so does one with the
    labels of our jobs' pods that is not where we make them. The placeholder of a machine holds nothing: it makes way.
    """
    spec, status = item.get("spec") or {}, item.get("status") or {}
    node = spec.get("nodeName")
    if not node or status.get("phase") in ENDED:
        return None
    metadata = item["metadata"]
    labels = metadata.get("labels") or {}
    workload, attempt, worker = "", None, None
    if labels.get(MANAGED_BY) == MANAGER and labels.get(INSTANCE) == instance:
        if MACHINE in labels and (not namespace or metadata.get("namespace", namespace) == namespace):
            return None
        workload = str(labels.get(SESSION, ""))
        numbers = [
            int(text) if text.isdecimal() else None for text in (labels.get(ATTEMPT, ""), labels.get(WORKER, ""))
        ]
        in_namespace = not namespace or metadata.get("namespace", namespace) == namespace
        if not workload and in_namespace and numbers[0] is not None:
            workload, attempt, worker = str(labels.get(JOB, "")), numbers[0], numbers[1]
    requests = tuple(sorted((intern(name), value) for name, value in pod_requests(spec, status).items()))
    share = PodShare(intern(node), _interned(requests), workload, attempt, worker, claims=_claims(metadata, status))
    if not workload or "deletionTimestamp" not in metadata:
        return share
    ends_at = datetime.fromisoformat(metadata["deletionTimestamp"]).timestamp()
    return replace(share, ends_at=ends_at, grace=float(metadata.get("deletionGracePeriodSeconds") or 0))


def _claims(metadata: Object, status: Object) -> tuple[str, ...]:
    """Return the keys of the claims that were generated for a pod, as informers on claims have them."""
    generated = status.get("resourceClaimStatuses") or ()
    names = (one["resourceClaimName"] for one in generated if one.get("resourceClaimName"))
    return tuple(f"{metadata.get('namespace', '')}/{name}" for name in names)


@lru_cache(maxsize=4096)
def _interned(requests: Requests) -> Requests:
    """Return equal requests as one object: most pods of a cluster are like others."""
    return requests


def pod_requests(spec: Object, status: Object | None = None) -> dict[str, int]:
    """Return what a pod requests: its containers in sum, or its largest init container if that is more, and overhead.

    Sidecars count in both. Requests of the pod as a whole go before those of its containers. While a container is
    resized in place, the larger of its request and what is allocated to it counts.
    """
    allocated = {one["name"]: one.get("allocatedResources") for one in (status or {}).get("containerStatuses") or ()}
    running: dict[str, int] = {}
    for container in spec.get("containers") or ():
        _add(running, _larger(_requests_of(container), resource_requests(allocated.get(container.get("name")))))
    sidecars: dict[str, int] = {}
    init_peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        requests = _requests_of(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, requests)
            init_peak = _larger(init_peak, sidecars)
        else:
            init_peak = _larger(init_peak, _sum([sidecars, requests]))
    total = _larger(_sum([running, sidecars]), init_peak)
    total.update(resource_requests((spec.get("resources") or {}).get("requests")))
    _add(total, resource_requests(spec.get("overhead")))
    return total


def _requests_of(container: Object) -> dict[str, int]:
    """Return what a container requests; without a request of a resource, its limit is the request."""
    resources = container.get("resources") or {}
    return resource_requests({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for resource, value in more.items():
        total[resource] = total.get(resource, 0) + value


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        _add(total, part)
    return total


def _larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}
