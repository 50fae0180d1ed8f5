"""Plan one decision at a time, with an engine that stays between the cycles and is shown only what changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from ..engine.incremental import IncrementalEngine
from ..engine.plan import Plan
from ..store.records import Workload
from .engine_view import EngineChanges
from .world import World

RENEW_AFTER = 3600.0
"""Seconds after which the engine's state is rebuilt, whatever changed (about one second of work an hour)."""


class Planner:
    """Keeps an engine and plans with it, one decision at a time."""

    def __init__(
        self, world: World, threads: Executor | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._world = world
        self._threads = threads
        self._clock = clock
        self._incremental: IncrementalEngine | None = None
        self._built_at = 0.0
        self._one = asyncio.Lock()

    def restart(self) -> None:
        """Drop the engine: this replica did not plan for a while, so the next decision reads everything."""
        self._incremental = None

    async def plan(self, rows: Mapping[str, Workload], now: float, explain: bool = True) -> Plan:
        """Return the plan for the world as it is now. After a failure the engine's state is rebuilt.

        Without `explain` only nominated workloads have a reason for waiting; the decisions are the same.
        """
        async with self._one:
            return await self._plan(rows, now, explain)

    async def _plan(self, rows: Mapping[str, Workload], now: float, explain: bool) -> Plan:
        incremental, self._incremental = self._incremental, None
        loop = asyncio.get_running_loop()
        if self._clock() - self._built_at > RENEW_AFTER:
            incremental = None
        changes = self._world.changes(rows, now, incremental is None)
        if incremental is None or changes.whole:
            self._built_at = self._clock()
            incremental = await loop.run_in_executor(self._threads, IncrementalEngine, changes.snapshot)
        plan = await loop.run_in_executor(self._threads, _decide, incremental, changes, now, explain)
        self._incremental = incremental
        return plan


def _decide(incremental: IncrementalEngine, changes: EngineChanges, now: float, explain: bool) -> Plan:
    if not changes.whole:
        incremental.use(changes.snapshot)
        if changes.nodes or changes.gone_nodes:
            incremental.change_nodes(changes.nodes, changes.gone_nodes)
        incremental.change(changes.changed, changes.gone)
    return incremental.plan(now, explain)
