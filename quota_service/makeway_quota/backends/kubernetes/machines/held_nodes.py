"""Keep work off the nodes of machines that are not ready, and off those that a machine may be about to get.

A placeholder that waits is counted by the autoscaler; work that took its node before it is bound would have a second
node added for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...base import NodeStatus
from ...machines.machine_source import MachineSource, MachineStatus
from ..cluster.nodes import ClusterNode

CLOCKS = 60.0
"""Seconds by which the clocks of the service and of the API server may differ"""


def machines_of(source: MachineSource | None) -> Iterable[MachineStatus]:
    """Return the machines of a source, none where there is no source."""
    return () if source is None else source.machines().values()


def held_nodes(
    nodes: Mapping[str, NodeStatus], known: Mapping[str, ClusterNode], machines: Iterable[MachineStatus]
) -> Mapping[str, NodeStatus]:
    """Return the nodes, cordoned where a machine keeps work off."""
    ours = [machine for machine in machines if machine.of_cluster]
    if not ours:
        return nodes
    bound = {machine.node for machine in ours if machine.node}
    opened = {machine.node for machine in ours if machine.node and machine.condition == "ready"}
    waiting: dict[str, float] = {}
    for machine in ours:
        if not machine.node and machine.condition == "starting":
            since = machine.requested_at - CLOCKS
            waiting[machine.pool] = min(since, waiting.get(machine.pool, since))
    held = bound - opened
    for name, node in nodes.items():
        created = known[name].created if name in known else None
        if (
            name not in bound
            and created is not None
            and any(created >= waiting.get(p, created + 1) for p in node.pools)
        ):
            held.add(name)
    return {name: replace(node, cordoned=True) if name in held else node for name, node in nodes.items()}
