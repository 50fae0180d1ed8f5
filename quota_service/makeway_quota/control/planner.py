"""The engine at work: kept on its feet between the cycles of the loop, and told only what changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from ..engine.index.incremental import IncrementalEngine
from ..engine.plan import Plan
from ..store.records import Workload
from .world import News, World

RENEW_AFTER = 3600.0
"""Seconds after which everything is looked at anew, whatever changed: a second look costs little an hour."""


class Planner:
    """Plans what the world needs next, one decision at a time."""

    def __init__(self, world: World, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._clock = clock
        self._incremental: IncrementalEngine | None = None
        self._stood_up = 0.0
        self._one = asyncio.Lock()

    async def plan(self, rows: Mapping[str, Workload], now: float) -> Plan:
        """Decide about the world as it is now. After a decision that failed, the next one looks at everything."""
        async with self._one:
            return await self._plan(rows, now)

    async def _plan(self, rows: Mapping[str, Workload], now: float) -> Plan:
        incremental, self._incremental = self._incremental, None
        if self._clock() - self._stood_up > RENEW_AFTER:
            incremental = None
        news = self._world.news(rows, now, incremental is None)
        if incremental is None or news.whole:
            self._stood_up = self._clock()
            incremental = await asyncio.to_thread(IncrementalEngine, news.snapshot)
        plan = await asyncio.to_thread(_decide, incremental, news, now)
        self._incremental = incremental
        return plan


def _decide(incremental: IncrementalEngine, news: News, now: float) -> Plan:
    if not news.whole:
        incremental.show(news.snapshot)
        incremental.change(news.changed, news.gone)
    return incremental.plan(now)
