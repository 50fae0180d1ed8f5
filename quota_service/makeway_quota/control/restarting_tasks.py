"""Keep a task of the service running: one that fails is logged and begins again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("makeway.service")

PAUSE = 1.0
"""Seconds before a task that failed begins again."""


async def restarting(name: str, run: Callable[[], Awaitable[None]], pause: float = PAUSE) -> None:
    """Run until `run` returns, or this is cancelled; what `run` raises begins it again."""
    while True:
        try:
            await run()
            return
        except (Exception, asyncio.CancelledError):
            if is_cancelled():
                raise
            log.exception("%s failed; it begins again", name)
        await asyncio.sleep(pause)


def is_cancelled() -> bool:
    """Whether this task itself was cancelled, and not one that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
