"""The nodes of a simulation: which attempts run since when, which save, and which have ended."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ..backends.base import AttemptStatus, Phase
from ..store.records import Workload
from .trace import Arrival

SAVED_EXIT_CODE = 75
"""The exit code of a job that saved and left."""


@dataclass(slots=True)
class Work:
    """One job and how much of it is left. `since`: it does useful work since then (None: it does not run)."""

    arrival: Arrival
    remaining: float
    since: float | None = None
    attempt: int = 0
    lost: float = 0.0
    """milli-GPU seconds that were spent on saving and starting again"""
    machine_leaves: bool = False
    """whether it saves as its machine is ended"""


class SimulatedBackend:
    """Runs jobs on a clock that jumps. `grace`: seconds to save after a notice; `restart`: to load again."""

    def __init__(self, grace: float, restart: float) -> None:
        self.grace, self.restart = grace, restart
        self.work: dict[str, Work] = {}
        self._ends: list[tuple[float, str, int, bool]] = []

    def submit(self, arrival: Arrival) -> None:
        """Take a job that may be started later."""
        self.work[arrival.id] = Work(arrival, arrival.duration)

    def start(self, row: Workload, now: float) -> None:
        """Start an attempt; from the second one on it loads its checkpoint first."""
        work = self.work[row.id]
        load = self.restart if work.attempt else 0.0
        work.attempt = row.attempt
        work.since = now + load
        work.lost += load * held(row)
        if work.arrival.until is None:
            heapq.heappush(self._ends, (now + load + work.remaining, row.id, row.attempt, False))

    def notice(self, row: Workload, now: float, *, machine_leaves: bool = False) -> None:
        """Stop working, save, and leave when that is done. `machine_leaves`: as its machine is ended."""
        work = self.work[row.id]
        if work.since is None or work.attempt != row.attempt:
            return
        work.machine_leaves = machine_leaves
        work.remaining -= max(0.0, now - work.since)
        if now < work.since:
            work.lost -= (work.since - now) * held(row)
        work.since = None
        work.lost += self.grace * held(row)
        heapq.heappush(self._ends, (now + self.grace, row.id, row.attempt, True))

    def next_at(self) -> float | None:
        """Return when the next attempt is over."""
        while self._ends and not self._current(*self._ends[0][1:]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def over(self, now: float) -> list[AttemptStatus]:
        """Report the attempts that are over by now."""
        result = []
        while self._ends and self._ends[0][0] <= now:
            at, id, attempt, notice_received = heapq.heappop(self._ends)
            if self._current(id, attempt, notice_received):
                result.append(self._report(id, attempt, at, notice_received))
        return result

    def _current(self, id: str, attempt: int, notice_received: bool) -> bool:
        work = self.work.get(id)
        return work is not None and work.attempt == attempt and (work.since is None) is notice_received

    def _report(self, id: str, attempt: int, at: float, notice_received: bool) -> AttemptStatus:
        work = self.work[id]
        if notice_received:
            work.attempt = -attempt
            return AttemptStatus(
                id,
                attempt,
                Phase.EXITED,
                ended_at=at,
                exit_code=SAVED_EXIT_CODE,
                acknowledged=True,
                notice_received=True,
                checkpoint_at=at,
                node_lost=work.machine_leaves,
            )
        return AttemptStatus(id, attempt, Phase.EXITED, ended_at=at, exit_code=0, completed=True)

    def forget(self, id: str) -> Work:
        """Remove a job that has ended, and return it."""
        return self.work.pop(id)


def held(row: Workload) -> int:
    """Return the milli-GPUs that a workload holds or requests."""
    return row.size
