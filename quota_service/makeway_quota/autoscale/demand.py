"""Define what a cycle knows of the work that machines are for: what waits, what runs where, what is about to start.

The service makes it from the engine's plan; the amounts are the engine's: milli-GPUs, milli-cores, MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class PendingWork(NamedTuple):
    """A workload that has no room on the nodes that exist: so many workers of one shape, in some pools in order.

    The workers need room together. A worker takes part of one GPU (less than 1000) or whole ones.
    """

    workload: str
    pools: tuple[str, ...]
    workers: int = 1
    gpus: int = 0
    cpu: int = 0
    memory: int = 0
    models: tuple[str, ...] = ()
    """whose GPUs suit; none: of any"""
    session: bool = False
    """whether it is a notebook, which machines that agents join do not run"""
    awaits: tuple[str, ...] = ()
    """where the engine has all of its workers start once machines are ready that boot, one name for each; `workers` are
    those that start on these machines"""

    @property
    def shape(self) -> tuple[object, ...]:
        """What two workloads have in common that fit into the same room."""
        return self[1:-1]


class PlacedWork(NamedTuple):
    """A worker that holds room of a machine: `milli` on each of some devices, CPU and memory."""

    workload: str
    machine: str
    devices: tuple[int, ...] = ()
    milli: int = 0
    cpu: int = 0
    memory: int = 0
    ends_at: float | None = None
    """when its room is certainly free, as its time is limited; None where that is not known"""
    since: float = 0.0
    """when its attempt began"""
    movable: bool = False
    """whether it is a preemptible job on this machine alone, and goes on elsewhere from what it has saved"""
    lost: float = 0.0
    """seconds of work that a move would lose"""
    remaining: float | None = None
    """seconds that it probably still runs, None where that is not known"""
    notice: str = ""
    """the kind of its notice to save and leave, "" without one"""

    @property
    def leaves(self) -> bool:
        """Whether it has its notice because its machine is given back."""
        return self.notice == "give_back"


@dataclass(frozen=True)
class MachineDemand:
    """The work of one cycle. `pending` is in the order of rights.

    `nodes`: the machines whose room was counted when `pending` was found; one that is ready and not among them has room
    besides. `busy`: how much work has rows on each machine; `nominated`: ready machines that keep room for work.
    `placed`: what holds the room of machines, `submitted`: when pending work was, both only where a step asks for them.
    `sizes`: CPU and memory of machines, where they report them. `devices`: the milli-GPUs that work may hold of each
    device of machines that take work, where that is known. `restartable`: the machines whose jobs would all start
    elsewhere at once, as the engine was asked. `open_machines`: those on which the cycle could start work.
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
    open_machines: frozenset[str] = frozenset()

    def used(self, machine: str) -> bool:
        """Whether work has a row on a machine, or is about to."""
        return self.busy.get(machine, 0) > 0 or machine in self.nominated

    def on(self, machine: str) -> Sequence[PlacedWork]:
        """Return what holds room of a machine."""
        return self.by_machine.get(machine, ())

    @cached_property
    def by_machine(self) -> Mapping[str, Sequence[PlacedWork]]:
        """What holds room of each machine that has work."""
        result: dict[str, list[PlacedWork]] = {}
        for one in self.placed:
            result.setdefault(one.machine, []).append(one)
        return result

    def waits_for(self, pool: str) -> bool:
        """Whether work waits that a machine of a pool could run, or is about to start in it."""
        return any(pool in one.pools for one in self.pending)
