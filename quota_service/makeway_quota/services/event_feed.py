"""The live stream: every event once from the database, then to everybody who listens."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from ..store.records import Event
from ..store.store import Store

KEPT = 2000
"""Events kept in memory; who is further behind reads from the database."""


class EventFeed:
    """Follows the store's commits: `mark` before you look, `changed` to wait for the next, `after` to read on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._events: deque[Event] = deque(maxlen=KEPT)
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
        """The number of commits so far: take it before reading."""
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

    async def last_id(self) -> int:
        """The newest event's id."""
        return await asyncio.to_thread(self._store.last_event_id)

    async def after(self, id: int) -> list[Event]:
        """Events after `id`, oldest first, at most some hundreds at a time."""
        await self._refresh()
        if self._events and self._events[0].id <= id + 1:
            return [event for event in self._events if event.id > id][:500]
        return await asyncio.to_thread(self._store.events, id)

    async def _refresh(self) -> None:
        async with self._lock:
            mark = self._commits
            if mark == self._read:
                return
            newest = self._events[-1].id if self._events else max(0, await self.last_id() - 1)
            while batch := await asyncio.to_thread(self._store.events, newest):
                self._events.extend(batch)
                newest = batch[-1].id
            self._read = mark
