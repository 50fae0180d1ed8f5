"""Open, observe and order one of several backends, so that it holds up no other one, whatever it does.

What it showed last is kept while it fails, is slow or has not opened: its attempts are not lost, and its nodes take no
new work. An observation that takes too long goes on, and counts once it is there; it is never asked twice at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ..base import AttemptStatus, Backend, BackendError, BackendState, BackendUnavailable, Key, NodeStatus, Observation

log = logging.getLogger("makeway.routing")

T = TypeVar("T")

FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
"""Seconds until opening is tried again: then twice as long, and so on"""
CLOSE_SECONDS = 90.0
"""The longest that closing waits: jobs get up to ten seconds to save, and backends some more to end them"""
UNREAD = "they have not been read yet"
SILENT = "it does not answer"


class PartLimits(NamedTuple):
    """How long one backend may hold up a cycle, in seconds."""

    open: float = 30.0
    """at the start, all of them together"""
    observe: float = 5.0
    """for an observation; it goes on beyond"""
    order: float = 30.0
    """for one order, which is broken off then, and given again"""


class RoutedPart:
    """One backend, as it was seen last. For the event loop only."""

    def __init__(self, backend: Backend, sessions: bool, limits: PartLimits) -> None:
        """`sessions`: whether notebooks may start on its nodes."""
        self.backend, self.name, self.sessions = backend, backend.name, sessions
        self.nodes: dict[str, NodeStatus] = {}
        self.attempts: dict[Key, AttemptStatus] = {}
        self.synced = self.opened = False
        self.tried = asyncio.Event()
        """opening it went through, or failed, once"""
        self.failure: Exception | None = None
        """with which opening it, or the last observation, failed"""
        self._limits = limits
        self._problem = ""
        self._version: int | None = None
        self._looking: asyncio.Task[Observation] | None = None
        self._overdue = False
        """the observation under way was not there when it was to be taken"""
        self._opening: asyncio.Task[None] | None = None
        self._wake: Callable[[], None] = lambda: None

    @property
    def late(self) -> bool:
        """Whether an observation is under way that took too long."""
        return self._overdue and self._looking is not None and not self._looking.done()

    @property
    def problem(self) -> str:
        """Why what it showed last may be out of date; "" when it is not."""
        if self.failure is not None:
            return _sentence(self.failure)
        if not self.opened:
            return "it is being opened"
        return SILENT if self.late else self._problem or ("" if self.synced else UNREAD)

    def state(self, name_conflicts: tuple[str, ...]) -> BackendState:
        """Return how it was observed last."""
        return BackendState(self.name, self.synced, self.problem, name_conflicts)

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` when it shows something new, is open, or answers again."""
        self._wake = wake
        self.backend.on_change(wake)

    # -- opening and closing

    def open(self) -> None:
        """Begin to open it, again and again until it is open."""
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await self.backend.open()
            except Exception as error:
                self._note(error, "could not be opened, which is tried again")
                self.tried.set()
                await asyncio.sleep(pause)
                pause = min(MAX_PAUSE, 2 * pause)
                continue
            self.opened, self.failure = True, None
            self.tried.set()
            self._wake()
            return

    async def close(self, *, stop_jobs: bool) -> None:
        """Close it, also while it is being opened; what fails or takes too long is logged."""
        tasks = [task for task in (self._opening, self._looking) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._looking = None
        if self._opening is None and not self.opened:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.backend.close(stop_jobs=stop_jobs and self.opened)
        except Exception as error:
            log.warning("The backend %s could not be closed: %s", self.name, _sentence(error))

    # -- observing

    def observe(self) -> asyncio.Task[Observation] | None:
        """Begin an observation; None where one is under way already, or it is not open."""
        if not self.opened or self._looking is not None:
            return None
        self._looking = asyncio.create_task(self.backend.observe(self._version))
        return self._looking

    def take(self) -> None:
        """Take the observation that is there, if any; one that is late wakes the loop once it is."""
        task = self._looking
        if task is None:
            return
        if not task.done():
            self._overdue = True
            task.remove_done_callback(self._arrived)
            task.add_done_callback(self._arrived)
            return
        self._looking, self._overdue = None, False
        try:
            self._merge(task.result())
        except Exception as error:
            self._version = None
            self._note(error, "could not be observed")
        else:
            self.failure = None

    def _arrived(self, task: asyncio.Task[Observation]) -> None:
        self._wake()

    def _merge(self, observation: Observation) -> None:
        if observation.whole and observation.synced:
            self.nodes, self.attempts = {}, {}
        for name in observation.gone_nodes:
            self.nodes.pop(name, None)
        for key in observation.gone_attempts:
            self.attempts.pop(key, None)
        for node in observation.nodes:
            self.nodes[node.name] = replace(node, backend=self.name, sessions=self.sessions and node.sessions)
        self.attempts.update((attempt.key, attempt) for attempt in observation.attempts)
        self.synced |= observation.synced
        self._version, self._problem = observation.version, observation.problem

    def _note(self, error: Exception, what: str) -> None:
        if self.failure is None or str(self.failure) != str(error):
            unexpected = not isinstance(error, (BackendError, OSError))
            log.warning("The backend %s %s: %s", self.name, what, _sentence(error), exc_info=unexpected)
        self.failure = error

    # -- ordering

    async def order(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send an order, or read something; BackendUnavailable where the backend is not there to answer."""
        if not self.opened or self.late or self.failure is not None:
            raise BackendUnavailable(f"The backend {self.name} cannot be reached: {self.problem}")
        try:
            async with asyncio.timeout(self._limits.order) as limit:
                return await send()
        except TimeoutError:
            if not limit.expired():
                raise
            raise BackendUnavailable(f"The backend {self.name} did not answer in time") from None


def _sentence(error: BaseException) -> str:
    return str(error).rstrip(".") or type(error).__name__
