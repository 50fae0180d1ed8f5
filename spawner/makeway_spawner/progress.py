"""What the pending page tells: named phases with a sentence each, for any number of watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

PHASES: dict[str, tuple[int, str]] = {
    "admission": (5, "Admission"),
    "reclaim": (20, "Reclaim"),
    "node": (45, "Node"),
    "image": (60, "Image"),
    "server": (80, "Server"),
}
"""Phase → how far the bar is when it begins, and its name on the page; in this order."""


class Progress:
    """Everything that was told since the start was asked for; a late watcher reads it from the beginning.

    Telling the same sentence twice in a row is one event. After `close` watchers come to their end.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._closed = False
        self._news = asyncio.Event()

    def tell(self, phase: str, message: str, **more: Any) -> None:
        """Add one event; the bar never goes back."""
        percent = max(PHASES[phase][0], self.events[-1]["progress"] if self.events else 0)
        event = {"progress": percent, "phase": phase, "message": message, **more}
        if not self.events or self.events[-1] != event:
            self.events.append(event)
            self._wake()

    def close(self) -> None:
        """Let the watchers go on to what comes after."""
        self._closed = True
        self._wake()

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Give every event, old and new, until `close`."""
        seen = 0
        while True:
            news = self._news
            for event in self.events[seen:]:
                seen += 1
                yield dict(event)
            if self._closed and seen == len(self.events):
                return
            if seen == len(self.events):
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
