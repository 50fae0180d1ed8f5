"""Decide which machines to launch: what waits, minus what exists or is on its way, within all limits.

Work that the engine has nominated to machines on their way takes its room there, before all other work, as the engine
keeps it. Every other pending workload takes room once, over all types and pools: first on machines that drain and may
come back, then on those that are on their way, then on those that this cycle launches, and only then on a new one of
the first type that fits and has room. A workload whose workers do not all get room in one pool launches nothing; some
of them may get it on machines that are ready and idle. Nothing is launched where room is certain to be free before a
new machine would be ready. Machines of other deployments for the same pools count like own ones, so that a need is
served once; in which order deployments launch is up to the caller. Pure; called by `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zoneinfo import ZoneInfo

from .backoff import LaunchBackoff, active_backoff
from .budget import Money, max_ending_seconds, refusal, with_launch
from .demand import MachineDemand, PendingWork
from .deployment import Deployment, MachineType
from .machine import CANCELLABLE, Machine, Market
from .placement.releases import Releases, room_without
from .placement.rooms import MachineRoom, Rooms, TakenRoom, fits_on
from .placement.shared_pools import OtherDeployment

ORDER = {"ready": 0, "draining": 1, "joining": 2, "booting": 3, "requested": 4}
"""Whose room is taken first: of the machine that will be ready first"""


class Launch(NamedTuple):
    """One machine to launch; `price` is for an hour, in millionths of the currency."""

    type: str
    zone: str
    market: Market
    price: int | None


class LaunchRefusal(NamedTuple):
    """Why no machine is launched for a workload ("" for spare machines), with the time when it is tried again.

    `placed`: for how many workers of the workload there was room or a launch before, all of which was undone.
    """

    workload: str
    type: str
    code: str
    until: float | None = None
    placed: int = 0


@dataclass(frozen=True, slots=True)
class Sizing:
    """The decision of a cycle. `needed` are the machines that exist and have a reason to live.

    `served`: the rooms of each workload that gets some, of machines that exist or of launches by their place.
    """

    launches: tuple[Launch, ...]
    needed: frozenset[str]
    unserved: tuple[PendingWork, ...]
    refusals: tuple[LaunchRefusal, ...]
    served: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Sizer:
    """The room that is left while the workloads of one cycle take theirs.

    `idle`: that of machines whose room was counted when the work was found, and which nothing uses.
    """

    deployment: Deployment
    backoffs: Sequence[LaunchBackoff]
    now: float
    money: Money
    total: int
    of_type: Counter[str]
    rooms: Rooms
    releases: Releases
    idle: Rooms
    launches: list[Launch] = field(default_factory=list)
    refusals: list[LaunchRefusal] = field(default_factory=list)
    without_room: set[tuple[object, ...]] = field(default_factory=set)
    served: dict[str, list[MachineRoom]] = field(default_factory=dict)

    def keep(self, work: PendingWork) -> bool:
        """Take room for all workers of a workload where the engine has nominated them, or for none."""
        misses = self.rooms.misses(work.pools)
        taken = [one for machine in work.awaits if (one := self.rooms.take_of(machine, work)) is not None]
        if not taken or len(taken) != work.workers:
            self.rooms.undo(taken, 0, misses)
            return False
        self._serve(work, taken)
        return True

    def _serve(self, work: PendingWork, taken: Iterable[TakenRoom]) -> None:
        for one in taken:
            one.room.used = True
        self.served[work.workload] = [one.room for one in taken]

    def place(self, work: PendingWork) -> bool:
        """Take room for all workers of a workload, or for none; a gang starts in one pool, so all of it there."""
        shape = work.shape
        if shape in self.without_room:
            return False
        launching = self.runs(work)
        taken = self._take(work, launching) if work.workers == 1 else self._take_together(work, launching)
        if taken is None:
            return False
        if not taken:
            self.without_room.add(shape)  # room only shrinks within a cycle
            return False
        self._serve(work, taken)
        return True

    def runs(self, work: PendingWork) -> bool:
        """Whether machines of this deployment run a workload: only some run notebooks."""
        return self.deployment.runs_sessions or not work.session

    def _held(self, work: PendingWork, workers: int) -> bool:
        """Whether so many workers wait for room that is certain to be free before a new machine would be ready."""
        machine_type = next(
            (
                machine_type
                for pool in work.pools
                for machine_type in self.deployment.types_of(pool)
                if fits_on(machine_type, work)
            ),
            None,
        )
        until = (
            None
            if machine_type is None or self.deployment.paused
            else self.releases.take(work, workers, machine_type.name)
        )
        if machine_type is None or until is None:
            return False
        self._refuse(work.workload, machine_type, "soon_free", until)
        return True

    def _take_together(self, work: PendingWork, may_launch: bool) -> list[TakenRoom] | None:
        """Take room for a gang in the first pool with enough of it, else in the first that gets enough by launches."""
        for launching in (False, True) if may_launch else (False,):
            for pool in work.pools:
                taken = self._take(work._replace(pools=(pool,)), launching)
                if taken is None or taken:
                    return taken
        return []

    def _take(self, work: PendingWork, launching: bool) -> list[TakenRoom] | None:
        """Take room for all workers, else return none; None: they wait for room that is certain to be free.

        Idle machines are room for a gang, but for its last worker: the engine would start it there.
        """
        idle, others = list[TakenRoom](), list[TakenRoom]()
        launches, money = len(self.launches), self.money
        several = work.workers > 1
        misses, idle_misses = (rooms.misses(work.pools) if several else {} for rooms in (self.rooms, self.idle))
        for number in range(work.workers):
            if len(idle) < work.workers - 1 and (free := self.idle.take(work)):
                idle.append(free)
                continue
            result = self.rooms.take(work)
            if result is None and launching:
                if len(self.launches) == launches and self._held(work, work.workers - number):
                    for one in (*idle, *others):
                        one.room.used = True
                    return None
                result = self._on_new(work, number)
            if result is not None:
                others.append(result)
            else:
                if idle or others:
                    self.idle.undo(idle, 0, idle_misses)
                    self.rooms.undo(others, len(self.launches) - launches, misses)
                    self._undo(launches, money)
                return []
        return [*idle, *others]

    def _on_new(self, work: PendingWork, placed: int) -> TakenRoom | None:
        """Launch a machine for one worker, where others of the workload have room; the refusals tell how many."""
        before = len(self.refusals)
        for pool in work.pools:
            for machine_type in self.deployment.types_of(pool):
                if not fits_on(machine_type, work):
                    self._refuse(work.workload, machine_type, "too_small")
                elif self.open(machine_type, work.workload):
                    return self.rooms.take_on(MachineRoom.of(machine_type), work)
        self.refusals[before:] = [one._replace(placed=placed) for one in self.refusals[before:]]
        return None

    def open(self, machine_type: MachineType, workload: str = "") -> bool:
        """Launch one machine of a type, in the first market and zone that is not held back, if all limits allow it."""
        if self.deployment.paused:
            return self._refuse(workload, machine_type, "paused")
        if not self.deployment.can_launch:
            return self._refuse(workload, machine_type, "no_provider")
        if self.total >= self.deployment.max_machines or self.of_type[machine_type.name] >= machine_type.max_machines:
            return self._refuse(workload, machine_type, "max_machines")
        seconds = machine_type.spin_up_timeout + machine_type.idle_timeout + max_ending_seconds(self.deployment)
        for market in machine_type.markets():
            price = machine_type.price_in(market)
            if why := refusal(self.deployment, self.money, price, seconds):
                self._refuse(workload, machine_type, why)
                continue
            for zone in machine_type.zones:
                if back := active_backoff(self.backoffs, machine_type.name, zone, market, self.now):
                    self._refuse(workload, machine_type, back.failure, back.until)
                    continue
                self.launches.append(Launch(machine_type.name, zone, market, price))
                self.money = with_launch(self.money, price, seconds)
                self.total += 1
                self.of_type[machine_type.name] += 1
                return True
        return False

    def keep_idle(self, machine_type: MachineType, idle: int) -> None:
        """Launch what is missing of the machines that are kept without work; `idle` of them are ready."""
        spare = [
            room for room in self.rooms.all if room.type == machine_type.name and not room.used and not room.elsewhere
        ]
        wanted = max(0, machine_type.idle_machines(self.now, ZoneInfo(self.deployment.timezone)) - idle)
        for room in spare[:wanted]:
            room.used = True
        for _ in range(wanted - len(spare)):
            if not self.open(machine_type):
                break

    def _undo(self, launches: int, money: Money) -> None:
        for launch in self.launches[launches:]:
            self.total -= 1
            self.of_type[launch.type] -= 1
        del self.launches[launches:]
        self.money = money

    def _refuse(self, workload: str, machine_type: MachineType, code: str, until: float | None = None) -> bool:
        self.refusals.append(LaunchRefusal(workload, machine_type.name, code, until))
        return False


def size(
    deployment: Deployment,
    machines: Iterable[Machine],
    demand: MachineDemand,
    backoffs: Sequence[LaunchBackoff],
    money: Money,
    now: float,
    boot_seconds: Mapping[str, float] | None = None,
    others: Sequence[OtherDeployment] = (),
) -> Sizing:
    """Return the launches of a cycle. `money` is the money of the machines, by `budget.count_money`.

    `boot_seconds`: how long a boot takes, by type, where known: without, no launch is held for room that will be free.
    `others`: the deployments that launch for the same pools.
    """
    rows = [machine for machine in machines if not machine.finished]
    known = [
        _Known(deployment, row, machine_type) for row in rows if (machine_type := deployment.type(row.type)) is not None
    ]
    known += [
        _Known(one.deployment, row, machine_type) for one in others for row, machine_type in one.counted(demand, now)
    ]
    coming = sorted((one for one in known if _has_room(one.machine, demand)), key=_Known.order)
    rooms = Rooms(one.room(deployment, demand) for one in coming)
    releases = Releases(
        [(one.machine, one.type) for one in known], demand, _boots(deployment, others, boot_seconds or {}), now
    )
    ready = [one for one in known if one.machine.accepts_work and _idle(one.machine, demand)]
    idle = Rooms(one.whole(deployment) for one in sorted(ready, key=_Known.order))
    of_type = Counter(row.type for row in rows)
    sizer = _Sizer(deployment, backoffs, now, money, len(rows), of_type, rooms, releases, idle)
    kept = {work.workload for work in demand.pending if work.awaits and sizer.keep(work)}
    rest = (work for work in demand.pending if work.workload not in kept)
    unserved = tuple([work for work in rest if not sizer.place(work) and sizer.runs(work)])
    own_ready = Counter(one.type.name for one in ready if one.deployment is deployment)
    for machine_type in deployment.types:
        sizer.keep_idle(machine_type, own_ready[machine_type.name])
    every = (*rooms.all, *idle.all)
    needed = frozenset(room.machine for room in every if room.used and room.machine and not room.elsewhere)
    refusals = tuple(dict.fromkeys(sizer.refusals))
    return Sizing(tuple(sizer.launches), needed, unserved, refusals, _served(sizer))


class _Known(NamedTuple):
    """A machine of this deployment, or of another one for the same pools, with its type."""

    deployment: Deployment
    machine: Machine
    type: MachineType

    def order(self) -> tuple[int, tuple[int, float, str], str]:
        """Return by what machines are sorted: the same whichever deployment is sized."""
        return ORDER[self.machine.state], self.deployment.preference, self.machine.id

    def whole(self, sized: Deployment) -> MachineRoom:
        """Return its room without any work."""
        room = MachineRoom.of(self.type, self.machine)
        room.elsewhere, room.sessions = self.deployment is not sized, self.deployment.runs_sessions
        return room

    def room(self, sized: Deployment, demand: MachineDemand) -> MachineRoom:
        """Return its room that pending work can take."""
        room = self.whole(sized)
        return room_without(room, demand.placed_on(self.machine.id)) if self.machine.state == "draining" else room


def _boots(
    deployment: Deployment, others: Iterable[OtherDeployment], boot_seconds: Mapping[str, float]
) -> Mapping[str, float]:
    """Return how long a boot takes, by type; where that is not known yet, as long as elsewhere in the same pools."""
    usual = max((seconds for one in others for seconds in one.boot_seconds.values()), default=None)
    if usual is None:
        return boot_seconds
    return {machine_type.name: usual for machine_type in deployment.types} | dict(boot_seconds)


def _served(sizer: _Sizer) -> dict[str, tuple[str | int, ...]]:
    """Return the machines or launches of each workload; rooms of launches were added in their order."""
    places = {id(room): at for at, room in enumerate(one for one in sizer.rooms.all if one.machine is None)}
    return {
        workload: tuple(dict.fromkeys(places[id(room)] if room.machine is None else room.machine for room in rooms))
        for workload, rooms in sizer.served.items()
    }


def _idle(machine: Machine, demand: MachineDemand) -> bool:
    return machine.id in demand.nodes and not demand.has_work(machine.id)


def _has_room(machine: Machine, demand: MachineDemand) -> bool:
    """Whether a machine's room was not counted when the pending work was found, and will be there.

    One whose jobs are to be moved has room beside them until they have their notices.
    """
    if machine.state == "draining" and machine.drain == "move" and demand.has_work(machine.id):
        return not any(job.is_leaving for job in demand.placed_on(machine.id))
    if machine.starting:
        return True
    if machine.state == "ready":
        return machine.id not in demand.nodes and not demand.has_work(machine.id)
    return (
        machine.state == "draining"
        and machine.drain in CANCELLABLE
        and machine.deadline is None
        and not demand.has_work(machine.id)
    )
