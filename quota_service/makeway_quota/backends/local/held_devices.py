"""Show which devices of this machine the processes of attempts hold, for the local backend.

A process may outlive the row of its attempt, such as one that the kernel cannot end: its devices are free only once it
is gone. `control/world/workload_pods.py` compares what is shown with the rows, as for pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...engine.snapshot import GPU
from ..base import NodeStatus, StartOrder, WorkloadPod


def places_of(order: StartOrder) -> list[dict[str, Any]]:
    """Return the placement of each worker of an order, in the form of the header that is written for it."""
    return [{"node": place.node, "devices": list(place.devices), "milli": list(place.milli)} for place in order.workers]


def holding(nodes: Sequence[NodeStatus], headers: Iterable[Mapping[str, Any]]) -> dict[str, NodeStatus]:
    """Return the nodes by name, each with the workers of the attempts that have not ended, from their orders.

    An order that cannot be understood holds nothing.
    """
    pods: dict[str, list[WorkloadPod]] = {}
    for header in headers:
        try:
            result = list(_workers(header, nodes))
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):  # a loss of power left anything
            continue
        for node, pod in result:
            pods.setdefault(node, []).append(pod)
    return {n.name: replace(n, pods=tuple(pods[n.name])) if n.name in pods else n for n in nodes}


def _workers(header: Mapping[str, Any], nodes: Sequence[NodeStatus]) -> Iterator[tuple[str, WorkloadPod]]:
    """Yield each worker of an order with its node."""
    known = {node.name for node in nodes}
    for worker, place in enumerate(header.get("places") or _earlier_places(header, nodes)):
        devices, milli = tuple(map(int, place["devices"])), tuple(map(int, place["milli"]))
        if place["node"] in known and len(devices) == len(milli) and all(0 <= share <= GPU for share in milli):
            workload, attempt = str(header["workload"]), int(header["attempt"])
            pod = WorkloadPod(workload, sum(milli), attempt=attempt, worker=worker, devices=devices, milli=milli)
            yield place["node"], pod


def _earlier_places(header: Mapping[str, Any], nodes: Sequence[NodeStatus]) -> list[dict[str, Any]]:
    """Return the places of an order that an earlier version wrote, from the environments of its workers."""
    result = []
    workers = header.get("workers") or ()
    for worker in workers:
        env = worker["env"]
        devices = [int(word) for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.isdecimal()]
        node = next((node.name for node in nodes if devices and {*devices} <= {*node.devices}), None)
        if node is not None:
            share = round(GPU * float(env.get("MAKEWAY_GPUS") or 0) / len(workers) / len(devices))
            result.append({"node": node, "devices": devices, "milli": [share] * len(devices)})
    return result
