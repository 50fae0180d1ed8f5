"""Collect what a cycle of the control loop knows of the work that machines are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from ...autoscale.demand import MachineDemand, PendingWork, PlacedWork
from ...autoscale.machine import Machine
from ...backends.base import NodeStatus
from ...engine.plan import Demand
from ...engine.snapshot import GPU
from ...store.records import Workload
from ...values import Place, ordinal
from ..transitions import TIME_LIMIT
from ..world.world import World


@dataclass(frozen=True)
class CycleDemand:
    """The work as a cycle left it. `began`: when it observed the nodes, on a clock that never jumps.

    `accepting_machines`: those on which the cycle could start work; `busy` counts the attempts that have a row there.
    `rows`: the work that holds GPUs or has a nomination, with its times by the present clock; `machines`: by node;
    `submitted`: when pending work was; `jobs`: what is known of running jobs; `sizes`: CPU and memory of machines;
    `devices`: the milli-GPUs for work on each device of machines that take it. `restartable`: the machines whose jobs
    would all start elsewhere, `moved`: those that drain for a move and whose jobs get their notices now.
    """

    began: float
    pending: tuple[PendingWork, ...]
    nodes: frozenset[str]
    accepting_machines: frozenset[str]
    busy: Mapping[str, int]
    nominated: frozenset[str]
    rows: tuple[Workload, ...] = ()
    machines: Mapping[str, str] = field(default_factory=dict)
    submitted: Mapping[str, float] = field(default_factory=dict)
    jobs: JobFacts | None = None
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    devices: Mapping[str, Mapping[int, int]] | None = None
    restartable: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()

    def of(self, machines: Iterable[Machine], *, moves: bool = False) -> MachineDemand | None:
        """Return the demand for a step; None where the cycle may have started work on a machine that drains now.

        `moves`: whether jobs may be moved, so that the step has to know all that runs.
        """
        if any(machine.id in self.accepting_machines for machine in machines if machine.state == "draining"):
            return None
        placed = self.placed if moves or (self.pending and any(map(certain_end, self.rows))) else ()
        return MachineDemand(
            self.pending,
            self.nodes,
            self.busy,
            self.nominated,
            placed,
            self.submitted,
            self.sizes,
            self.devices,
            self.restartable,
            self.accepting_machines,
        )

    def with_answers(
        self, *, restartable: frozenset[str] | None = None, moved: frozenset[str] | None = None
    ) -> CycleDemand:
        """Return the demand with what was found out about moves; what runs is not collected anew."""
        result = replace(
            self,
            restartable=self.restartable if restartable is None else restartable,
            moved=self.moved if moved is None else moved,
        )
        if "placed" in self.__dict__:
            result.__dict__["placed"] = self.placed
        return result

    @cached_property
    def placed(self) -> tuple[PlacedWork, ...]:
        """Each worker that holds room of a machine, collected once for all steps and questions of a cycle."""
        return tuple(self._placed())

    def _placed(self) -> Iterator[PlacedWork]:
        for row in self.rows:
            for place in row.placement:
                if (machine := self.machines.get(place.node)) is not None:
                    yield _placed_work(row, place, machine, self.jobs)


def certain_end(row: Workload) -> float | None:
    """Return by when a job is certainly over, in Unix seconds, as its time is limited; None where it is not known.

    What makes way is left out: the engine hands out the room of that.
    """
    limited = row.kind == "job" and row.state == "running" and row.notice is None and row.time_limit is not None
    if not limited or row.started_at is None:
        return None
    return row.started_at + (row.time_limit or 0.0) + row.grace


class JobFacts(NamedTuple):
    """What says whether jobs can be moved. `durable`: whether a job's checkpoints are there on other machines, too.

    `saves`: whether every job saves at its notice, as in a simulation; else one is moved only after it has saved a
    checkpoint in its present attempt, so that each attempt gets on. `remaining`: how long an attempt lasts, as far as
    past runs tell.
    """

    now: float
    remaining: Callable[[Workload, float], float | None]
    durable: Callable[[Workload], bool] = lambda row: True
    saves: bool = False

    def movable(self, row: Workload) -> bool:
        """Whether a job may be moved, and would go on from what it has saved."""
        alone = len({place.node for place in row.placement}) == 1
        free = row.notice is None and not row.cancel_requested and row.reason_code != TIME_LIMIT
        running = row.kind == "job" and row.state == "running" and row.preemptible and row.started_at is not None
        return alone and free and running and self.durable(row) and (self.saves or self._saved_at(row) is not None)

    def lost(self, row: Workload) -> float:
        """Return the seconds of work since the last checkpoint, which a move may lose."""
        saved = self._saved_at(row)
        return 0.0 if self.saves or saved is None else max(0.0, self.now - saved)

    def runs_for(self, row: Workload) -> float | None:
        """Return for how many seconds a job probably still runs; None where that is not known."""
        lasts = self.remaining(row, self.now)
        known = [lasts] if lasts is not None else []
        known += [row.time_limit] if row.time_limit is not None else []
        return max(0.0, min(known) - (self.now - (row.started_at or self.now))) if known else None

    def _saved_at(self, row: Workload) -> float | None:
        """Return when a job saved a checkpoint in its present attempt."""
        began, saved = row.started_at, row.checkpoint_at
        return saved if began is not None and saved is not None and saved > began else None


def _placed_work(row: Workload, place: Place, machine: str, jobs: JobFacts | None) -> PlacedWork:
    devices, milli = tuple(map(ordinal, place.devices)), place.milli[0] if place.milli else 0
    work = PlacedWork(row.id, machine, devices, milli, row.cpu, row.memory, certain_end(row), row.started_at or 0.0)
    if jobs is None:
        return work
    return work._replace(
        movable=jobs.movable(row),
        lost_seconds=jobs.lost(row),
        remaining_seconds=jobs.runs_for(row),
        notice=_kind(row),
    )


def _kind(row: Workload) -> str:
    return "" if row.notice is None else row.notice.kind


async def known_demand(
    world: World, demand: Iterable[Demand], machines: Mapping[str, str], began: float, now: float, *, moves: bool
) -> CycleDemand:
    """Return what a cycle knows at its end, with its commits, by a world; the others as for `cycle_demand`.

    `moves`: whether jobs may be moved, so that the times of all count; else those of jobs with a limit or a notice do.
    """
    demand, placed = tuple(demand), await world.placed()
    timed = (moves or row.time_limit is not None or row.notice is not None for row in placed.values())
    rows = [world.times.of(row) if counts else row for row, counts in zip(placed.values(), timed, strict=True)]
    limited, active = any(row.time_limit is not None for row in rows), await world.rows_as_of_now()
    waiting = [active[one.id] for one in demand if one.id in active] if limited else []
    submitted = {row.id: row.submitted_at for row in waiting}
    jobs = JobFacts(now, world.durations.remaining, world.has_durable_checkpoints)
    return cycle_demand(began, demand, world.observed.nodes, rows, machines, submitted, jobs)


def cycle_demand(
    began: float,
    demand: Iterable[Demand],
    nodes: Mapping[str, NodeStatus],
    rows: Iterable[Workload],
    machines: Mapping[str, str],
    submitted: Mapping[str, float] | None = None,
    jobs: JobFacts | None = None,
) -> CycleDemand:
    """Return what a cycle knows. `demand`: of its plan; `nodes`: as it observed them.

    `rows`: of work that holds GPUs or has a nomination, after the cycle's end; `machines`: by the nodes that they are;
    `submitted`: when the work of the demand was; `jobs`: what is known of running jobs.
    """
    rows = tuple(rows)
    by_machine = {machine: nodes[name] for name, machine in machines.items() if name in nodes}
    busy, nominated = _places(rows, machines)
    accepting = (name for name, node in by_machine.items() if node.ready and not node.cordoned and node.observed)
    pending = tuple([_pending_work(one, machines) if one.awaits else _MAKE(one) for one in demand])
    sizes = {
        name: (_for_work(node.cpu, node.foreign_cpu), _for_work(node.memory, node.foreign_memory))
        for name, node in by_machine.items()
    }
    accepting_machines = frozenset(accepting)
    devices = {name: _devices_for_work(by_machine[name]) for name in accepting_machines} if jobs is not None else None
    kept = accepting_machines.intersection(machine for one in pending if one.awaits for machine in one.awaits)
    known = frozenset(by_machine), accepting_machines, busy, nominated | kept
    return CycleDemand(began, pending, *known, rows, machines, submitted or {}, jobs, sizes, devices)


_MAKE: Callable[[Demand], PendingWork] = partial(tuple.__new__, PendingWork)
"""Make pending work of a demand, whose fields are the same; thousands of times in a cycle"""


def _pending_work(demand: Demand, machines: Mapping[str, str]) -> PendingWork:
    """Return the demand of a workload that waits for nodes which boot: each is named like its machine."""
    return _MAKE(demand)._replace(awaits=tuple([machines.get(node, node) for node in demand.awaits]))


def _devices_for_work(node: NodeStatus) -> Mapping[int, int]:
    """Return the milli-GPUs of each device of a node that nothing else holds; the last ones, where it is not known."""
    result = {device: max(0, GPU - node.foreign.get(device, 0)) for device in node.devices}
    other = node.foreign_gpus
    for device in sorted(result, reverse=True) if other else ():
        held = min(result[device], other)
        result[device], other = result[device] - held, other - held
    return result


def _for_work(amount: int, foreign: int) -> int:
    """Return what a node has for work, 0 where that is not known."""
    return max(1, amount - foreign) if amount else 0


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
