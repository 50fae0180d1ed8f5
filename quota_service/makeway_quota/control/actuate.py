"""Order the backend and the Hub to do what the store has decided and the backend does not report yet.

Called by the loop. Every order may be repeated, so nothing here has to be remembered over a restart, and every order
is sent only while this replica leads: those of a cycle (`_order`) in the cycle's own term.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..backends.base import (
    AttemptStatus,
    Backend,
    BackendError,
    BackendFull,
    BackendRejected,
    BackendUnavailable,
    Observation,
    Phase,
    StartOrder,
)
from ..engine.snapshot import ADMITTED
from ..quarantine import Quarantine, reason_of
from ..store.errors import FilesUnavailable, FileUnreadable, NotLeading
from ..store.records import Workload
from ..store.store import Store
from ..values import File, Notice
from ..wording import IDS, Names, outcomes
from . import transitions
from .change_set import ChangeSet, job_name
from .hub.servers import HubServers
from .order_retries import OrderRetries, alike, sentence
from .replicas.leader import Leader
from .start_backoff import HELD_PAUSES, MAX_DELAY, NO_ROOM, START_DEFERRED, StartBackoff
from .transitions import TIME_LIMIT

log = logging.getLogger("makeway.actuate")

TAKEOVER_GRACE = 10.0
"""Seconds that a session has at least from when a leader first sees its notice, or its grace if that is shorter."""

ORDERING, REMOVING = "ordering what was decided", "removing what is left of it"
STARTING, NOTICED = "ordering its start", "timing its notice"
MAX_CONCURRENT_STARTS = 48
"""Attempts that a backend elsewhere is ordered to start at the same time."""

ALIVE_PHASES = (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)


@dataclass(slots=True)
class StartResults:
    """The attempts that a cycle has started since it observed, and the starts that failed, for the store."""

    attempts: set[tuple[str, int]] = field(default_factory=set)
    not_to_start: set[tuple[str, int]] = field(default_factory=set)
    """Attempts that are not reported and must not be started again: expected, or lost."""
    postponed: set[tuple[str, int]] = field(default_factory=set)
    """Attempts that a later cycle tries again, as their files or the backend cannot be reached; `reasons` say why."""
    failed: ChangeSet = field(default_factory=ChangeSet)
    reasons: ChangeSet = field(default_factory=ChangeSet)


class Commands:
    """The commands and environments of some rows, read when the first one of a group is needed, each given out once.

    No row in memory has its command. One may be large, so that those of a whole plan are never in memory together.
    """

    def __init__(self, store: Store, rows: Sequence[Workload], at_once: int = 1) -> None:
        self._store = store
        self._groups = [rows[begin : begin + at_once] for begin in range(0, len(rows), at_once)]
        self._group_of = {row.id: number for number, group in enumerate(self._groups) for row in group}
        self._reading: dict[int, asyncio.Task[dict[str, Workload]]] = {}

    async def with_command(self, row: Workload) -> Workload:
        """Return a row with its command and environment; a row that the store does not have comes back as it is."""
        number = self._group_of[row.id]
        if number not in self._reading:
            self._reading[number] = asyncio.create_task(self._read([member.id for member in self._groups[number]]))
        stored = (await asyncio.shield(self._reading[number])).pop(row.id, row)
        return row._replace(command=stored.command, env=stored.env)

    async def _read(self, ids: Sequence[str]) -> dict[str, Workload]:
        return await asyncio.to_thread(self._store.whole_workloads, ids)


class Actuator:
    """Starts, notices, kills and forgets attempts, and stops servers, until the world is as the store has it."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        leader: Leader,
        servers: HubServers | None = None,
        backoff: StartBackoff | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._backend = backend
        self._leader = leader
        self._servers = servers
        if servers is not None:
            servers.fence_with(self.may_act)
        backend.fence_with(self.may_act)
        self._term: int | None = None
        """the term that orders are sent in; None until a cycle takes over"""
        self._monotonic = monotonic
        self._noticed_since: dict[tuple[str, float], float] = {}
        """monotonic seconds since when a session, by id and time of its notice, is noticed"""
        self._noticed: dict[tuple[str, int], float] = {}
        self._failing: dict[tuple[str, int], str] = {}
        self.backoff = backoff or StartBackoff()
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self.retries = OrderRetries(monotonic)
        self._postponed: frozenset[tuple[str, int]] = frozenset()
        """the attempts that the last cycle postponed"""

    def begin_term(self, term: int) -> None:
        """Forget which orders were given: a new term gives them again where the world still needs them."""
        self._term = term
        self._noticed_since.clear()
        self._noticed.clear()
        self._failing.clear()
        self._backend.begin_term()
        self.retries.keep(())

    def may_act(self) -> bool:
        """Whether this replica leads in the term of the last cycle that took over."""
        return self._term is not None and self._leader.term == self._term

    async def start(self, rows: Iterable[Workload], now: float, started: StartResults) -> None:
        """Start at once what was just committed as starting; `actuate` then leaves that alone."""
        due = [row for row in rows if row.kind == "job" and row.state == "starting" and not row.cancel_requested]
        commands = Commands(self._store, due, MAX_CONCURRENT_STARTS if self._backend.shared else 1)
        if not self._backend.shared:
            for row in due:
                started.attempts.add((row.id, row.attempt))
                await self._start_guarded(started, row, now, commands)
            return
        room, errors = asyncio.Semaphore(MAX_CONCURRENT_STARTS), list[Exception]()

        async def start(row: Workload) -> None:
            async with room:  # each waits for the answers of others, not for a processor
                if not errors:
                    started.attempts.add((row.id, row.attempt))
                    try:
                        await self._start_guarded(started, row, now, commands)
                    except Exception as error:  # those under way go on to their end
                        errors.append(error)

        await asyncio.gather(*(start(row) for row in due))
        if errors:
            raise errors[0]

    async def actuate(
        self,
        rows: Mapping[str, Workload],
        observation: Observation,
        now: float,
        started: StartResults,
        names: Names = IDS,
    ) -> ChangeSet:
        """Send all other orders; return what could not be done, for the store.

        `rows` are at least all workloads that may hold GPUs; `names` gives titles to teams.
        """
        change_set = started.failed
        reported = {(a.workload, a.attempt): a for a in observation.attempts}
        for row in rows.values():
            if row.state not in ADMITTED or (row.id, row.attempt) in started.attempts:
                continue  # an attempt that was started in this cycle is not in what was seen
            if row.kind == "job" and not self.quarantine.is_backing_off(ORDERING, "workload", row.id):
                with self.quarantine.guard(ORDERING, "workload", row.id):
                    await self._actuate_job(started, row, reported.get((row.id, row.attempt)), now)
        sessions = [row for row in rows.values() if row.kind == "session" and row.state in ADMITTED]
        with self.quarantine.step("stopping the servers of sessions"):
            self._actuate_sessions(change_set, sessions, now, names)
        for key, attempt in reported.items():
            if not self.quarantine.is_backing_off(REMOVING, "workload", key[0]):
                with self.quarantine.guard(REMOVING, "workload", key[0]):
                    await self._end_leftover(rows.get(key[0]), attempt)
        self._noticed = {key: at for key, at in self._noticed.items() if key in reported}
        self._failing = {key: what for key, what in self._failing.items() if key in reported}
        self._postponed = frozenset(started.postponed)
        self.retries.keep(started.postponed)
        return change_set

    async def purge(self, workload: str, team: str) -> bool:
        """Remove everything that the backend keeps for a workload, which is over in every term; return as it does."""
        async with self._leader.acting():
            return await self._backend.purge(workload, team)

    async def _order(self, order: Callable[[], Awaitable[None]]) -> None:
        """Send one order of a cycle. NotLeading unless this replica leads in the term that the cycle took over."""
        if self._term is None:
            raise NotLeading("this replica has taken over no term")
        async with self._leader.acting(self._term):
            await order()

    async def _actuate_job(
        self, started: StartResults, row: Workload, status: AttemptStatus | None, now: float
    ) -> None:
        key = (row.id, row.attempt)
        if status is None:
            if key in started.not_to_start:
                if row.cancel_requested:
                    await self._try_order("killed", key, lambda: self._backend.kill(*key))
                return
            if row.cancel_requested:
                message = outcomes.cancelled_before_start(job_name(row))
                started.failed.add(*transitions.cancel_before_start(row, message, now))
                return
            await self._start(started, row, now)
            return
        if status.start_broke_off and row.state == "starting" and not row.cancel_requested:
            await self._start(started, row, now)
            return
        if status.phase not in ALIVE_PHASES:
            return
        if row.cancel_requested:
            await self._try_order("killed", key, lambda: self._backend.kill(*key))
            return
        if row.reason_code == TIME_LIMIT:
            await self._try_order("ended at its time limit", key, lambda: self._backend.kill(*key))
            return
        notice = row.notice
        if notice is None or self._noticed.get(key) == notice.at:
            return
        if await self._try_order("given its notice", key, lambda: self._backend.notice(*key, notice)):
            self._noticed[key] = notice.at

    async def _start_guarded(self, started: StartResults, row: Workload, now: float, commands: Commands) -> None:
        """Start one attempt; one that cannot be ordered is quarantined, and ordered again later."""
        with self.quarantine.guard(ORDERING, "workload", row.id):
            await self._start(started, row, now, commands)

    async def _start(self, started: StartResults, row: Workload, now: float, commands: Commands | None = None) -> None:
        key = (row.id, row.attempt)
        if row.not_before is not None:
            self.retries.postpone(key, min(row.not_before - now, max(HELD_PAUSES)))
        if self.retries.wait(key):
            started.postponed.add(key)
            return
        try:
            whole = await (commands or Commands(self._store, [row])).with_command(row)
            order = self._start_order(whole)
            await self._order(lambda: self._backend.start(order))
            self.quarantine.passed(STARTING, "workload", row.id)
        except BackendFull as error:
            log.warning("%s returns to the queue: %s", job_name(row), error)
            started.postponed.add(key)
            started.failed.add(*self.backoff.requeue(row, job_name(row), sentence(error), now, NO_ROOM))
        except (FilesUnavailable, BackendUnavailable) as error:
            if key not in self._postponed:
                log.warning("%s is started later: %s", job_name(row), error)
            started.postponed.add(key)
            if isinstance(error, BackendRejected):
                self.retries.refused(key)
            message = outcomes.start_postponed(job_name(row), sentence(error))
            if not alike(row.reason_message, message):
                started.reasons.add(*transitions.retry_launch(row, "start_postponed", message))
        except (BackendError, OSError) as error:
            message = outcomes.could_not_start(job_name(row), sentence(error))
            started.failed.add(*transitions.fail_to_start(row, message, now))
        except Exception as error:  # an error of Makeway's own: others get its GPUs until it is tried again
            self.quarantine.failed(STARTING, "workload", row.id, error, MAX_DELAY)
            started.postponed.add(key)
            started.failed.add(*self.backoff.requeue(row, job_name(row), reason_of(error), now, START_DEFERRED))

    def _start_order(self, row: Workload) -> StartOrder:
        def files() -> tuple[File, ...]:
            try:
                return self._store.files(row.id)
            except FileUnreadable as error:
                raise BackendError(str(error)) from error

        return StartOrder(
            workload=row.id,
            attempt=row.attempt,
            name=row.name,
            owner=row.owner,
            team=row.team or "",
            profile=row.profile,
            command=row.command,
            env=row.env,
            workers=row.placement,
            grace=row.grace,
            signal=row.signal,
            time_limit=row.time_limit,
            image=row.image,
            cpu=row.cpu,
            memory=row.memory,
            admitted_at=row.started_at,
            preemptible=row.preemptible,
            files=files,
        )

    def _actuate_sessions(self, change_set: ChangeSet, rows: Iterable[Workload], now: float, names: Names) -> None:
        """Stop the servers of preemptible sessions whose notice has run out.

        A session holds its GPUs until the Hub lists its server no more. Without a Hub there is no server to wait for.
        """
        late = self._sessions_past_notice(rows, now)
        gone = set(late)
        if self._servers is not None:
            gone = self._servers.stop({id: (row.owner, row.server) for id, row in late.items()})
        for row in (late[id] for id in sorted(gone)):
            with self.quarantine.guard(ORDERING, "workload", row.id):
                self._end_session(change_set, row, now, names)

    def _end_session(self, change_set: ChangeSet, row: Workload, now: float, names: Names) -> None:
        """End a session whose notice has run out, and whose server is gone."""
        notice = row.notice
        by_owner, by_team = (notice.by_owner, notice.by_team) if notice else (None, None)
        by = outcomes.preemptor(by_owner, by_team and names.team(by_team))
        message = outcomes.session_made_way(row.owner, by, row.size)
        change_set.add(*transitions.release(row, "release", "made_way", message, now))

    def _sessions_past_notice(self, rows: Iterable[Workload], now: float) -> dict[str, Workload]:
        """Return the sessions whose grace is over, by id.

        The grace is counted on the monotonic clock from when this replica first saw the notice in its term, so that a
        clock that jumps stops no server early. What had passed by then comes from the time that the notice was
        written with: a new leader grants the rest of the grace, not a second one, but at least TAKEOVER_GRACE of it,
        because its clock may be ahead of the one that the notice was written with.
        """
        at = self._monotonic()
        noticed = {row.id: (row, row.notice) for row in rows if row.notice is not None}
        known, self._noticed_since = self._noticed_since, {}
        late: dict[str, Workload] = {}
        for id, (row, notice) in noticed.items():
            with self.quarantine.guard(NOTICED, "workload", id):
                since = known.get((id, notice.at), at - _grace_passed(notice, now))
                self._noticed_since[id, notice.at] = since
                if at - since >= notice.deadline - notice.at:
                    late[id] = row
        return late

    async def _end_leftover(self, row: Workload | None, status: AttemptStatus) -> None:
        """Stop and forget an attempt that is over in the store, or not in it at all."""
        if row is not None and row.attempt == status.attempt and row.state in ADMITTED:
            return
        key = (status.workload, status.attempt)
        if status.phase in ALIVE_PHASES and not status.start_broke_off:
            if key not in self._failing:
                log.warning("Attempt %s of %s runs but should not: it is stopped", status.attempt, status.workload)
            await self._try_order("stopped", key, lambda: self._backend.kill(*key))
        else:
            await self._try_order("forgotten", key, lambda: self._backend.forget(*key))

    async def _try_order(self, what: str, key: tuple[str, int], order: Callable[[], Awaitable[None]]) -> bool:
        """Send an order about one attempt; one that fails is repeated in the next cycle and hinders no other."""
        try:
            await self._order(order)
        except (BackendError, OSError) as error:
            if self._failing.get(key) != what:
                log.warning("Attempt %s of %s could not be %s: %s", key[1], key[0], what, sentence(error))
            self._failing[key] = what
            return False
        self._failing.pop(key, None)
        return True


def _grace_passed(notice: Notice, now: float) -> float:
    """Return the seconds of a grace that had passed when the notice was first seen; never the last TAKEOVER_GRACE."""
    grace = notice.deadline - notice.at
    return max(0.0, min(now - notice.at, grace - TAKEOVER_GRACE))
