"""Hold back requests while a cycle is under way, so that pages do not slow decisions.

A cycle and the requests share one interpreter: each time a cycle waits for the store or the engine, whatever is ready
in the event loop runs first, and every busy thread delays it by a switch of the interpreter's lock. A cycle is followed
by a rest as long as itself, at most 0.25 s; a longer cycle opens the gate after MAX_CLOSED.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MAX_CLOSED = 0.1
"""Seconds that one cycle keeps the gate closed, and that a request waits at it, at most"""


class CycleGate:
    """Closed from the start of a cycle to its end, for `max_wait` seconds at most.

    `wait_async` is for the event loop, `wait_in_thread` for threads.
    """

    def __init__(self, max_wait: float = MAX_CLOSED) -> None:
        self.max_wait = max_wait
        self._open = threading.Event()
        self._open.set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._releasing = False

    @property
    def is_open(self) -> bool:
        """Whether the gate is open; earlier waiters may not have been released yet."""
        return self._open.is_set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate until the end of the block, for `max_wait` seconds at most."""
        timer = asyncio.get_running_loop().call_later(self.max_wait, self._reopen)
        self._open.clear()
        try:
            yield
        finally:
            timer.cancel()
            self._reopen()

    async def wait_async(self) -> None:
        """Wait until the gate is open, in order of arrival, for `max_wait` seconds at most."""
        if self._waiting or not self._open.is_set():
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self._waiting.append(waiter)
            timer = loop.call_later(self.max_wait, _resolve, waiter)
            try:
                await waiter
            finally:
                timer.cancel()

    def wait_in_thread(self) -> None:
        """Wait in a thread until the gate is open, `max_wait` seconds at most."""
        if not self._open.is_set():
            self._open.wait(self.max_wait)

    def _reopen(self) -> None:
        self._open.set()
        if self._waiting and not self._releasing:
            self._releasing = True
            self._release()

    def _release(self) -> None:
        """Release one waiter per iteration of the event loop, so that the next cycle does not wait for all of them."""
        while self._waiting and self._open.is_set():
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
        if self._waiting and self._open.is_set():
            asyncio.get_running_loop().call_soon(self._release)
        else:
            self._releasing = False


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
