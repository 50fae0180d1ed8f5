"""Define the demand for machines at the end of an admission cycle: pending, running and nominated work.

The control loop computes it from the engine's plan. Amounts are milli-GPUs, milli-cores and MiB, as in the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class PendingWork(NamedTuple):
    """A workload that does not fit on the nodes that exist: `workers` of one shape, in one of `pools`, the first best.

    All workers start together. `gpus`, `cpu` and `memory` are those of one worker: a part of one GPU (less than 1000)
    or whole ones.
    """

    workload: str
    pools: tuple[str, ...]
    workers: int = 1
    gpus: int = 0
    cpu: int = 0
    memory: int = 0
    models: tuple[str, ...] = ()
    """GPU models that suit; empty: any"""
    session: bool = False
    """whether it is a notebook, which runs only on machines that are nodes of the cluster"""
    awaits: tuple[str, ...] = ()
    """where the engine has all of its workers start once machines are ready that boot, one name for each; `workers` are
    those that start on these machines"""

    @property
    def shape(self) -> tuple[object, ...]:
        """All fields but the id and `awaits`: workloads of equal shape fit on the same machines."""
        return self[1:-1]


class PlacedWork(NamedTuple):
    """A worker on a machine: it holds `milli_gpus` of each of its `devices`, CPU and memory."""

    workload: str
    machine: str
    devices: tuple[int, ...] = ()
    milli_gpus: int = 0
    cpu: int = 0
    memory: int = 0
    ends_at: float | None = None
    """when its time limit ends it at the latest; None without a limit"""
    attempt_started_at: float = 0.0
    movable: bool = False
    """whether it can move: a preemptible job on this machine alone that resumes elsewhere from a checkpoint"""
    lost_seconds: float = 0.0
    """of work that a move would lose"""
    remaining_seconds: float | None = None
    """for how long it will probably still run, None if that is unknown"""
    notice: str = ""
    """the kind of the eviction notice that it has received, "" without one"""

    @property
    def is_leaving(self) -> bool:
        """Whether it has its notice because its machine is given back to the provider."""
        return self.notice == "give_back"


@dataclass(frozen=True)
class MachineDemand:
    """The demand of one cycle. `pending` is in the order in which the engine would admit it.

    `nodes`: the machines that the engine saw as nodes when it found that `pending` does not fit; a ready machine that
    is not among them offers additional room. `busy`: the number of attempts on each machine. `nominated`: the ready
    machines on which GPUs are reserved for a nominated workload. `placed`: the workers on machines, and `submitted`:
    when each pending workload was submitted (both are filled only for a step that needs them). `sizes`: CPU and memory
    of machines that report them. `devices`: the milli-GPUs of each device that workloads may hold, for the accepting
    machines, None if unknown. `restartable`: the machines of which the engine said that all their jobs would start
    elsewhere at once. `accepting_machines`: those on which the cycle could start work: ready and not cordoned.
    """

    pending: tuple[PendingWork, ...] = ()
    nodes: frozenset[str] = frozenset()
    busy: Mapping[str, int] = field(default_factory=dict)
    nominated: frozenset[str] = frozenset()
    placed: tuple[PlacedWork, ...] = ()
    submitted: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    devices: Mapping[str, Mapping[int, int]] | None = None
    restartable: frozenset[str] = frozenset()
    accepting_machines: frozenset[str] = frozenset()

    def has_work(self, machine: str) -> bool:
        """Whether an attempt is on a machine, or a workload is nominated to it."""
        return self.busy.get(machine, 0) > 0 or machine in self.nominated

    def placed_on(self, machine: str) -> Sequence[PlacedWork]:
        """Return the workers on a machine."""
        return self.placed_by_machine.get(machine, ())

    @cached_property
    def placed_by_machine(self) -> Mapping[str, Sequence[PlacedWork]]:
        """The workers on each machine that has any."""
        result: dict[str, list[PlacedWork]] = {}
        for worker in self.placed:
            result.setdefault(worker.machine, []).append(worker)
        return result

    def has_pending_for(self, pool: str) -> bool:
        """Whether a pending workload may run in a pool."""
        return any(pool in work.pools for work in self.pending)
