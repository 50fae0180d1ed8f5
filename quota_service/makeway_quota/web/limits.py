"""What is turned away before anybody reads it: bodies that are too large or no JSON, and text with NUL in it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from makeway_api.models import Problem

from .problems import answer
from .settings import WebSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_DRAINED = 2**29
MOST_DRAINED_OF_ANYBODY = 2**24
DRAIN_SECONDS = 30.0
"""So many bytes, for so long, are read and thrown away after a refusal; less of it from who shows no token."""
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Limits:
    """ASGI middleware: reads a body up to its limit, checks it, then hands it on whole."""

    def __init__(self, app: App, settings: WebSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = _path_refusal(scope)
        if refusal is None and scope["method"] not in _READS:
            limit = self._limit(scope)
            body = await _read(scope, receive, limit)
            if body is None:
                refusal = _too_large(limit)
                await _drain(receive, MOST_DRAINED if _header(scope, b"authorization") else MOST_DRAINED_OF_ANYBODY)
            else:
                refusal = self._body_refusal(scope, body)
                receive = _replay(body, receive)
        if refusal is not None:
            # A body that was not read to its end is dropped with its connection.
            await answer(refusal, {"Connection": "close"} if refusal.status == 413 else None)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _limit(self, scope: Scope) -> int:
        """Large submissions come from programs with a token; who sends none is not listened to for long."""
        is_job = scope["path"] == f"{self.settings.api}/jobs" and _header(scope, b"authorization")
        return self.settings.job_bytes if is_job else self.settings.body_bytes

    def _body_refusal(self, scope: Scope, body: bytes) -> Problem | None:
        if not body or not scope["path"].startswith(self.settings.api):
            return None
        kind = _header(scope, b"content-type").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            detail = "Send the body as JSON, with the header Content-Type: application/json."
            return Problem(title="Unsupported media type", status=415, code="unsupported_media_type", detail=detail)
        if b"\0" in body or _ESCAPED_NUL.search(body):
            detail = "The body contains the character NUL (\\u0000), which no field can hold."
            return Problem(title="Invalid request", status=422, code="invalid", detail=detail)
        return None


def _too_large(limit: int) -> Problem:
    size = f"{limit // 2**20} MiB" if limit >= 2**20 else f"{limit} bytes"
    detail = (
        f"The request is larger than the {size} that are accepted here. Put large files on the shared storage "
        "and submit their paths."
    )
    return Problem(title="Too large", status=413, code="too_large", detail=detail, numbers={"limit_bytes": limit})


def _path_refusal(scope: Scope) -> Problem | None:
    raw = scope.get("raw_path") or b""
    if b"%00" in raw or b"%00" in scope.get("query_string", b"") or "\0" in scope["path"]:
        detail = "The address contains the character NUL (%00), which no name can hold."
        return Problem(title="Bad request", status=400, code="bad_request", detail=detail)
    return None


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    length = _header(scope, b"content-length")
    if length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > limit):
        return None
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if not message.get("more_body", False):
            return bytes(body)


async def _drain(receive: Receive, left: int) -> None:
    """Let somebody finish sending `left` bytes: a proxy says 503 where the connection closes before the end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return ""
