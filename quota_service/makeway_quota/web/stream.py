"""What happens, as it happens: the event stream, resumable by Last-Event-ID."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from makeway_api.models import Event

from .settings import WebSettings

T = TypeVar("T")


class Streams:
    """All open streams and long polls of this process, so that a shutdown need not wait for them."""

    def __init__(self, settings: WebSettings) -> None:
        self.settings = settings
        self.open = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End every stream and answer every long poll now; call it before the server waits for its connections."""
        self._closing.set()

    async def follow(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """Write events as text/event-stream; comments keep a silent line open.

        A reader that lags more than the backlog is cut off: it comes back with the id of the last event it read.
        """
        queue: asyncio.Queue[Event | None] = asyncio.Queue(self.settings.stream_backlog)
        pump = asyncio.create_task(_pump(events, queue))
        closing = asyncio.create_task(self._closing.wait())
        get = asyncio.create_task(queue.get())
        self.open += 1
        try:
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
            self.open -= 1
            for task in (pump, closing, get):
                task.cancel()
            await asyncio.gather(pump, closing, get, return_exceptions=True)

    async def poll(self, ask: Callable[[float], Awaitable[T]], wait: float) -> T:
        """Ask and wait for news at most `wait` seconds; a shutdown asks again without waiting."""
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
    """Write one event; its data is the whole Event, so that readers need not look at the other fields."""
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode("utf-8", "replace")
