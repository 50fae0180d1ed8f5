"""Measure while a simulation runs: use, borrowing, delays, and guarantees that were not served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..engine.snapshot import GPU
from ..store.records import Workload
from .backend import held

HOUR = 3600.0
HOLDING = ("starting", "running", "checkpointing")


@dataclass(frozen=True, slots=True)
class Finished:
    """One job that ended: `delay` is what it took beyond its own work, in seconds; `started` when it first ran."""

    id: str
    team: str
    gpus: int
    submit: float
    started: float
    delay: float


@dataclass(frozen=True, slots=True)
class Moment:
    """Milli-GPUs at one time: held, of them beyond the team's reservation, and waiting."""

    at: float
    used: int
    borrowed: int
    waiting: int


@dataclass(slots=True)
class Team:
    """One team's numbers now, in milli-GPUs; `queued` counts waiting jobs by size.

    `unserved`: milli-GPU seconds that its reservation had room for and waiting jobs did not get.
    """

    reserved: int
    used: int = 0
    queued: dict[int, int] = field(default_factory=dict)
    unserved: float = 0.0
    preempted: int = 0

    def room(self) -> int:
        """Return the milli-GPUs that waiting jobs could use within the reservation, the largest first."""
        remaining = self.reserved - self.used
        served = 0
        for size in sorted(self.queued, reverse=True):
            if size <= remaining:
                fits = min(self.queued[size], remaining // size)
                remaining -= fits * size
                served += fits * size
        return served


class Meter:
    """Integrates over time; called for every change of the store."""

    def __init__(self, reserved: Mapping[str, int], sample: float = HOUR) -> None:
        self.teams = {name: Team(amount) for name, amount in sorted(reserved.items())}
        self.finished: list[Finished] = []
        self.moments: list[Moment] = []
        self.loans: dict[tuple[str, str], float] = {}
        """(borrower, lender) to milli-GPU seconds; the lender "" is what no team reserves."""
        self.preemptions: dict[tuple[str, str], int] = {}
        """(team that left, team it made way for) to how often"""
        self.lost = 0.0
        self.moves = 0
        """how often jobs were moved so that a machine could be given back"""
        self.waiting = 0
        self.waited = 0.0
        """milli-GPU seconds that jobs asked for and waited"""
        self.started: dict[str, float] = {}
        self._now: float | None = None
        self._sample, self._next = sample, 0.0
        self._rooms: dict[str, int] = {}
        self._dirty: set[str] = set()

    def advance(self, now: float, total: int) -> None:
        """Count the time since the last call with what held then."""
        if self._now is None:
            self._now, self._next = now, now
        passed = now - self._now
        for name in self._dirty:
            room = self.teams[name].room()
            if room:
                self._rooms[name] = room
            else:
                self._rooms.pop(name, None)
        self._dirty.clear()
        if passed > 0:
            for name, room in self._rooms.items():
                self.teams[name].unserved += room * passed
            self.waited += self.waiting * passed
            while self._next < now:
                self._take(self._next, total)
                self._next += self._sample
        self._now = now

    def _take(self, at: float, total: int) -> None:
        over = {name: max(0, t.used - t.reserved) for name, t in self.teams.items()}
        idle = {name: max(0, t.reserved - t.used) for name, t in self.teams.items()}
        used = sum(t.used for t in self.teams.values())
        waiting = sum(size * count for t in self.teams.values() for size, count in t.queued.items())
        self.moments.append(Moment(at, used, sum(over.values()), waiting))
        idle[""] = max(0, total - sum(t.reserved for t in self.teams.values()))
        for borrower, amount in over.items():
            for lender in sorted(idle, key=lambda name: (name != "", -idle[name], name)):
                part = min(amount, idle[lender])
                if part:
                    idle[lender] -= part
                    amount -= part
                    key = (borrower, lender)
                    self.loans[key] = self.loans.get(key, 0.0) + part * self._sample

    @property
    def any_waits(self) -> bool:
        """Whether any job waits."""
        return self.waiting > 0 or any(team.queued for team in self.teams.values())

    def submitted(self, row: Workload) -> None:
        """Count a job as waiting."""
        self.queue(row.team or "", held(row), 1)

    def changed(self, before: Workload, after: Workload) -> None:
        """Follow one workload from state to state."""
        if before.state == after.state:
            return
        if before.state == "pending":
            self.queue(before.team or "", held(before), -1)
        elif before.state in HOLDING and after.state not in HOLDING:
            self.use(before.team or "", held(before), -1)
        if after.state == "pending":
            self.queue(after.team or "", held(after), 1)
        elif after.state in HOLDING and before.state not in HOLDING:
            self.use(after.team or "", held(after), 1)
            self.started.setdefault(after.id, after.started_at or 0.0)

    def made_way(self, row: Workload) -> None:
        """Count an eviction, by victim and preemptor."""
        notice = row.notice
        key = (row.team or "", (notice.by_team or "") if notice else "")
        self.preemptions[key] = self.preemptions.get(key, 0) + 1
        self.teams[row.team or ""].preempted += 1

    def queue(self, team: str, size: int, sign: int) -> None:
        """Count a job of `size` milli-GPUs as waiting, or with -1 as not waiting any more."""
        queued = self.teams[team].queued
        queued[size] = queued.get(size, 0) + sign
        self.waiting += sign * size
        if not queued[size]:
            del queued[size]
        self._dirty.add(team)

    def use(self, team: str, size: int, sign: int) -> None:
        """Count GPUs as allocated, or with -1 as released."""
        self.teams[team].used += sign * size
        self._dirty.add(team)

    @property
    def unserved_gpu_hours(self) -> float:
        """Return the GPU-hours that teams had room for inside their reservations, had queued, and did not get."""
        return sum(team.unserved for team in self.teams.values()) / GPU / HOUR
