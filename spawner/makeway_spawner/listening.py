"""Wait until a server that was started accepts connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_PAUSE = 0.1
"""Seconds between two attempts."""
_PATIENCE = 2.0
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


def _address(where: Any) -> tuple[str, int]:
    if isinstance(where, tuple):
        return str(where[0]), int(where[1])
    url = urlsplit(str(where))
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


async def _accepts(host: str, port: int) -> bool:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True
    return False
