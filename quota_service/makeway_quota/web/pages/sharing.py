"""One rendering of a changing part for everybody who sees the same.

Fifty open panels ask for the same part at once; each view is rendered at most once a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable

from fastapi import Request, Response

from ..ports import Caller, Services

MAX_AGE = 1.0
"""Seconds that a rendering is shown again."""
MOST_VIEWS = 256
"""Renderings that are kept; the oldest goes first."""

View = tuple[Hashable, ...]


class SharedParts:
    """Renderings by view. A view that is being rendered is awaited, not rendered twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: dict[View, tuple[float, asyncio.Task[Response]]] = {}

    async def get(self, view: View, render: Callable[[], Awaitable[Response]]) -> Response:
        """Return a rendering of at most MAX_AGE; an error reaches everybody who waits for it, and is not kept."""
        known = self._parts.get(view)
        if known is None or (known[1].done() and self._clock() - known[0] >= MAX_AGE):
            self._parts.pop(view, None)
            while len(self._parts) >= MOST_VIEWS:
                self._parts.pop(next(iter(self._parts)))
            known = self._parts[view] = (self._clock(), asyncio.ensure_future(_call(render)))
        try:
            made = await asyncio.shield(known[1])
        except Exception:
            if self._parts.get(view) is known:
                del self._parts[view]
            raise
        return Response(made.body, status_code=made.status_code, media_type=made.media_type)


async def _call(render: Callable[[], Awaitable[Response]]) -> Response:
    return await render()


async def shared(request: Request, view: View, render: Callable[[], Awaitable[Response]]) -> Response:
    """Return the part of a page for everybody with the same view."""
    parts: SharedParts = request.app.state.parts
    return await parts.get((request.url.path, *view), render)


async def view_of(services: Services, caller: Caller) -> View:
    """Return what decides about a caller's view; administrators without work of their own share one."""
    if not caller.sees_all:
        return ("own", caller.name, caller.scopes, caller.groups)
    usage = await services.usage(caller)
    return ("all", caller.name if any(entry.mine for entry in usage.teams) else "", caller.admin)
