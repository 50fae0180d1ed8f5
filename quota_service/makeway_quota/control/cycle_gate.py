"""Hold back the reads of requests while a cycle is under way, so that pages do not slow decisions.

A cycle and the requests share one interpreter: each time a cycle waits for the store or the engine, whatever is ready
in the event loop runs first, and every busy thread delays it by a switch of the interpreter's lock. A cycle takes
milliseconds and is followed by a rest at least as long, so a read that waits for its end is hardly later, and reads
always get half of the time. A cycle that takes longer than LONGEST holds nothing back after that.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 0.1
"""Seconds that one cycle holds reads back, at most"""


class CycleGate:
    """Closed while a cycle is under way, else open. Used by one event loop; `wait` is for its threads."""

    def __init__(self, longest: float = LONGEST) -> None:
        self.longest = longest
        self._open = threading.Event()
        self._open.set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._releasing = False

    @property
    def is_open(self) -> bool:
        """Whether nothing is held back now."""
        return self._open.is_set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate until the end of the block, or until it was closed for LONGEST."""
        timer = asyncio.get_running_loop().call_later(self.longest, self._reopen)
        self._open.clear()
        try:
            yield
        finally:
            timer.cancel()
            self._reopen()

    async def passed(self) -> None:
        """Wait until the gate is open; those who wait go on in the order in which they came."""
        if self._waiting or not self._open.is_set():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def wait(self) -> None:
        """Wait in a thread until the gate is open, LONGEST seconds at most."""
        if not self._open.is_set():
            self._open.wait(self.longest)

    def _reopen(self) -> None:
        self._open.set()
        if self._waiting and not self._releasing:
            self._releasing = True
            self._release()

    def _release(self) -> None:
        """Allow one to go on in each turn of the event loop, so that the next cycle need not wait for all of them."""
        while self._waiting and self._open.is_set():
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                break
        if self._waiting and self._open.is_set():
            asyncio.get_running_loop().call_soon(self._release)
        else:
            self._releasing = False
