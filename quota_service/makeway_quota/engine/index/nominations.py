"""Restore the nominations of the snapshot at the start of a decision, where they can still be kept."""

from __future__ import annotations

from collections.abc import Iterable

from ..request import Need
from .allocations import parts_of
from .cluster_state import ClusterState
from .devices import devices_of
from .nodes import WorkerPlacement


def restore_nominations(cluster: ClusterState) -> None:
    """Restore the nominations that can still be kept."""
    for workload in sorted(cluster.nominees.values(), key=lambda w: (w.submitted_at, w.id)):
        if cluster.is_stuck(workload):
            continue  # it does not move any more
        need = cluster.need(workload)
        parts = parts_of(cluster.nodes, workload.nomination, need)
        if (
            not parts
            or len(parts) < need.min_workers
            or not all(p.node.usable or _is_back_soon(cluster, p) for p in parts)
        ):
            continue
        if need.session and not all(p.node.node.sessions for p in parts):
            continue  # a nominated node is for jobs by now
        if any(len(p.devices) * p.milli_per_device != need.gpus for p in parts):
            continue  # a nominated device is gone
        if not {p.node.pool.pool.name for p in parts} <= {pool.pool.name for pool in cluster.pools_of(workload)}:
            continue  # a nominated node is in another pool by now
        if len({p.node.pool.pool.name for p in parts}) > 1:
            continue
        if fits_later(parts, need):
            cluster.nominate(workload, need, parts)


def _is_back_soon(cluster: ClusterState, part: WorkerPlacement) -> bool:
    """Whether a node is not ready for a moment only: for less than `stuck_after`, or while the devices terminate."""
    node = part.node.node
    if node.ready or node.cordoned:
        return False
    if node.down_since is not None:
        return cluster.now < node.down_since + cluster.settings.stuck_after
    here = part.node.allocations.values()
    terminating = {at for a in here if a.terminating for p in a.parts if p.node is part.node for at in p.devices}
    devices = devices_of(node)
    held = {d for pod in node.terminating if pod.deadline > cluster.stuck_before for d in pod.devices}
    return not terminating.isdisjoint(part.devices) or any(devices[at] in held for at in part.devices)


def fits_later(parts: Iterable[WorkerPlacement], need: Need) -> bool:
    """Whether a placement is free once everything that terminates has left and nominations are kept."""
    wanted: dict[tuple[str, int], int] = {}
    hosted: dict[str, int] = {}
    for part in parts:
        node = part.node
        hosted[node.node.name] = count = hosted.get(node.node.name, 0) + 1
        if (need.cpu and node.cpu_free_later < count * need.cpu) or (
            need.memory and node.memory_free_later < count * need.memory
        ):
            return False
        if node.pods_free_later < count:
            return False
        for at in part.devices:
            key = (node.node.name, at)
            wanted[key] = wanted.get(key, 0) + part.milli_per_device
            if node.free_later[at] < wanted[key]:
                return False
    return True
