"""Collect what a cycle of the control loop knows of the work that machines are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...autoscale.demand import MachineDemand, PendingWork
from ...autoscale.machine import Machine
from ...backends.base import NodeStatus
from ...engine.plan import Demand
from ...store.records import Workload


@dataclass(frozen=True, slots=True)
class CycleDemand:
    """The work as a cycle left it. `began`: when it observed the nodes, on a clock that never jumps.

    `open_machines`: those on which the cycle could start work; `busy` counts the attempts that have a row there.
    """

    began: float
    pending: tuple[PendingWork, ...]
    nodes: frozenset[str]
    open_machines: frozenset[str]
    busy: Mapping[str, int]
    nominated: frozenset[str]

    def of(self, machines: Iterable[Machine]) -> MachineDemand | None:
        """Return the demand for a step; None where the cycle may have started work on a machine that drains now."""
        if any(machine.id in self.open_machines for machine in machines if machine.state == "draining"):
            return None
        return MachineDemand(self.pending, self.nodes, self.busy, self.nominated)


def cycle_demand(
    began: float,
    demand: Iterable[Demand],
    nodes: Mapping[str, NodeStatus],
    rows: Iterable[Workload],
    machines: Mapping[str, str],
) -> CycleDemand:
    """Return what a cycle knows. `demand`: of its plan; `nodes`: as it observed them.

    `rows`: of work that holds GPUs or has a nomination, after the cycle's end; `machines`: by the nodes that they are.
    """
    by_machine = {machine: nodes[name] for name, machine in machines.items() if name in nodes}
    busy, nominated = _places(rows, machines)
    accepting = (name for name, node in by_machine.items() if node.ready and not node.cordoned and node.observed)
    pending = tuple([PendingWork(*one) for one in demand])
    return CycleDemand(began, pending, frozenset(by_machine), frozenset(accepting), busy, nominated)


def _places(rows: Iterable[Workload], machines: Mapping[str, str]) -> tuple[Mapping[str, int], frozenset[str]]:
    """Return how much work is on each machine, and where some is about to start. `machines`: by node."""
    busy = Counter[str]()
    nominated = set[str]()
    if not machines:
        return busy, frozenset()
    for row in rows:
        for machine in {machines[place.node] for place in row.placement if place.node in machines}:
            busy[machine] += 1
        for place in row.nomination:
            if place.node in machines:
                nominated.add(machines[place.node])
    return busy, frozenset(nominated)
