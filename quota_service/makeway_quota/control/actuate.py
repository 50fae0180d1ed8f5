"""What the backend is told, worked out from the store and from what the backend reports.

Every order may be repeated, so nothing here has to be remembered over a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..backends.base import (
    AttemptSeen,
    Backend,
    BackendError,
    JobFile,
    NoticeOrder,
    Phase,
    Seen,
    StartOrder,
    WorkerPlace,
)
from ..store.records import Change, Notice, Workload
from ..store.store import Store
from .hub_client import HubApi, HubUnreachable
from .leases import end_session
from .reconcile import HOLDS, ChangeSet, decide

log = logging.getLogger("makeway.orders")

ALIVE = (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)


@dataclass(slots=True)
class Started:
    """The attempts that a cycle has started since it looked, and what of it could not be done, for the store."""

    attempts: set[tuple[str, int]] = field(default_factory=set)
    expected: set[tuple[str, int]] = field(default_factory=set)
    """Attempts that are not reported and must not be started again: expected, or lost."""
    failed: ChangeSet = field(default_factory=ChangeSet)


class Actuator:
    """Starts, notices, kills and forgets whatever the store say that the machines do not yet do."""

    def __init__(self, store: Store, backend: Backend, hub: HubApi | None) -> None:
        self._store = store
        self._backend = backend
        self._hub = hub
        self._noticed: dict[tuple[str, int], float] = {}
        self._failing: dict[tuple[str, int], str] = {}

    async def begin(self, rows: Iterable[Workload], now: float, started_now: Started) -> None:
        """Start at once what was just written to be starting; `give` then leaves that alone."""
        for row in rows:
            if row.kind == "job" and row.state == "starting" and not row.cancel_requested:
                started_now.attempts.add((row.id, row.attempt))
                await self._start(started_now.failed, row, now)

    async def give(self, rows: Mapping[str, Workload], seen: Seen, now: float, started_now: Started) -> ChangeSet:
        """Tell the backend everything else; answer what could not be done, for the store.

        `rows` are at least all that may hold something.
        """
        change_set = started_now.failed
        reported = {(a.workload, a.attempt): a for a in seen.attempts}
        for row in rows.values():
            if row.state not in HOLDS or (row.id, row.attempt) in started_now.attempts:
                continue  # what was started_now a moment ago is not in what was seen
            if row.kind == "session":
                await self._session(change_set, row, now)
            else:
                await self._job(change_set, row, reported.get((row.id, row.attempt)), now, started_now.expected)
        for key, attempt in reported.items():
            await self._leftover(rows.get(key[0]), attempt)
        self._noticed = {key: at for key, at in self._noticed.items() if key in reported}
        self._failing = {key: what for key, what in self._failing.items() if key in reported}
        return change_set

    async def _job(
        self,
        change_set: ChangeSet,
        row: Workload,
        seen: AttemptSeen | None,
        now: float,
        expected: Collection[tuple[str, int]],
    ) -> None:
        if seen is None:
            if (row.id, row.attempt) in expected:
                if row.cancel_requested:
                    await self._told("killed", (row.id, row.attempt), self._backend.kill(row.id, row.attempt))
                return
            if row.cancel_requested:
                message = f"{row.name or row.id} of {row.owner} was cancelled before it started."
                change_set.add(_ended(row, now, "cancelled", message), decide(row, "cancel", "cancelled", message))
                return
            await self._start(change_set, row, now)
            return
        if seen.phase not in ALIVE:
            return
        key = (row.id, row.attempt)
        if row.cancel_requested:
            await self._told("killed", key, self._backend.kill(*key))
            return
        notice = row.notice
        if notice is None or self._noticed.get(key) == notice.at:
            return
        if await self._told("given its notice", key, self._backend.notice(*key, _notice(notice))):
            self._noticed[key] = notice.at

    async def _start(self, change_set: ChangeSet, row: Workload, now: float) -> None:
        try:
            await self._backend.start(self._order(row))
        except (BackendError, OSError) as error:
            message = f"{row.name or row.id} of {row.owner} could not be started: {_said(error)}"
            change_set.add(_ended(row, now, "failed", message), decide(row, "fail", "could_not_start", message))

    def _order(self, row: Workload) -> StartOrder:
        def files() -> tuple[JobFile, ...]:
            return tuple(JobFile(f.path, f.data, f.executable) for f in self._store.files(row.id))

        return StartOrder(
            workload=row.id,
            attempt=row.attempt,
            name=row.name,
            owner=row.owner,
            team=row.team or "",
            profile=row.profile,
            command=row.command,
            env=row.env,
            workers=tuple(WorkerPlace(p.node, p.devices, p.milli) for p in row.placement),
            grace=row.grace,
            signal=row.signal,
            time_limit=row.time_limit,
            image=row.image,
            files=files,
        )

    async def _session(self, change_set: ChangeSet, row: Workload, now: float) -> None:
        """A preemptible session that had its notice: at the deadline its server is stopped through the Hub."""
        if row.notice is None or now < row.notice.deadline:
            return
        message = f"{row.owner}'s preemptible session made way for {row.notice.by_team or 'other work'}."
        if self._hub is not None:
            try:
                await self._hub.stop_server(row.owner, row.server)
            except HubUnreachable as error:
                log.warning("The session of %s could not be stopped: %s", row.owner, error)
                return
        change_set.add(end_session(row, now, "made_way", message), decide(row, "release", "made_way", message))

    async def _leftover(self, row: Workload | None, seen: AttemptSeen) -> None:
        """An attempt that the store know to be over, or do not know at all."""
        if row is not None and row.attempt == seen.attempt and row.state in HOLDS:
            return
        key = (seen.workload, seen.attempt)
        if seen.phase in ALIVE:
            if key not in self._failing:
                log.warning("Attempt %s of %s runs but should not: it is stopped", seen.attempt, seen.workload)
            await self._told("stopped", key, self._backend.kill(*key))
        else:
            await self._told("forgotten", key, self._backend.forget(*key))

    async def _told(self, what: str, key: tuple[str, int], order: Awaitable[None]) -> bool:
        """Give an order about one attempt; where it cannot be done all others go on, and it is given again."""
        try:
            await order
        except (BackendError, OSError) as error:
            if self._failing.get(key) != what:
                log.warning("Attempt %s of %s could not be %s: %s", key[1], key[0], what, _said(error))
            self._failing[key] = what
            return False
        self._failing.pop(key, None)
        return True


def _said(error: Exception) -> str:
    """What an error says to people: of the system's own only the words, and the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _notice(notice: Notice) -> NoticeOrder:
    return NoticeOrder(
        reason=notice.reason,
        by_team=notice.by_team,
        by_owner=notice.by_owner,
        by_workload=notice.by_workload,
        at=notice.at,
        deadline=notice.deadline,
        rehearsal=notice.kind == "rehearsal",
    )


def _ended(row: Workload, now: float, state: str, message: str) -> Change:
    fields: dict[str, object] = {
        "state": state,
        "ended_at": now,
        "placement": (),
        "nomination": (),
        "notice": None,
        "evicted_for": None,
        "message": message,
        "reason_code": "could_not_start" if state == "failed" else state,
        "reason_message": message,
        "over_quota": False,
    }
    return Change(
        row.id, fields, row.version, HOLDS, close_attempt={"ended_at": now, "outcome": state, "message": message}
    )
