"""Share one rendering of a changing part among all visitors with the same view.

Fifty open panels ask for the same part at once; each view is rendered at most once a second.
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

    def __init__(self, interval: float = MIN_INTERVAL) -> None:
        self._interval = interval
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
        part.began, part.coming = time.monotonic(), None
        return await render()

    def _forget_idle(self) -> None:
        if len(self._parts) >= MOST_VIEWS:
            before = time.monotonic() - self._interval
            self._parts = {view: part for view, part in self._parts.items() if part.coming or part.began > before}


async def shared(request: Request, view: View, render: Callable[[], Awaitable[Response]]) -> Response:
    """Return the part of a page for all visitors with the same view."""
    parts: SharedParts = request.app.state.parts
    return await parts.get((request.url.path, *view), render)


async def view_of(services: Services, caller: Caller) -> View:
    """Return what decides about a caller's view; administrators without work of their own share one."""
    if not caller.sees_all:
        return ("own", caller.name, caller.scopes, caller.groups)
    usage = await services.usage.usage(caller)
    return ("all", caller.name if any(entry.mine for entry in usage.teams) else "", caller.admin)
