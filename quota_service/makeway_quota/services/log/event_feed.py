"""Follow the event log: every event is read once from the database and kept for all streams."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Any

from ...store.people import CHANGED
from ...store.records import Event
from ...store.store import Store

KEPT = 2000
"""Events kept in memory at least; a reader that is further behind reads from the database"""
BATCH = 500
"""Events of one answer"""

Call = Callable[..., Awaitable[Any]]
"""Call a blocking function of the store in a thread of the requests."""


class EventFeed:
    """Follows the store's commits: `mark` before reading, `changed` to wait for the next, `after` to read on."""

    def __init__(self, store: Store, call: Call) -> None:
        self._store = store
        self._call = call
        self._events: list[Event] = []
        """in the order of ids; at most twice as many as are kept"""
        self._commits = 0
        self._read = -1
        self._lock = asyncio.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._guard = threading.Lock()
        self.stop_following = store.on_commit(self._committed)

    def _committed(self) -> None:
        with self._guard:
            self._commits += 1
            waiting, self._waiting = self._waiting, set()
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def mark(self) -> int:
        """Return the number of commits so far: take it before reading."""
        return self._commits

    async def changed(self, mark: int, timeout: float) -> bool:
        """Wait until something was committed after `mark`; False when time is up."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._guard:
            if self._commits != mark:
                return True
            self._waiting.add(entry)
        try:
            async with asyncio.timeout(timeout):
                await entry[1].wait()
            return True
        except TimeoutError:
            return False
        finally:
            with self._guard:
                self._waiting.discard(entry)

    async def range(self) -> tuple[int, int]:
        """Return the ids of the oldest and the newest event that the database has; 0 and 0 without any."""
        oldest: int = await self._call(self._store.oldest_event_id)
        newest: int = await self._call(self._store.last_event_id)
        return oldest, newest

    async def newest(self) -> int:
        """Return the id of the newest event, 0 without any: take it before reading what a page shows.

        A reader that follows the events after it hears of everything that the page does not show yet.
        """
        await self._refresh()
        return self._events[-1].id if self._events else 0

    async def after(self, id: int) -> list[Event]:
        """Return events after `id`, oldest first, at most some hundreds at a time."""
        await self._refresh()
        if self._events and self._events[0].id <= id + 1:
            begin = bisect_right(self._events, id, key=attrgetter("id"))
            return self._events[begin : begin + BATCH]
        events: list[Event] = await self._call(self._store.events, id)
        return events

    async def _refresh(self) -> None:
        if self._commits == self._read:
            return
        async with self._lock:
            mark = self._commits
            if mark == self._read:
                return
            last: int = await self._call(self._store.last_event_id)
            newest = self._events[-1].id if self._events else max(0, last - 1)
            if last - newest > 2 * KEPT:  # no stream was open for long
                self._events, newest = [], last - KEPT
            while batch := await self._call(self._store.events, newest):
                renamed = next((at for at in reversed(range(len(batch))) if batch[at].kind == CHANGED), None)
                if renamed is not None:  # what was read before is filed under names that were given up: read it again
                    self._events, batch = [], batch[renamed:]
                self._events += batch
                newest = batch[-1].id
                if len(self._events) > 2 * KEPT:
                    del self._events[:-KEPT]
            self._read = mark
