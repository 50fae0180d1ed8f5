"""Compress documents, parts of pages, answers of the API and static files with gzip, where the client takes it.

Streams compress themselves (`pages/live`), each message once for all. What is secret in a page is masked anew in each
response (`tickets.masked`), so that its size tells nothing about it.
"""

from __future__ import annotations

import asyncio
import gzip
from collections import OrderedDict

from starlette.datastructures import Headers, MutableHeaders

from .limits import App, Message, Receive, Scope, Send

MIN_SIZE = 1_000
"""Bytes below which an answer stays as it is: it fits one packet"""
IN_LOOP = 2**15
"""Bytes up to which an answer is compressed in the event loop, in less than a millisecond"""
LEVEL = 5
BEST = 9
"""Of files that are kept"""
MAX_KEPT = 2**23
"""Bytes of compressed files in memory"""
TYPES = ("text/html", "text/css", "text/javascript", "application/javascript", "application/json", "image/svg+xml")


def takes_gzip(accepted: str) -> bool:
    """Whether a header `Accept-Encoding` allows gzip."""
    for entry in accepted.lower().split(","):
        name, _, weight = entry.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


class Compression:
    """ASGI middleware: compresses answers that come whole; what comes in pieces passes as it is."""

    def __init__(self, app: App, static: str) -> None:
        self.app = app
        self.static = static
        self._kept: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not takes_gzip(Headers(scope=scope).get("accept-encoding", "")):
            await self.app(scope, receive, send)
            return
        answer = _Answer(self, scope, send)
        await self.app(scope, receive, answer.send)

    async def compressed(self, path: str, query: bytes, body: bytes) -> bytes:
        """Return a body, compressed; files, whose addresses carry their version, are compressed once."""
        if not path.startswith(self.static):
            if len(body) <= IN_LOOP:
                return gzip.compress(body, LEVEL, mtime=0)
            return await asyncio.to_thread(gzip.compress, body, LEVEL, mtime=0)
        key = (path, query[:64])
        if (kept := self._kept.get(key)) is None:
            kept = await asyncio.to_thread(gzip.compress, body, BEST, mtime=0)
            if key not in self._kept:  # another request may have compressed it meanwhile
                self._kept[key] = kept
                self._bytes += len(kept)
            while self._bytes > MAX_KEPT:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return kept


class _Answer:
    """Holds the head of one answer back until its body is known."""

    def __init__(self, compression: Compression, scope: Scope, send: Send) -> None:
        self._compression = compression
        self._scope = scope
        self._send = send
        self._head: Message | None = None
        self._pieces: list[bytes] = []
        """of a static file so far: large ones come in pieces"""

    async def send(self, message: Message) -> None:
        """Pass a message on; the head together with the first piece of the body."""
        if message["type"] == "http.response.start":
            self._head = message
            if not self._suits(message):
                await self._pass_head()
            return
        if self._head is not None:
            body = message.get("body", b"")
            if self._scope["path"].startswith(self._compression.static):
                self._pieces.append(body)
                if message.get("more_body", False):
                    return
                body = b"".join(self._pieces)
                message = {"type": "http.response.body", "body": body, "more_body": False}
            if not message.get("more_body", False) and len(body) >= MIN_SIZE:
                message = await self._compress(self._head, body)
            await self._pass_head()
        await self._send(message)

    def _suits(self, head: Message) -> bool:
        headers = Headers(raw=head["headers"])
        kind = headers.get("content-type", "").partition(";")[0].strip()
        return head["status"] == 200 and kind in TYPES and "content-encoding" not in headers

    async def _compress(self, head: Message, body: bytes) -> Message:
        made = await self._compression.compressed(self._scope["path"], self._scope.get("query_string", b""), body)
        headers = MutableHeaders(raw=list(head["headers"]))
        headers["Content-Encoding"] = "gzip"
        headers["Content-Length"] = str(len(made))
        if (tag := headers.get("etag")) and not tag.startswith("W/"):
            headers["ETag"] = f"W/{tag}"
        headers.add_vary_header("Accept-Encoding")
        head["headers"] = headers.raw
        return {"type": "http.response.body", "body": made, "more_body": False}

    async def _pass_head(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            await self._send(head)
