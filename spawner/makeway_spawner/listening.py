"""Wait until a server that was started accepts connections, and until it answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_PAUSE = 0.1
"""Seconds between two attempts."""
_TIMEOUT = 2.0
"""Seconds for one attempt: packets to a pod may be dropped."""


async def wait(where: Any) -> None:
    """Return once the server accepts a connection; `where` is its URL, or its address and port, as spawners return."""
    host, port = _address(where)
    if not host:
        return
    while True:
        if await _accepts(host, port):
            return
        await asyncio.sleep(_PAUSE)


async def answer(where: Any, path: str) -> None:
    """Return once the server answers a request with anything but an error of its own (5xx).

    One that speaks TLS only has to accept a connection.
    """
    await wait(where)
    host, port = _address(where)
    if not host or str(where).startswith("https:"):
        return
    while True:
        if await _answers(host, port, path):
            return
        await asyncio.sleep(_PAUSE)


def _address(where: Any) -> tuple[str, int]:
    if isinstance(where, tuple):
        return str(where[0]), int(where[1])
    url = urlsplit(str(where))
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


async def _accepts(host: str, port: int) -> bool:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_TIMEOUT):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True
    return False


async def _answers(host: str, port: int, path: str) -> bool:
    """Whether the server answers; it may take longer than `_TIMEOUT` while it loads its extensions."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nAccept: */*\r\n\r\n"
    with suppress(OSError, ValueError):  # ValueError: a line that never ends
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(request.encode())
            words = (await reader.readline()).split()
        finally:
            writer.close()
        return len(words) > 1 and words[0].startswith(b"HTTP/") and not words[1].startswith(b"5")
    return False
