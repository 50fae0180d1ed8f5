"""Collect what a cycle of the control loop knows of the work that machines are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ...autoscale.demand import MachineDemand, PendingWork, PlacedWork
from ...autoscale.machine import Machine
from ...backends.base import NodeStatus
from ...engine.plan import Demand
from ...store.records import Workload
from ...values import Place, ordinal
from ..world.world import World


@dataclass(frozen=True, slots=True)
class CycleDemand:
    """The work as a cycle left it. `began`: when it observed the nodes, on a clock that never jumps.

    `open_machines`: those on which the cycle could start work; `busy` counts the attempts that have a row there.
    `rows`: the work that holds GPUs or has a nomination, with its times by the present clock; `machines`: by node;
    `submitted`: when pending work was.
    """

    began: float
    pending: tuple[PendingWork, ...]
    nodes: frozenset[str]
    open_machines: frozenset[str]
    busy: Mapping[str, int]
    nominated: frozenset[str]
    rows: tuple[Workload, ...] = ()
    machines: Mapping[str, str] = field(default_factory=dict)
    submitted: Mapping[str, float] = field(default_factory=dict)

    def of(self, machines: Iterable[Machine]) -> MachineDemand | None:
        """Return the demand for a step; None where the cycle may have started work on a machine that drains now."""
        if any(machine.id in self.open_machines for machine in machines if machine.state == "draining"):
            return None
        placed = tuple(self._placed()) if self.pending and any(map(certain_end, self.rows)) else ()
        return MachineDemand(self.pending, self.nodes, self.busy, self.nominated, placed, self.submitted)

    def _placed(self) -> Iterator[PlacedWork]:
        """Yield each worker that holds room of a machine."""
        for row in self.rows:
            for place in row.placement:
                if (machine := self.machines.get(place.node)) is not None:
                    yield _placed_work(row, place, machine)


def certain_end(row: Workload) -> float | None:
    """Return by when a job is certainly over, in Unix seconds, as its time is limited; None where it is not known.

    What makes way is left out: the engine hands out the room of that.
    """
    limited = row.kind == "job" and row.state == "running" and row.notice is None and row.time_limit is not None
    if not limited or row.started_at is None:
        return None
    return row.started_at + (row.time_limit or 0.0) + row.grace


def _placed_work(row: Workload, place: Place, machine: str) -> PlacedWork:
    devices = tuple(map(ordinal, place.devices))
    return PlacedWork(
        row.id, machine, devices, place.milli[0] if place.milli else 0, row.cpu, row.memory, certain_end(row)
    )


async def known_demand(
    world: World, demand: Iterable[Demand], machines: Mapping[str, str], began: float
) -> CycleDemand:
    """Return what a cycle knows at its end, with its commits, by a world; the others as for `cycle_demand`."""
    demand, placed = tuple(demand), await world.placed()
    rows, active = [world.times.of(row) for row in placed.values()], await world.rows_as_of_now()
    submitted = {one.id: row.submitted_at for one in demand if (row := active.get(one.id)) is not None}
    return cycle_demand(began, demand, world.observed.nodes, rows, machines, submitted)


def cycle_demand(
    began: float,
    demand: Iterable[Demand],
    nodes: Mapping[str, NodeStatus],
    rows: Iterable[Workload],
    machines: Mapping[str, str],
    submitted: Mapping[str, float] | None = None,
) -> CycleDemand:
    """Return what a cycle knows. `demand`: of its plan; `nodes`: as it observed them.

    `rows`: of work that holds GPUs or has a nomination, after the cycle's end; `machines`: by the nodes that they are;
    `submitted`: when the work of the demand was.
    """
    rows = tuple(rows)
    by_machine = {machine: nodes[name] for name, machine in machines.items() if name in nodes}
    busy, nominated = _places(rows, machines)
    accepting = (name for name, node in by_machine.items() if node.ready and not node.cordoned and node.observed)
    pending = tuple([PendingWork(*one) for one in demand])
    return CycleDemand(
        began, pending, frozenset(by_machine), frozenset(accepting), busy, nominated, rows, machines, submitted or {}
    )


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
