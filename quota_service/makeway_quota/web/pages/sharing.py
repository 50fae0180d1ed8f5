"""Share one rendering of a changing part among all visitors with the same view.

Fifty open panels ask for the same part at once; each view is rendered at most once a second, and all views together
take at most a fifth of a processor: with many views each is refreshed less often, and the control loop does not notice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from fastapi import Request, Response

from ...services import Caller, Services

MIN_INTERVAL = 1.0
"""Seconds between two renderings of a view; a request in between waits for the next one."""
SHARE = 0.2
"""Part of one processor that renderings may take."""
LONGEST_PAUSE = 10.0
"""Seconds that one rendering delays the next at most."""
MOST_VIEWS = 256
"""Views from which on those are forgotten that were not asked for lately."""

View = tuple[Hashable, ...]


@dataclass(slots=True)
class _Part:
    """A view: when its last rendering started (monotonic seconds), and the rendering that has not started yet."""

    began: float = float("-inf")
    coming: asyncio.Task[Response] | None = None


class SharedParts:
    """Renderings by view: never one that began before it was asked for, and at most one a MIN_INTERVAL."""

    def __init__(self, interval: float = MIN_INTERVAL, share: float = SHARE) -> None:
        self._interval = interval
        self._share = share
        self._one = asyncio.Lock()
        self._next = float("-inf")
        self._parts: dict[View, _Part] = {}

    async def get(self, view: View, render: Callable[[], Awaitable[Response]]) -> Response:
        """Return a rendering of the world as it is now or later; an error reaches every visitor that waits for it."""
        part = self._parts.get(view)
        if part is None:
            self._forget_idle()
            part = self._parts[view] = _Part()
        if part.coming is None:
            part.coming = asyncio.ensure_future(self._render(part, render))
        made = await asyncio.shield(part.coming)
        return Response(made.body, status_code=made.status_code, media_type=made.media_type)

    async def _render(self, part: _Part, render: Callable[[], Awaitable[Response]]) -> Response:
        await asyncio.sleep(max(0.0, part.began + self._interval - time.monotonic()))
        async with self._one:  # one after the other, in the order of arrival
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            part.began, part.coming = time.monotonic(), None
            try:
                return await render()
            finally:
                took = time.monotonic() - part.began
                self._next = part.began + min(took / self._share, took + LONGEST_PAUSE)

    def _forget_idle(self) -> None:
        if len(self._parts) >= MOST_VIEWS:
            before = time.monotonic() - self._interval
            self._parts = {view: part for view, part in self._parts.items() if part.coming or part.began > before}


async def shared(request: Request, view: View, render: Callable[[], Awaitable[Response]]) -> Response:
    """Return the part of a page for all visitors with the same view."""
    parts: SharedParts = request.app.state.parts
    return await parts.get((request.url.path, *view), render)


def view_of(services: Services, caller: Caller) -> View:
    """Return the key of a caller's view: the teams whose work it may see.

    What belongs to the caller alone is left out of shared parts; a caller without a team has a view of its own.
    """
    teams = services.context.visible_teams(caller)
    return ("teams", teams, caller.admin) if teams is None or teams else ("own", caller.name)
