"""Record the progress of one start as named phases, for any number of watchers of the pending page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

PHASES: dict[str, int] = {"admission": 5, "reclaim": 20, "node": 45, "image": 60, "server": 80}
"""The phases in order, each with the percentage of the bar at which it starts."""


class Progress:
    """The events of one start since it was requested; a late watcher reads them from the beginning.

    The same event twice in a row is recorded once. After `close` every watcher comes to its end.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._closed = False
        self._recorded = asyncio.Event()

    def add(self, phase: str, message: str, **more: Any) -> None:
        """Record one event; the bar never goes back."""
        percent = max(PHASES[phase], self.events[-1]["progress"] if self.events else 0)
        event = {"progress": percent, "phase": phase, "message": message, **more}
        if not self.events or self.events[-1] != event:
            self.events.append(event)
            self._wake()

    def close(self) -> None:
        """End the watchers' iteration after the last event."""
        self._closed = True
        self._wake()

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Yield every event, recorded and new, until `close`."""
        seen = 0
        while True:
            recorded = self._recorded
            for event in self.events[seen:]:
                seen += 1
                yield dict(event)
            if self._closed and seen == len(self.events):
                return
            if seen == len(self.events):
                await recorded.wait()

    def _wake(self) -> None:
        self._recorded.set()
        self._recorded = asyncio.Event()
