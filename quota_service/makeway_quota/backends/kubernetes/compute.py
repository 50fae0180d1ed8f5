"""Divide the CPU and memory of a worker's order among the containers of its pod: pure functions of pod and order.

A profile's CPU and memory are what the plan counts, so they are those of the whole pod. What a profile's template
requests for containers beside the job's comes off the job's container.
"""

from __future__ import annotations

from makeway_api.quantities import memory, number

from ...policy.pod_template import WORKER
from ..base import BackendError, StartOrder
from .client import Object
from .pod_requests import pod_requests


def share_compute(pod: Object, order: StartOrder) -> None:
    """Set what the container of the job requests to what the others leave; BackendError where that is nothing.

    CPU and memory that the order does not have are the namespace's defaults, and not planned.
    """
    worker = next(one for one in pod["spec"]["containers"] if one["name"] == WORKER)
    beside = requests_beside(pod["spec"])
    given = worker["resources"]
    if order.cpu:
        given["requests"]["cpu"] = f"{_left('cpu', order.cpu, beside.get('cpu', 0))}m"
    if order.memory:
        mebibytes = f"{_left('memory', order.memory, beside.get('memory', 0))}Mi"
        given["requests"]["memory"] = given["limits"]["memory"] = mebibytes


def requests_beside(spec: Object) -> dict[str, int]:
    """Return what the containers request that run beside the job's."""
    return pod_requests({"containers": containers_beside(spec)})


def containers_beside(spec: Object) -> list[Object]:
    """Return the containers that run beside the job's: sidecars, too, and no other init containers."""
    sidecars = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
    return [*(one for one in spec["containers"] if one["name"] != WORKER), *sidecars]


def _left(resource: str, planned: int, beside: int) -> int:
    if beside < planned:
        return planned - beside
    taken, whole = (memory(n) if resource == "memory" else f"{number(n / 1000)} CPU" for n in (beside, planned))
    raise BackendError(
        f"The containers beside the job's in the pod template of its profile request {taken}, and the profile has "
        f"{whole} for the whole pod: raise {resource} in the profile, or lower their requests."
    )
