"""Restore the nominations of the snapshot at the start of a decision, where they can still be kept."""

from __future__ import annotations

from collections.abc import Iterable

from ..request import Need
from .allocations import parts_of
from .cluster_state import ClusterState
from .nodes import Part


def restore_nominations(cluster: ClusterState) -> None:
    """Restore the nominations that can still be kept."""
    for workload in sorted(cluster.nominees.values(), key=lambda w: (w.submitted_at, w.id)):
        need = cluster.need(workload)
        parts = parts_of(cluster.nodes, workload.nomination, need)
        if not parts or len(parts) < need.least or not all(p.node.usable for p in parts):
            continue
        if any(len(p.devices) * p.milli != need.gpus for p in parts):
            continue  # a nominated device is gone
        if fits_later(parts, need):
            cluster.nominate(workload, need, parts)


def fits_later(parts: Iterable[Part], need: Need) -> bool:
    """Whether a placement is free once everything that terminates has left and nominations are kept."""
    wanted: dict[tuple[str, int], int] = {}
    hosted: dict[str, int] = {}
    for part in parts:
        node = part.node
        hosted[node.node.name] = count = hosted.get(node.node.name, 0) + 1
        if (need.cpu and node.cpu_future < count * need.cpu) or (
            need.memory and node.memory_future < count * need.memory
        ):
            return False
        for at in part.devices:
            key = (node.node.name, at)
            wanted[key] = wanted.get(key, 0) + part.milli
            if node.future[at] < wanted[key]:
                return False
    return True
