"""Record the progress of one start as named phases, for any number of watchers of the pending page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

PHASES: dict[str, int] = {"admission": 5, "reclaim": 20, "node": 45, "image": 60, "server": 80}
"""The phases in order, each with the percentage of the bar at which it starts."""


class Progress:
    """The events of one start since it was requested; a late watcher reads them from the beginning.

    The same event twice in a row is recorded once. After `close` every watcher comes to its end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.events: list[dict[str, Any]] = []
        self._clock = clock
        self._times: list[tuple[float, float | None, float | None]] = []
        """when each event was recorded, its phase ends at the latest, and the next step comes at the soonest"""
        self._began = clock()
        self._spent: dict[str, float] = {}
        """seconds in each phase up to the present one"""
        self._entered = clock()
        self._closed = False
        self._recorded = asyncio.Event()

    @property
    def phase(self) -> str:
        """The phase of the last event; empty before the first."""
        return str(self.events[-1]["phase"]) if self.events else ""

    def add(
        self, phase: str, message: str, *, within: float | None = None, earliest: float | None = None, **more: Any
    ) -> None:
        """Record one event; the bar never goes back.

        `within`: seconds until its phase ends at the latest; `earliest`: those until the next step at the soonest.
        """
        if self.phase != phase:
            self._enter(phase)
        percent = max(PHASES[phase], self.events[-1]["progress"] if self.events else 0)
        event = {"progress": percent, "phase": phase, "message": message, **more}
        now = self._clock()
        due = None if within is None else now + within
        soonest = None if earliest is None else now + earliest
        known = self._times[-1] if self._times else (now, None, None)
        if not self.events or self.events[-1] != event or _differ(known[1], due) or _differ(known[2], soonest):
            self.events.append(event)
            self._times.append((now, due, soonest))
            self._wake()

    def close(self) -> None:
        """End the watchers' iteration after the last event."""
        self._closed = True
        self._wake()

    def clocks(self) -> dict[str, float]:
        """Return the seconds spent in each phase so far; only that of the present phase still grows."""
        result = dict(self._spent)
        if self.phase:
            result[self.phase] += self._clock() - self._entered
        return {phase: round(seconds, 1) for phase, seconds in result.items()}

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Yield every event, recorded and new, until `close`, each with the phases' clocks as they are then.

        All times are seconds, because a browser's clock may be wrong: `after` the request, `within` and `earliest` from
        now.
        """
        seen = 0
        while True:
            recorded = self._recorded
            for event, (at, due, soonest) in zip(self.events[seen:], self._times[seen:], strict=True):
                seen += 1
                ahead = {"within": due, "earliest": soonest}
                times = {name: round(end - self._clock(), 1) for name, end in ahead.items() if end is not None}
                yield {**event, "after": round(at - self._began, 1), **times, "clocks": self.clocks()}
            if self._closed and seen == len(self.events):
                return
            if seen == len(self.events):
                await recorded.wait()

    def _enter(self, phase: str) -> None:
        now = self._clock()
        if self.phase:
            self._spent[self.phase] += now - self._entered
        self._spent.setdefault(phase, 0.0)
        self._entered = now

    def _wake(self) -> None:
        self._recorded.set()
        self._recorded = asyncio.Event()


def _differ(known: float | None, due: float | None) -> bool:
    """Whether two times are no longer the same second."""
    return known != due if known is None or due is None else abs(known - due) >= 1
