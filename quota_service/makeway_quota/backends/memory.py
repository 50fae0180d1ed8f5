"""A backend that exists in memory only: for tests, the simulator, and trying out a policy.

Attempts end on command, or after a time on the given clock; notices are followed after a given delay, or ignored
until the deadline; nodes and attempts can be lost, and starts refused. Nothing is executed.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from makeway_api.durations import duration

from ..values import File, Notice
from .base import AttemptStatus, Backend, BackendError, Key, NodeStatus, Observation, Phase, StartOrder
from .versions import ObservationTracker

TERMINAL_PHASES = (Phase.EXITED, Phase.LOST)


@dataclass(slots=True)
class MemoryAttempt:
    """One attempt, with what it was given and what it left."""

    order: StartOrder
    status: AttemptStatus
    notice: Notice | None = None
    log: bytearray = field(default_factory=bytearray)
    result: bytes | None = None
    error: bytes | None = None

    @property
    def files(self) -> tuple[File, ...]:
        """The files of its order."""
        return self.order.files()


class MemoryBackend(Backend):
    """`lasts` says how many seconds an attempt runs (None: until `finish`), `leaves_after` how long saving takes.

    With `real_time` the loop is woken when something is due; on another clock, call `observe` after moving it.
    """

    name = "memory"
    shared = False
    durable_checkpoints = True

    def __init__(
        self,
        nodes: Iterable[NodeStatus] = (),
        *,
        clock: Callable[[], float] = time.time,
        lasts: Callable[[StartOrder], float | None] = lambda order: None,
        leaves_after: float = 0.0,
        starts_after: float = 0.0,
        real_time: bool = False,
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.clock = clock
        self.lasts = lasts
        self.leaves_after = leaves_after
        self.starts_after = starts_after
        self.real_time = real_time
        self.attempts: dict[Key, MemoryAttempt] = {}
        self.forgotten: dict[Key, MemoryAttempt] = {}
        self.refusals: dict[str, str] = {}
        """sentences by workload: starting it raises a BackendError"""
        self.ignoring: set[str] = set()
        """workloads that do not leave when asked to"""
        self.starts = 0
        self.synced = True
        """False: what is shown is not complete yet"""
        self.problem = ""
        """why what is shown may be out of date"""
        self.changes = ObservationTracker()
        self._wake: Callable[[], None] = lambda: None
        self._due: list[tuple[float, int, Key, str]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever `observe` would answer something new."""
        self._wake = wake

    async def open(self) -> None:
        """Nothing has to be reached."""

    async def close(self, *, stop_jobs: bool) -> None:
        """Stop; with `stop_jobs` everything that runs ends at once, or is killed if it ignores notices."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for entry in list(self._running()) if stop_jobs else ():
            if entry.order.workload in self.ignoring:
                self._end(entry, -9, killed=True, notice_received=True)
            else:
                self._end(entry, 75, acknowledged=True, notice_received=True)

    async def observe(self, since: int | None = None) -> Observation:
        """Return the nodes, and the attempts that are not forgotten, after doing what is due."""
        self._happen()
        attempts = {key: attempt.status for key, attempt in self.attempts.items()}
        observation = self.changes.observation(self.nodes, attempts, since, synced=self.synced)
        return replace(observation, problem=self.problem) if self.problem else observation

    async def start(self, order: StartOrder) -> None:
        """Start an attempt exactly once."""
        key = (order.workload, order.attempt)
        if key in self.attempts or key in self.forgotten:
            return
        if order.workload in self.refusals:
            raise BackendError(self.refusals[order.workload])
        for place in order.workers:
            if place.node not in self.nodes:
                raise BackendError(f"There is no node {place.node!r} here.")
        now = self.clock()
        before = self._any(order.workload, order.attempt - 1)
        status = AttemptStatus(order.workload, order.attempt, Phase.STARTING)
        if before is not None:
            status = replace(status, step=before.status.step, checkpoint_at=before.status.checkpoint_at)
        self.attempts[key] = MemoryAttempt(order, status)
        self.starts += 1
        self._later(now + self.starts_after, key, "run")
        self._changed()

    async def notice(self, workload: str, attempt: int, notice: Notice) -> None:
        """Order an attempt to end; a repetition changes nothing, an earlier deadline counts."""
        entry = self.attempts.get((workload, attempt))
        if entry is None or entry.status.phase in TERMINAL_PHASES:
            return
        first = entry.notice is None
        if entry.notice is not None and notice.deadline >= entry.notice.deadline:
            return
        entry.notice = notice
        entry.status = replace(entry.status, notice_received=True, phase=Phase.STOPPING)
        if first and workload not in self.ignoring:
            self._later(self.clock() + self.leaves_after, (workload, attempt), "leave")
        self._later(notice.deadline, (workload, attempt), "deadline")
        self._changed()

    async def kill(self, workload: str, attempt: int) -> None:
        """Stop an attempt now."""
        entry = self.attempts.get((workload, attempt))
        if entry is not None and entry.status.phase not in TERMINAL_PHASES:
            self._end(entry, -9, killed=True, message="stopped")

    async def forget(self, workload: str, attempt: int) -> None:
        """Stop reporting an attempt; what it left stays."""
        if entry := self.attempts.pop((workload, attempt), None):
            self.forgotten[(workload, attempt)] = entry

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Read from an attempt's log."""
        entry = self._any(workload, attempt)
        log = bytes(entry.log) if entry else b""
        return log[offset : offset + size], len(log)

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Nothing is ever dropped from a log here."""
        return None

    async def result(self, workload: str, attempt: int) -> bytes | None:
        """Read what `finish` left as the result."""
        entry = self._any(workload, attempt)
        return entry.result if entry else None

    async def result_part(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return part of what `finish` left as the result, and the size of the whole."""
        whole = await self.result(workload, attempt)
        return None if whole is None else (whole[offset : offset + size], len(whole))

    async def error(self, workload: str, attempt: int) -> bytes | None:
        """Read what `finish` left as the exception."""
        entry = self._any(workload, attempt)
        return entry.error if entry else None

    async def purge(self, workload: str, team: str = "") -> bool:
        """Remove everything kept for a workload."""
        for kept in (self.attempts, self.forgotten):
            for key in [key for key in kept if key[0] == workload]:
                del kept[key]
        return True

    # -- what a test or the simulator makes happen --------------------------------------------------------------

    def finish(
        self,
        workload: str,
        exit_code: int = 0,
        *,
        message: str = "",
        result: bytes | None = None,
        error: bytes | None = None,
    ) -> None:
        """End a workload's newest attempt as its process would."""
        entry = self.newest(workload)
        entry.result, entry.error = result, error
        acknowledged = entry.notice is not None and exit_code == 75
        done = exit_code == 0 and result is not None
        self._end(entry, exit_code, message=message, acknowledged=acknowledged, completed=done)

    def save(self, workload: str, step: int) -> None:
        """Save a checkpoint for a workload."""
        entry = self.newest(workload)
        entry.status = replace(entry.status, step=step, checkpoint_at=self.clock())
        self._changed()

    def say(self, workload: str, text: str) -> None:
        """Write to a workload's log."""
        self.newest(workload).log += text.encode()
        self._changed()

    def lose(self, workload: str) -> None:
        """Remove a workload without a report: it is lost."""
        entry = self.newest(workload)
        entry.status = replace(entry.status, phase=Phase.LOST, ended_at=self.clock(), message="vanished")
        self._changed()

    def lose_node(self, name: str) -> None:
        """Take a node down, with everything on it."""
        self.nodes[name] = replace(self.nodes[name], ready=False)
        for entry in list(self._running()):
            if any(place.node == name for place in entry.order.workers):
                self.lose(entry.order.workload)
        self._changed()

    def node_back(self, name: str) -> None:
        """Bring a node back that was lost, empty."""
        self.nodes[name] = replace(self.nodes[name], ready=True)
        self._changed()

    def newest(self, workload: str) -> MemoryAttempt:
        """Return a workload's newest attempt; KeyError when it never started."""
        keys = [key for key in (*self.attempts, *self.forgotten) if key[0] == workload]
        if not keys:
            raise KeyError(workload)
        return self.attempts.get(max(keys)) or self.forgotten[max(keys)]

    def next_event(self) -> float | None:
        """Return when the next timed event is due, on the given clock."""
        return self._due[0][0] if self._due else None

    # -- inside -------------------------------------------------------------------------------------------------

    def _any(self, workload: str, attempt: int) -> MemoryAttempt | None:
        return self.attempts.get((workload, attempt)) or self.forgotten.get((workload, attempt))

    def _running(self) -> Iterable[MemoryAttempt]:
        return (entry for entry in self.attempts.values() if entry.status.phase not in TERMINAL_PHASES)

    def _later(self, at: float, key: Key, what: str) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, key, what))
        if self.real_time:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            delay = max(0.0, self._due[0][0] - self.clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._happen()
        self._wake()

    def _happen(self) -> None:
        """Do everything that is due."""
        now = self.clock()
        while self._due and self._due[0][0] <= now:
            _, _, key, what = heapq.heappop(self._due)
            entry = self.attempts.get(key)
            if entry is None or entry.status.phase in TERMINAL_PHASES:
                continue
            if what == "run":
                self._run(entry, key, now)
            elif what == "end":
                self._end(entry, 0)
            elif what == "leave":
                self._end(entry, 75, acknowledged=True)
            elif what == "limit":
                message = f"time limit of {duration(entry.order.time_limit or 0.0)} reached"
                self._end(entry, -15, timed_out=True, message=message)
            elif entry.notice is not None and entry.notice.deadline <= now:
                self._end(entry, -9, killed=True, message="did not leave by the deadline and was killed")
        if self.real_time:
            self._arm()

    def _run(self, entry: MemoryAttempt, key: Key, now: float) -> None:
        phase = Phase.STOPPING if entry.notice is not None else Phase.RUNNING
        entry.status = replace(entry.status, phase=phase, started_at=now)
        if (seconds := self.lasts(entry.order)) is not None:
            self._later(now + seconds, key, "end")
        if entry.order.time_limit is not None:
            self._later(now + entry.order.time_limit, key, "limit")

    def _end(self, entry: MemoryAttempt, exit_code: int, *, message: str = "", **facts: bool) -> None:
        """Write down how it ended; `facts` are the true-or-false fields of AttemptStatus."""
        saved = "" if entry.status.step is None else f"saved at step {entry.status.step}"
        entry.status = replace(
            entry.status,
            phase=Phase.EXITED,
            ended_at=self.clock(),
            exit_code=exit_code,
            message=message or saved,
            **{"notice_received": entry.notice is not None, **facts},  # type: ignore[arg-type]
        )
        self._changed()

    def _changed(self) -> None:
        self._wake()
