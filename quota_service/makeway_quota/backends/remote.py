"""Run attempts whose workers are no processes of the service: they speak the attempt protocol, through a channel.

`RemoteBackend` is the part that all such backends share: what workers report and send comes from the channel, and
orders reach them as the store has them, whichever replica they ask. A subclass starts and removes machines (pods,
processes elsewhere). A worker that is not heard of for `lost_after` is lost; that says nothing about its job.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from .base import AttemptSeen, Key, NodeSeen, NoticeOrder, Phase, Seen, StartOrder
from .versions import Changes

LOST_AFTER = 120.0
"""Seconds of silence after which a worker is lost."""
REPORT_WITHIN = 300.0
"""Seconds within which all workers of an attempt have to report, once their machines wait for nothing."""
PATIENCE = 15.0
"""Seconds after a deadline or a kill for which a worker may report its end itself before its machine is removed."""


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """What one worker reported; times are Unix seconds."""

    silent: float
    """seconds since it was heard of, counted while the service could hear"""
    started_at: float | None = None
    step: int | None = None
    saved_at: float | None = None
    noticed: bool = False
    ended_at: float | None = None
    exit_code: int | None = None
    killed: bool = False
    acknowledged: bool = False
    completed: bool = False
    timed_out: bool = False
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether it reported its end."""
        return self.exit_code is not None


class Channel(Protocol):
    """The way to the workers: what they report and send, and their credentials."""

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a worker reports something new."""

    async def refresh(self) -> bool:
        """Read what workers reported to any replica; return whether there is something new."""

    def seen(self) -> Mapping[Key, Mapping[int, WorkerSeen]]:
        """Return the workers that were heard of, by attempt and number."""

    async def forget(self, workload: str, attempt: int) -> None:
        """Drop the reports of an attempt whose end is recorded; what it sent stays."""

    def credentials(self, workload: str, attempt: int, worker: int) -> tuple[str, str]:
        """Return the path below the service's address that a worker has to itself, and its first token."""

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Return as `Backend.log`."""

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return as `Backend.log_gap`."""

    async def output(self, workload: str, attempt: int, kind: str, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return bytes of a result or an exception and the size of the whole; None without one."""


@dataclass(slots=True)
class Machines:
    """The machines of one attempt as a subclass sees them."""

    workers: int
    present: bool = True
    """False: none of them is there any more"""
    node_lost: bool = False
    """with absence: the node is gone, so that it says nothing about the job"""
    waiting_reason: str = ""
    message: str = ""


@dataclass(slots=True)
class _Ending:
    """An end that was ordered: from when on the machines are removed (monotonic), and the notice, None for a kill."""

    remove_at: float
    notice: NoticeOrder | None = None
    removed: bool = False


@dataclass(slots=True)
class _Known:
    """What this process remembers of attempts; another one finds it again."""

    endings: dict[Key, _Ending] = field(default_factory=dict)
    absent_since: dict[Key, float] = field(default_factory=dict)
    unheard_since: dict[Key, float] = field(default_factory=dict)
    """when the machines of attempts were there first, with workers that have not reported yet"""
    lost: dict[Key, AttemptSeen] = field(default_factory=dict)


class RemoteBackend(ABC):
    """A backend whose workers are reached by a channel; see `base.Backend` for what each method guarantees."""

    name = "remote"
    shared = True

    def __init__(
        self,
        lost_after: float = LOST_AFTER,
        report_within: float = REPORT_WITHIN,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.lost_after = lost_after
        self.report_within = report_within
        self._monotonic = monotonic
        self._clock = clock
        self._known = _Known()
        self._changes = Changes()
        self.channel: Channel

    # -- what a subclass does

    @abstractmethod
    async def nodes(self) -> Mapping[str, NodeSeen]:
        """Return the nodes by name."""

    @abstractmethod
    async def machines(self) -> Mapping[Key, Machines]:
        """Return the machines of the attempts that were started and not removed since."""

    @abstractmethod
    async def start(self, order: StartOrder) -> None:
        """Start an attempt's machines exactly once, however often it is ordered."""

    @abstractmethod
    async def remove(self, workload: str, attempt: int) -> None:
        """Remove an attempt's machines with everything on them; a repetition does nothing."""

    # -- the protocol

    def connect(self, channel: Channel) -> None:
        """Use this channel; called once, before `open`."""
        self.channel = channel

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a worker reports something new."""
        self.channel.on_change(wake)

    async def open(self) -> None:
        """Read what workers reported to an earlier process."""
        await self.channel.refresh()

    async def close(self, *, stop_jobs: bool) -> None:  # noqa: B027 (nothing to close here)
        """Stop observing; workers go on without this replica."""

    async def observe(self, since: int | None = None) -> Seen:
        """Return the nodes, and the attempts that have machines or that a worker reported about."""
        await self.channel.refresh()
        machines, reported = await self.machines(), self.channel.seen()
        attempts = {key: self._seen(key, machines.get(key), reported.get(key, {})) for key in {**machines, **reported}}
        for key in [key for key, ending in self._known.endings.items() if self._due(key, ending, attempts)]:
            self._known.endings[key].removed = True
            await self.remove(*key)
        known = self._known
        for by_key in (known.endings, known.absent_since, known.unheard_since, known.lost):
            for key in [key for key in by_key if key not in attempts]:
                del by_key[key]
        return self._changes.seen(await self.nodes(), attempts, since)

    async def notice(self, workload: str, attempt: int, notice: NoticeOrder) -> None:
        """Remove the machines some time after the deadline; the workers read their notice from the store themselves."""
        remove_at = self._monotonic() + max(0.0, notice.deadline - notice.at) + PATIENCE
        self._order_end((workload, attempt), _Ending(remove_at, notice))

    async def kill(self, workload: str, attempt: int) -> None:
        """Remove the machines unless the workers end by themselves soon: they read from the store that they must."""
        self._order_end((workload, attempt), _Ending(self._monotonic() + PATIENCE))

    async def forget(self, workload: str, attempt: int) -> None:
        """Remove the machines and stop reporting the attempt."""
        await self.remove(workload, attempt)
        await self.channel.forget(workload, attempt)

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Return bytes of the log that the workers sent."""
        return await self.channel.log(workload, attempt, offset, size)

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return the bytes of a very long log that were dropped."""
        return await self.channel.log_gap(workload, attempt)

    async def result(self, workload: str, attempt: int) -> bytes | None:
        """Return the result that a worker sent, or None."""
        return await self._whole(workload, attempt, "result")

    async def result_part(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return part of the result and the size of the whole."""
        return await self.channel.output(workload, attempt, "result", offset, size)

    async def error(self, workload: str, attempt: int) -> bytes | None:
        """Return the JSON about the exception that a worker sent, or None."""
        return await self._whole(workload, attempt, "error")

    async def purge(self, workload: str) -> None:  # noqa: B027 (not every backend keeps something itself)
        """Remove nothing: what workers sent goes with the workload's row."""

    # -- inside

    async def _whole(self, workload: str, attempt: int, kind: str) -> bytes | None:
        parts: list[bytes] = []
        while (part := await self.channel.output(workload, attempt, kind, sum(map(len, parts)), 2**20)) is not None:
            parts.append(part[0])
            if not part[0]:
                return b"".join(parts)
        return None

    def _order_end(self, key: Key, ending: _Ending) -> None:
        known = self._known.endings.get(key)
        if known is None or ending.remove_at < known.remove_at:
            self._known.endings[key] = ending

    def _due(self, key: Key, ending: _Ending, attempts: Mapping[Key, AttemptSeen]) -> bool:
        seen = attempts.get(key)
        alive = seen is not None and seen.phase not in (Phase.EXITED, Phase.LOST)
        return alive and not ending.removed and self._monotonic() >= ending.remove_at

    def _seen(self, key: Key, machines: Machines | None, workers: Mapping[int, WorkerSeen]) -> AttemptSeen:
        """Return the report of an attempt; one that is lost stays so, whatever its workers report later."""
        if key in self._known.lost:
            return self._known.lost[key]
        seen = attempt_of(key, workers, machines.workers if machines else 0)
        if seen.phase is Phase.EXITED:
            return seen
        now, known = self._monotonic(), self._known
        ending = known.endings.get(key)
        if machines is None or not machines.present:
            patience = 0.0 if ending is not None and ending.removed else PATIENCE
            if now - known.absent_since.setdefault(key, now) >= patience:
                return self._absent(key, seen, machines, ending)
        else:
            known.absent_since.pop(key, None)
            seen = replace(seen, waiting_reason=machines.waiting_reason, message=machines.message or seen.message)
            if len(workers) >= machines.workers or machines.waiting_reason:
                known.unheard_since.pop(key, None)
            elif now - known.unheard_since.setdefault(key, now) >= self.report_within:
                message = f"not all of its workers reported within {self.report_within:g} s"
                return self._lose(key, seen, message, node_lost=False)
        silent = [number for number, worker in workers.items() if not worker.ended and worker.silent >= self.lost_after]
        if silent:
            message = f"worker {silent[0]} was not heard of for {self.lost_after:g} s"
            return self._lose(key, seen, message, node_lost=True)
        return seen

    def _absent(self, key: Key, seen: AttemptSeen, machines: Machines | None, ending: _Ending | None) -> AttemptSeen:
        """Return the end of an attempt without machines whose workers did not report it."""
        if ending is not None:
            message = "did not end in time and was killed" if ending.notice else "stopped"
            ended = replace(
                seen, phase=Phase.EXITED, ended_at=self._clock(), exit_code=-9, killed=True, message=message
            )
            self._known.lost[key] = ended
            return ended
        node_lost = machines is not None and machines.node_lost
        return self._lose(key, seen, "its worker vanished without a report", node_lost=node_lost)

    def _lose(self, key: Key, seen: AttemptSeen, message: str, *, node_lost: bool) -> AttemptSeen:
        lost = replace(seen, phase=Phase.LOST, ended_at=self._clock(), message=message, node_lost=node_lost)
        self._known.lost[key] = lost
        return lost


def attempt_of(key: Key, workers: Mapping[int, WorkerSeen], size: int) -> AttemptSeen:
    """Return what the reports of the workers of one attempt mean together; `size` 0: as many as reported.

    It runs when all do, and is over when all are; a failure of one worker is that of the attempt.
    """
    found = [workers[number] for number in sorted(workers)]
    whole = len(found) >= max(1, size)
    saved = max((w for w in found if w.saved_at is not None), key=lambda w: w.saved_at or 0.0, default=None)
    seen = AttemptSeen(
        *key,
        phase=Phase.STARTING,
        started_at=min((w.started_at for w in found if w.started_at is not None), default=None),
        noticed=any(w.noticed for w in found),
        step=None if saved is None else saved.step,
        checkpoint_at=None if saved is None else saved.saved_at,
    )
    if whole and all(w.ended for w in found):
        return _over(seen, found)
    if whole and all(w.started_at is not None or w.ended for w in found):
        return replace(seen, phase=Phase.STOPPING if seen.noticed else Phase.RUNNING)
    return seen


def exit_code_of(codes: list[int]) -> int:
    """Return an attempt's exit code: a worker's own failure first, then a kill, then 75 (saved and ended)."""
    failed = [code for code in codes if code not in (0, 75, -9)]
    return failed[0] if failed else min(codes) if -9 in codes else max(codes)


def _over(seen: AttemptSeen, found: list[WorkerSeen]) -> AttemptSeen:
    code = exit_code_of([w.exit_code or 0 for w in found])
    says = next((w for w in found if w.exit_code == code and w.message), None)
    return replace(
        seen,
        phase=Phase.EXITED,
        ended_at=max(w.ended_at or 0.0 for w in found),
        exit_code=code,
        killed=any(w.killed for w in found),
        acknowledged=any(w.acknowledged for w in found) and all(w.acknowledged or w.exit_code == 0 for w in found),
        completed=code == 0 and any(w.completed for w in found),
        timed_out=any(w.timed_out for w in found),
        message="" if says is None else says.message,
    )
