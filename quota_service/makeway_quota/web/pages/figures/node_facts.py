"""Derive what pages show of a node once for each change of the node, not once for each page and visitor.

The inventory gives the same `Node` as long as nothing on the node changes, so the facts of a node are kept by its name
and pool, and used while it is the same object. A panel of 1,000 nodes then costs a few microseconds for each of them.
The facts keep no node in memory that the inventory has replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, groupby
from typing import NamedTuple
from weakref import ref

from makeway_api.models import Device, Node

ROW_GPUS = 16
"""GPUs of a node that are drawn in one row; larger nodes take several."""
MAX_KEPT = 50_000
"""Nodes whose facts are kept; beyond, all are derived anew"""

FREE, DOWN, FOREIGN, UNAVAILABLE = "free", "down", "foreign", "unavailable"
"""States of a GPU that no workload holds: free, of a node that is not ready, held by others, of a cordoned node"""


class GpuStrip(NamedTuple):
    """GPUs beside each other in one row of a node that look the same."""

    team: str | None
    """None: no workload holds them"""
    state: str
    """of GPUs that no workload holds; else empty"""
    over_quota: bool
    row: int
    first: int
    """position of the first GPU within the row"""
    length: int
    """number of GPUs"""


@dataclass(frozen=True, slots=True, eq=False)
class NodeFacts:
    """A node as the heat map shows it, and the teams that hold a GPU on it; equal to itself only."""

    node: ref[Node]
    serial: int
    """of these facts; no others ever have it"""
    strips: tuple[GpuStrip, ...]
    tip: str
    """its name, then what its GPUs do"""
    teams: frozenset[str]


_KNOWN: dict[tuple[str, str], NodeFacts] = {}
"""By name and pool: a node that is divided among pools has other devices in each"""
_SERIALS = count()


def facts_of(node: Node) -> NodeFacts:
    """Return the facts of a node; pages are rendered in several threads, which at worst derive them twice."""
    key = node.name, node.pool
    known = _KNOWN.get(key)
    if known is None or known.node() is not node:
        if len(_KNOWN) >= MAX_KEPT:
            _KNOWN.clear()
        known = _KNOWN[key] = NodeFacts(ref(node), next(_SERIALS), tuple(_strips(node)), _tip(node), _teams(node))
    return known


def _tip(node: Node) -> str:
    if not node.ready:
        return f"{node.name} not ready"
    used = sum(1 for device in node.devices if device.holders)
    state = " cordoned" if node.cordoned else ""
    return f"{node.name}{state} {used}/{len(node.devices)} in use"


def _teams(node: Node) -> frozenset[str]:
    return frozenset(holder.team for device in node.devices for holder in device.holders)


def _strips(node: Node) -> Iterator[GpuStrip]:
    """Yield the GPUs of a node as strips of the same look."""
    for row in range(0, len(node.devices), ROW_GPUS):
        first = 0
        for (team, state, over_quota), strip in groupby(_device_styles(node, node.devices[row : row + ROW_GPUS])):
            length = sum(1 for _ in strip)
            yield GpuStrip(team, state, over_quota, row // ROW_GPUS, first, length)
            first += length


def _device_styles(node: Node, devices: Iterable[Device]) -> Iterator[tuple[str | None, str, bool]]:
    for device in devices:
        if device.holders:
            holder = device.holders[0]
            yield holder.team, "", holder.over_quota
        elif not node.ready:
            yield None, DOWN, False
        else:
            yield None, FREE if device.free > 0 else UNAVAILABLE if node.cordoned else FOREIGN, False
