"""The engine at work: kept on its feet between the turns of the loop, and told only what changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from .engine.plan import Plan
from .engine.standing import Standing
from .store.records import Workload
from .watch import News, Watch

RENEW_AFTER = 3600.0
"""Seconds after which everything is looked at anew, whatever changed: a second look costs little an hour."""


class Decider:
    """Plans what the world needs next, one decision at a time."""

    def __init__(self, watch: Watch, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch = watch
        self._clock = clock
        self._standing: Standing | None = None
        self._stood_up = 0.0
        self._one = asyncio.Lock()

    async def plan(self, rows: Mapping[str, Workload], now: float) -> Plan:
        """Decide about the world as it is now. After a decision that failed, the next one looks at everything."""
        async with self._one:
            return await self._plan(rows, now)

    async def _plan(self, rows: Mapping[str, Workload], now: float) -> Plan:
        standing, self._standing = self._standing, None
        if self._clock() - self._stood_up > RENEW_AFTER:
            standing = None
        news = self._watch.news(rows, now, standing is None)
        if standing is None or news.whole:
            self._stood_up = self._clock()
            standing = await asyncio.to_thread(Standing, news.snapshot)
        plan = await asyncio.to_thread(_decide, standing, news, now)
        self._standing = standing
        return plan


def _decide(standing: Standing, news: News, now: float) -> Plan:
    if not news.whole:
        standing.show(news.snapshot)
        standing.change(news.changed, news.gone)
    return standing.plan(now)
