"""Send server-sent events: serialised once for all streams, ended when the service stops, capped for each person.

FastAPI's own SSE response has no way to end all streams at a shutdown or to cap the streams of a person, so the
response is written here. Nothing is kept for a reader: while its connection takes no more bytes its stream waits, and
what it missed it reads afterwards, or is told to read everything again.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from makeway_api.errors import MakewayError
from makeway_api.models import Event
from pydantic_core import to_json

from ..services.log.audit import POSITION, EventRow, event_model
from .settings import WebSettings

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_MESSAGES = 4000
"""Serialised events in memory, for all streams; as many as the event feed keeps"""
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
"""How a gzip stream begins (RFC 1952)"""
WELCOME = b"retry: 2000\n: welcome\n\n"
ALIVE = b": alive\n\n"
"""What a silent stream says: a comment, which readers skip"""
LEVEL = 5
"""Of compression: at 9 a part of the panel takes three times as long, for 2 % less"""


class Streams:
    """All open streams and long polls of this process, so that a shutdown need not wait for them."""

    def __init__(self, settings: WebSettings) -> None:
        self.settings = settings
        self.messages = Messages()
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
        maximum = self.settings.streams_per_user
        if maximum and self._open[user] >= maximum:
            raise MakewayError(
                f"{user} has {maximum} event streams open, the most for one person: close a page or a notebook first.",
                code="too_many_streams",
                status=429,
                numbers={"most": maximum, "open": self._open[user], "retry_after": 10},
            )

    async def follow(
        self,
        chunks: AsyncIterator[bytes],
        user: str = "",
        alive: Callable[[], bytes] = lambda: ALIVE,
        heartbeat: float | None = None,
        welcome: bytes = WELCOME,
    ) -> AsyncIterator[bytes]:
        """Yield the chunks of a stream, and `alive` after each `heartbeat` seconds of silence.

        No chunk is made before the connection has taken the last one.
        """
        closing = asyncio.create_task(self._closing.wait())
        coming = asyncio.ensure_future(anext(chunks, None))
        self._open[user] += 1
        maximum, heartbeat = self.settings.streams_per_user, heartbeat or self.settings.heartbeat
        try:
            if maximum and self._open[user] > maximum:
                return  # others of the same person began between the check and now
            yield welcome
            while not closing.done():
                await asyncio.wait({coming, closing}, timeout=heartbeat, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    if (error := coming.exception()) is not None:
                        log.error("an event stream ended: %s", error, exc_info=error)
                        return
                    if (chunk := coming.result()) is None:
                        return
                    yield chunk
                    coming = asyncio.ensure_future(anext(chunks, None))
                elif not closing.done():
                    yield alive()
        finally:
            self._open[user] -= 1
            if self._open[user] <= 0:
                del self._open[user]
            for task in (coming, closing):
                task.cancel()
            await asyncio.gather(coming, closing, return_exceptions=True)
            if (aclose := getattr(chunks, "aclose", None)) is not None:
                await aclose()

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


class Messages:
    """Events as text, each serialised once, or twice: for those who may read what its job wrote, and for the others."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[int, bool], bytes] = OrderedDict()
        self.serialised = 0
        """events that were serialised so far"""

    def of(self, rows: Iterable[EventRow]) -> bytes:
        """Return events as one chunk of a stream."""
        return b"".join([self._message(row) for row in rows])

    def _message(self, row: EventRow) -> bytes:
        key = row.id, bool(row.data.get("private"))
        if (known := self._made.get(key)) is not None:
            return known
        made = self._made[key] = message(event_model(row))
        self.serialised += 1
        if len(self._made) > MAX_MESSAGES:
            self._made.popitem(last=False)
        return made


def message(event: Event) -> bytes:
    """Return one event as text; its data is the whole Event, so that readers need no other field.

    A position is an id alone: readers keep it for `Last-Event-ID` and hear of no event.
    """
    if event.kind == POSITION:
        return f"id: {event.id}\n\n".encode()
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode("utf-8", "replace")


def note(kind: str, data: object, id: int | None = None) -> bytes:
    """Return a message that is no event of the log: what changed, a part of a page, or that the stream is alive."""
    position = b"" if id is None else b"id: %d\n" % id
    return b"%sevent: %s\ndata: %s\n\n" % (position, kind.encode(), to_json(data))


def packed(chunk: bytes) -> bytes:
    """Return a chunk as a piece of any gzip stream: it refers to nothing before it, so that streams can share it."""
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflate.compress(chunk) + deflate.flush(zlib.Z_SYNC_FLUSH)
