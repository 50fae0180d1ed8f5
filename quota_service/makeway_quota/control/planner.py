"""Plan one decision at a time, with an engine that stays between the cycles and is shown only what changed.

Where the engine fails, what it fails with is left out of its plans (`isolation`), and tried again from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor

from ..engine.incremental import IncrementalEngine
from ..engine.plan import Plan
from ..engine.snapshot import Snapshot
from ..quarantine import reason_of
from ..store.records import Workload
from .world.engine_view import EngineChanges
from .world.isolation import Faulty, Item, Unplannable, changes_without, followed, plan_without_faulty
from .world.world import World

log = logging.getLogger("makeway.planner")

RENEW_AFTER = 3600.0
"""Seconds after which the engine's state is rebuilt, whatever changed (about one second of work an hour)."""
PLANNING = "planning"


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
        self._lock = asyncio.Lock()
        self.demand = False
        """whether plans say what machines of autoscaled pools are for"""

    @property
    def _faulty(self) -> Faulty:
        """What the last plan was made without."""
        return self._world.excluded

    def restart(self) -> None:
        """Drop the engine: this replica did not plan for a while, so the next decision reads everything."""
        self._incremental = None

    async def plan(self, rows: Mapping[str, Workload], now: float, explain: bool = True) -> Plan:
        """Return the plan for the world as it is now. After a failure the engine's state is rebuilt.

        Without `explain` only nominated workloads have a reason for waiting; the decisions are the same.
        """
        async with self._lock:
            return await self._plan(rows, now, explain)

    async def _plan(self, rows: Mapping[str, Workload], now: float, explain: bool) -> Plan:
        incremental, self._incremental = self._incremental, None
        loop = asyncio.get_running_loop()
        due = self._due()
        if self._clock() - self._built_at > RENEW_AFTER or due:
            incremental = None
        changes = self._world.changes(rows, now, incremental is None)
        if incremental is not None:
            incremental.demand = self.demand
        known = None if incremental is None or changes.whole else followed(changes, self._faulty)
        if incremental is not None and known is not None:
            changes, faulty = known
            self._world.go_on_without(faulty)
            try:
                part = changes_without(changes, faulty)
                plan = await loop.run_in_executor(self._threads, _decide, incremental, part, now, explain)
            except Exception as error:  # by what it was shown, or by its own state: built anew it may plan
                log.warning("The engine is built anew, as a plan failed: %s", reason_of(error))
            else:
                self._incremental = incremental
                return plan
        if not changes.whole:
            changes = self._world.changes(rows, now, True)
        self._built_at = self._clock()
        search = (changes.snapshot, _Plans(now, explain, self.demand), self._faulty.reasons, due)
        try:
            result = await loop.run_in_executor(self._threads, plan_without_faulty, *search)
        except Unplannable as error:
            self._quarantine_faulty(error.faulty, due)
            raise error.__cause__ or error from None
        self._incremental, plan, faulty = result
        self._quarantine_faulty(faulty, due)
        return plan

    def _due(self) -> frozenset[Item]:
        """Return what was left out and is tried again."""
        quarantine = self._world.quarantine
        return frozenset(item for item in self._faulty.reasons if not quarantine.is_backing_off(PLANNING, *item))

    def _quarantine_faulty(self, faulty: Faulty, due: Collection[Item]) -> None:
        """Note what is left out from now on; what was left out before and was not tried again stays as noted."""
        quarantine, before = self._world.quarantine, self._faulty.reasons
        for kind, name in before.keys() - faulty.reasons.keys():
            quarantine.passed(PLANNING, kind, name)
        for (kind, name), error in sorted(faulty.reasons.items(), key=lambda item: item[0]):
            if (kind, name) not in before or (kind, name) in due:
                quarantine.failed(PLANNING, kind, name, error)
            error.__traceback__ = None  # its frames hold a whole engine
        self._world.leave_out(faulty)


class _Plans:
    """Plan a snapshot with a new engine."""

    def __init__(self, now: float, explain: bool, demand: bool) -> None:
        self._now = now
        self._explain = explain
        self._demand = demand

    def __call__(self, snapshot: Snapshot) -> tuple[IncrementalEngine, Plan]:
        incremental = IncrementalEngine(snapshot)
        incremental.demand = self._demand
        return incremental, incremental.plan(self._now, self._explain)


def _decide(incremental: IncrementalEngine, changes: EngineChanges, now: float, explain: bool) -> Plan:
    incremental.use(changes.snapshot)
    if changes.nodes or changes.gone_nodes:
        incremental.change_nodes(changes.nodes, changes.gone_nodes)
    incremental.change(changes.changed, changes.gone)
    return incremental.plan(now, explain)
