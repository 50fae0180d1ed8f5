"""Send events as server-sent events, and end streams and long polls when the service stops.

FastAPI's own SSE response has no way to end all streams at a shutdown, to cut a slow reader off, or to cap the
streams of a person, so the response is written here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from makeway_api.errors import MakewayError
from makeway_api.models import Event

from ..services.audit import POSITION
from .settings import WebSettings

T = TypeVar("T")


class Streams:
    """All open streams and long polls of this process, so that a shutdown need not wait for them."""

    def __init__(self, settings: WebSettings) -> None:
        self.settings = settings
        self._closing = asyncio.Event()
        self._open: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Return the number of open streams."""
        return self._open.total()

    def close(self) -> None:
        """End every stream and answer every long poll now; call it before the server waits for its connections."""
        self._closing.set()

    def check_room(self, user: str) -> None:
        """Refuse one more stream of a person beyond the limit; call it before the response begins."""
        most = self.settings.streams_per_user
        if most and self._open[user] >= most:
            raise MakewayError(
                f"{user} has {most} event streams open, the most for one person: close a page or a notebook first.",
                code="too_many_streams",
                status=429,
                numbers={"most": most, "open": self._open[user], "retry_after": 10},
            )

    async def follow(self, events: AsyncIterator[Event], user: str = "") -> AsyncIterator[bytes]:
        """Write events as text/event-stream; comments keep a silent line open.

        A reader that lags more than the backlog is cut off: it comes back with the id of the last event it read.
        """
        queue: asyncio.Queue[Event | None] = asyncio.Queue(self.settings.stream_backlog)
        pump = asyncio.create_task(_pump(events, queue))
        closing = asyncio.create_task(self._closing.wait())
        get = asyncio.create_task(queue.get())
        self._open[user] += 1
        most = self.settings.streams_per_user
        try:
            if most and self._open[user] > most:
                return  # others of the same person began between the check and now
            yield b"retry: 2000\n: welcome\n\n"
            while not closing.done() and not (pump.done() and queue.empty() and not get.done()):
                waited = {get, closing} if pump.done() else {get, closing, pump}
                await asyncio.wait(waited, timeout=self.settings.heartbeat, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    if (event := get.result()) is None:
                        return
                    get = asyncio.create_task(queue.get())
                    yield message(event)
                elif not pump.done() and not closing.done():
                    yield b": alive\n\n"
        finally:
            self._open[user] -= 1
            if self._open[user] <= 0:
                del self._open[user]
            for task in (pump, closing, get):
                task.cancel()
            await asyncio.gather(pump, closing, get, return_exceptions=True)

    async def poll(self, ask: Callable[[float], Awaitable[T]], wait: float) -> T:
        """Call `ask` with the seconds to wait for a change; at a shutdown call it again without waiting."""
        if wait <= 0 or self._closing.is_set():
            return await ask(0)
        asking = asyncio.ensure_future(ask(wait))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({asking, closing}, return_when=asyncio.FIRST_COMPLETED)
            return await asking if asking.done() else await ask(0)
        finally:
            for task in (asking, closing):
                task.cancel()


async def _pump(events: AsyncIterator[Event], queue: asyncio.Queue[Event | None]) -> None:
    """Move events into the queue until it is full or they end."""
    try:
        async for event in events:
            queue.put_nowait(event)
        await queue.put(None)
    except asyncio.QueueFull:
        return
    finally:
        if (aclose := getattr(events, "aclose", None)) is not None:
            await aclose()


def message(event: Event) -> bytes:
    """Return one event as text; its data is the whole Event, so that readers need no other field.

    A position is an id alone: readers keep it for `Last-Event-ID` and hear of no event.
    """
    if event.kind == POSITION:
        return f"id: {event.id}\n\n".encode()
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode("utf-8", "replace")
