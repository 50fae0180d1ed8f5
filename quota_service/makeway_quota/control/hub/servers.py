"""Track which notebook servers run, and stop servers, without the scheduling cycle ever waiting for the Hub.

The cycle asks `state` and `stop` and gets an answer at once, from what is known; tasks of this module ask the Hub, with
timeouts and a bounded number of requests at a time, and wake the loop when they know more. A server counts as stopped
only when the Hub lists it no more: an answer of 202 means that it is still stopping, and holds its GPUs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...backends.base import TerminationProgress
from ...quarantine import Quarantine
from ...wording import duration
from .client import HubApi, HubUnreachable, HubUnreadable

log = logging.getLogger("makeway.hub")

Server = tuple[str, str]
"""User and server name ("" is the default server)."""

State = Literal["active", "gone", "unreachable", "unknown"]

MAX_CONCURRENT_REQUESTS = 8
"""Requests to the Hub at a time."""

MAX_SINGLE_REQUESTS = 10
"""Users that are requested one by one; for more, the whole list is read."""

STOP_RETRY = 30.0
"""Seconds after which a server that still runs is stopped once more."""

ERROR_RETRY = 5.0
"""Seconds after which a request to stop is repeated that the Hub refused or did not answer."""

QUERY_STEP, STOP_STEP = "asking the Hub for their servers", "stopping its server"
WARNING_INTERVAL = 60.0
"""Seconds between two warnings about a server that does not stop."""


@dataclass(frozen=True, slots=True)
class _Answer:
    state: State
    asked_at: float
    """when the request was sent: the answer holds for that moment or later"""


class _Stopping:
    """A server that is being stopped: since when, when to ask again, and why it still runs."""

    def __init__(self, server: Server, now: float) -> None:
        self.server = server
        self.since = self.warned_at = self.ask_at = now
        self.why = ""
        self.tries = 0


class HubServers:
    """Which servers run, with the age of each answer, and the servers that are being stopped."""

    def __init__(
        self,
        hub: HubApi,
        *,
        may_act: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        poll: float = 1.0,
    ) -> None:
        """`may_act` is asked before each request that stops a server; `poll`: seconds between two checks of one."""
        self.quarantine = Quarantine()
        """The loop's quarantine, once the loop runs"""
        self._hub = hub
        self._may_act = may_act
        self._clock = clock
        self._poll = poll
        self._changed: Callable[[], None] = lambda: None
        self._requested: dict[Server, float] = {}
        self._answers: dict[Server, _Answer] = {}
        self._query_task: asyncio.Task[None] | None = None
        self._stop_tasks: dict[str, asyncio.Task[None]] = {}
        self._stop_progress: dict[str, _Stopping] = {}
        """The same stops by session id: their progress"""
        self._stopped: set[str] = set()
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever more is known than before."""
        self._changed = changed

    def fence_with(self, may_act: Callable[[], bool]) -> None:
        """Stop servers only while `may_act` returns True."""
        self._may_act = may_act

    async def close(self) -> None:
        """Cancel the requests under way and close the connections."""
        tasks = [task for task in (self._query_task, *self._stop_tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._hub.close()

    # -- whether a server runs

    def state(self, server: Server, since: float) -> State:
        """Whether a server was active at `since` (monotonic seconds) or later; "unknown" until the Hub was asked."""
        answer = self._answers.get(server)
        if answer is not None and answer.asked_at >= since:
            return answer.state
        self._requested[server] = max(since, self._requested.get(server, since))
        if self._query_task is None or self._query_task.done():
            self._query_task = asyncio.get_running_loop().create_task(self._ask())
            self._query_task.add_done_callback(_log_failure)
        return "unknown"

    def keep(self, servers: set[Server]) -> None:
        """Forget the answers about all other servers."""
        self._answers = {server: answer for server, answer in self._answers.items() if server in servers}
        self._requested = {server: since for server, since in self._requested.items() if server in servers}

    async def _ask(self) -> None:
        """Request the servers that `state` was called for, until none is left."""
        while self._requested:
            asked, self._requested = self._requested, {}
            at = self._clock()
            states = await self._states_of(list(asked))
            self._answers.update({server: _Answer(state, at) for server, state in states.items()})
            self._changed()

    async def _states_of(self, servers: list[Server]) -> dict[Server, State]:
        """Return the state of each server; one that is missing in the list is looked up by its user first."""
        result: dict[Server, State] = {}
        if len({user for user, _ in servers}) > MAX_SINGLE_REQUESTS:
            try:
                async with self._request_slots:
                    active = await self._hub.active_servers()
            except HubUnreadable as error:  # by what one user's server has in it: the others are asked about one by one
                log.warning("The Hub's list of servers cannot be read, and its users are asked for: %s", error)
                active = set()
            except HubUnreachable as error:
                log.warning("The Hub cannot tell which servers run: %s", error)
                return dict.fromkeys(servers, "unreachable")
            except Exception:
                log.exception("The Hub's list of servers was not understood, and its users are asked for")
                active = set()
            result = {server: "active" for server in servers if server in active}
        remaining = [server for server in servers if server not in result]
        users = sorted({user for user, _ in remaining})
        known = dict(zip(users, await asyncio.gather(*map(self._servers_of, users)), strict=True))
        for user, name in remaining:
            names = known[user]
            result[user, name] = "unreachable" if names is None else "active" if name in names else "gone"
        return result

    async def _servers_of(self, user: str) -> frozenset[str] | None:
        try:
            async with self._request_slots:
                result = await self._hub.servers_of(user)
        except HubUnreachable as error:
            log.warning("The Hub cannot tell which servers of %s run: %s", user, error)
            return None
        except Exception as error:  # by what one user has there: the others are told
            self.quarantine.failed(QUERY_STEP, "person", user, error)
            return None
        self.quarantine.passed(QUERY_STEP, "person", user)
        return result

    # -- stopping servers

    def stop(self, wanted: Mapping[str, Server]) -> set[str]:
        """Continue to stop exactly these servers, by session id; return the sessions whose server is gone."""
        for id in [id for id in self._stop_tasks if id not in wanted]:
            self._stop_tasks.pop(id).cancel()
            self._stop_progress.pop(id, None)
        self._stopped &= wanted.keys()
        loop = asyncio.get_running_loop()
        for id, server in wanted.items():
            task = self._stop_tasks.get(id)
            if id in self._stopped or (task is not None and not task.done()):
                continue
            if not self.quarantine.is_backing_off(STOP_STEP, "workload", id):
                self._stop_tasks[id] = loop.create_task(self._stop(id, server))
        return set(self._stopped)

    def termination_progress(self, id: str, now: float) -> TerminationProgress | None:
        """Return what was done to stop the server of a session; `now` in Unix seconds."""
        stopping = self._stop_progress.get(id)
        if stopping is None:
            return None
        user, name = stopping.server
        server = f"server “{name or 'default'}” of {user}"
        return TerminationProgress((server,), stopping.tries, now + stopping.ask_at - self._clock(), stopping.why)

    async def _stop(self, id: str, server: Server) -> None:
        """Stop one server and wait until the Hub lists it no more, however long that takes.

        An unexpected error is logged, and the stop is tried again later.
        """
        try:
            await self._stop_until_gone(id, server)
        except Exception as error:
            self.quarantine.failed(STOP_STEP, "workload", id, error)
        else:
            self.quarantine.passed(STOP_STEP, "workload", id)

    async def _stop_until_gone(self, id: str, server: Server) -> None:
        stopping = self._stop_progress[id] = _Stopping(server, self._clock())
        pause = self._poll
        while not await self._request_stop(stopping):
            if not self._may_act():
                return
            self._warn(stopping)
            await asyncio.sleep(pause)
            pause = min(pause * 1.3, 5 * self._poll)
        self._stopped.add(id)
        self._changed()

    async def _request_stop(self, stopping: _Stopping) -> bool:
        """Request the stop if it is due, and return whether the server is gone."""
        user, name = stopping.server
        try:
            async with self._request_slots:
                if self._clock() >= stopping.ask_at and self._may_act():
                    stopping.ask_at = self._clock() + ERROR_RETRY
                    stopping.tries += 1
                    await self._hub.stop_server(user, name)
                    stopping.ask_at = self._clock() + STOP_RETRY
                stopping.why = "the Hub still lists it"
                return name not in await self._hub.servers_of(user)
        except HubUnreachable as error:
            stopping.why = str(error)
            return False

    def _warn(self, stopping: _Stopping) -> None:
        if self._clock() - stopping.warned_at < WARNING_INTERVAL:
            return
        stopping.warned_at = self._clock()
        user, name = stopping.server
        log.warning(
            "The server “%s” of %s was asked to stop %s ago and has not stopped: %s. "
            "Its session keeps its GPUs until the server is gone.",
            name or "default",
            user,
            duration(self._clock() - stopping.since),
            stopping.why,
        )


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log the error that ended a task; the next cycle starts it again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("A request to the Hub failed; it is repeated", exc_info=error)
