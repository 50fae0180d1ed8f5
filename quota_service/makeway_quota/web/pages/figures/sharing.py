"""Share one rendering of a changing part among all visitors with the same view.

Fifty open panels ask for the same part at once; each view is rendered at most once a second, and all views together
take at most a fifth of a processor in the long run (measured in CPU time, so that other load does not count): with many
views each is refreshed less often, and the control loop does not notice. A page that is opened begins with the last
rendering where that is fresh, or recent while others wait: its stream begins there, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ....services import Caller, Services
from ....services.limits.cpu_time import thread_time

MIN_INTERVAL = 0.7
"""Seconds between two renderings of a view; a request in between waits for the next one, and nothing is shown later
than a second after it happened."""
SHARE = 0.2
"""Part of one processor that renderings may take."""
BURST = 10.0
"""Seconds of the share that may be used at once after a time of rest: many pages are opened at the same time"""
MAX_PAUSE = 10.0
"""Seconds that one rendering delays the next at most."""
MAX_VIEWS = 256
"""Views from which on those are forgotten that were not asked for in the last MIN_INTERVAL; else RECENT counts."""

BUSY = 2
"""Renderings under way or waiting from which on a page that is opened begins with the last one of its view"""
RECENT = 10.0
"""Seconds after which a rendering is too old to begin with"""

View = tuple[Hashable, ...]
Render = Callable[[], Awaitable[Any]]


class ViewChanged(Exception):
    """What the visitors of a view may see changed while it was rendered: each asks again for its view of now."""


@dataclass(slots=True)
class _Part:
    """A view: when its newest rendering began (monotonic seconds), the last one that is ready, and one that waits."""

    began: float = float("-inf")
    last: Any = None
    last_began: float = float("-inf")
    coming: asyncio.Task[Any] | None = None


class SharedParts:
    """Renderings by view: never one that began before its request, and at most one a MIN_INTERVAL."""

    def __init__(self, interval: float = MIN_INTERVAL, share: float = SHARE, burst: float = BURST) -> None:
        self._interval = interval
        self._share = share
        self._burst = burst
        self._lock = asyncio.Lock()
        self._next = float("-inf")
        """when the renderings so far are within the share (monotonic seconds)"""
        self._open = 0
        """renderings under way or waiting"""
        self._parts: dict[View, _Part] = {}

    async def get(self, view: View, render: Render) -> Any:
        """Return a rendering of the world as it is now or later; an error reaches every visitor that waits for it."""
        part = self._part(view)
        if part.coming is None:
            part.coming = asyncio.ensure_future(self._in_turn(part, render))
        return await asyncio.shield(part.coming)

    async def first(self, view: View, render: Render) -> Any:
        """Return what a page begins with: the last rendering if it is fresh, else a new one at once.

        While others wait, or the share is used up: the last one if it is recent, else the next one.
        """
        part, now = self._part(view), time.monotonic()
        if part.last is not None and now - part.last_began < self._interval:
            return part.last
        if self._open < BUSY and self._next <= now:
            self._open += 1
            try:
                return await self._render(part, render)
            finally:
                self._open -= 1
        if part.last is not None and now - part.last_began < RECENT:
            return part.last
        return await self.get(view, render)

    async def alone(self, render: Render) -> Any:
        """Return a rendering at once that is not shared; its CPU time counts like that of the others."""
        return await self._render(_Part(), render)

    def spend(self, seconds: float) -> None:
        """Count the CPU time of a rendering."""
        now = time.monotonic()
        self._next = max(self._next, now - self._burst) + min(seconds / self._share, MAX_PAUSE)

    def _part(self, view: View) -> _Part:
        part = self._parts.get(view)
        if part is None:
            part = self._parts[view] = _Part()
        return part

    async def _in_turn(self, part: _Part, render: Render) -> Any:
        self._open += 1
        try:
            await asyncio.sleep(max(0.0, part.began + self._interval - time.monotonic()))
            async with self._lock:  # one after the other, in the order of arrival
                await asyncio.sleep(max(0.0, self._next - time.monotonic()))
                part.coming = None
                return await self._render(part, render)
        finally:
            self._open -= 1

    async def _render(self, part: _Part, render: Render) -> Any:
        part.began = began = time.monotonic()
        before = time.thread_time()
        with thread_time() as in_threads:
            try:
                made = await render()
                part.last, part.last_began = made, began
                return made
            finally:
                self.spend(time.thread_time() - before + in_threads.seconds)
                self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget the views without a visitor that waits, whose rendering is too old to begin with."""
        age = max(RECENT, self._interval) if len(self._parts) < MAX_VIEWS else self._interval
        before = time.monotonic() - age
        self._parts = {view: part for view, part in self._parts.items() if part.coming or part.began > before}


def view_of(services: Services, caller: Caller) -> View:
    """Return the key of a caller's view: the teams whose work it may see, by the policy in force.

    What belongs to the caller alone is left out of shared parts; a caller without a team has a view of its own.
    """
    teams = services.context.visible_teams(caller)
    version = services.context.world.policy_version
    return (version, "teams", teams, caller.admin) if teams is None or teams else (version, "own", caller.name)
