"""Divide the CPU and memory of a worker's order among the containers of its pod: pure functions of pod and order.

A profile's CPU and memory are what the plan counts, so they are those of the whole pod. What a profile's template
requests for containers beside the job's comes off the job's container.
"""

from __future__ import annotations

from makeway_api.quantities import memory, number

from ....policy.pod_template import WORKER_CONTAINER
from ...base import BackendError, StartOrder
from ..api.client import Object
from ..api.quantities import in_service_units
from ..cluster.pod_requests import pod_requests

_START = 500
"""Milli-cores with which the launcher's container starts soon; it runs for a moment."""


def share_compute(pod: Object, order: StartOrder, *, limit: bool = False) -> None:
    """Set what the container of the job requests to what the others leave; BackendError where that is nothing.

    CPU and memory that the order does not have are the namespace's defaults, and not planned. `limit`: each container
    that requests CPU has a limit, too.
    """
    worker = next(one for one in pod["spec"]["containers"] if one["name"] == WORKER_CONTAINER)
    beside = requests_beside(pod["spec"])
    given = worker["resources"]
    if order.cpu:
        given["requests"]["cpu"] = f"{_for_the_job('cpu', order.cpu, beside.get('cpu', 0))}m"
    if order.memory:
        mebibytes = f"{_for_the_job('memory', order.memory, beside.get('memory', 0))}Mi"
        given["requests"]["memory"] = given["limits"]["memory"] = mebibytes
    if limit:
        limit_cpu(pod)


def limit_cpu(pod: Object) -> None:
    """Set the CPU limit of each container without one to its request; the launcher's gets more."""
    spec = pod["spec"]
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        resources = container.get("resources") or {}
        request = (resources.get("requests") or {}).get("cpu")
        if request is not None and "cpu" not in (resources.get("limits") or {}):
            minimum = _START if container["name"] == "launcher" else 0
            limit = max(in_service_units("cpu", str(request)), minimum)
            resources["limits"] = {**(resources.get("limits") or {}), "cpu": f"{limit}m"}


def requests_beside(spec: Object) -> dict[str, int]:
    """Return what the containers request that run beside the job's."""
    return pod_requests({"containers": containers_beside(spec)})


def containers_beside(spec: Object) -> list[Object]:
    """Return the containers that run beside the job's: sidecars, too, and no other init containers."""
    sidecars = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
    return [*(one for one in spec["containers"] if one["name"] != WORKER_CONTAINER), *sidecars]


def _for_the_job(resource: str, planned: int, beside: int) -> int:
    if beside < planned:
        return planned - beside
    taken, whole = (memory(n) if resource == "memory" else f"{number(n / 1000)} CPU" for n in (beside, planned))
    raise BackendError(
        f"The containers beside the job's in the pod template of its profile request {taken}, and the profile has "
        f"{whole} for the whole pod: raise {resource} in the profile, or lower their requests."
    )
