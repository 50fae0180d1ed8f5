"""Wake the requests that wait for changes of one workload."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...store.records import Workload


@dataclass(slots=True)
class Follower:
    """A request that waits for changes of one workload; `row` is the newest that was committed since."""

    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    row: Workload | None = None

    async def wait_for_change(self, timeout: float) -> bool:
        """Wait for a change since the last time; return False when time is up."""
        try:
            async with asyncio.timeout(timeout):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True


class Followers:
    """The requests that wait, by workload."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Follower]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def follow(self, id: str) -> Iterator[Follower]:
        """Follow every commit that changes one workload, from now on."""
        follower = Follower(asyncio.get_running_loop())
        with self._lock:
            self._waiting.setdefault(id, []).append(follower)
        try:
            yield follower
        finally:
            with self._lock:
                self._waiting[id].remove(follower)
                if not self._waiting[id]:
                    del self._waiting[id]

    def committed(self, changed: Sequence[Workload]) -> None:
        """Wake the requests that follow what a commit changed; called in the thread that wrote."""
        waking: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        with self._lock:
            for row in changed:
                for follower in self._waiting.get(row.id, ()):
                    follower.row = row
                    waking.setdefault(follower.loop, []).append(follower.changed)
        for loop, events in waking.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()
