"""Plan one decision at a time, with an engine that stays between the cycles and is shown only what changed.

Where the engine fails, the workloads and nodes that it fails with are left out of its plans (`isolation`), and tried
again from time to time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from ..engine.incremental import IncrementalEngine
from ..engine.plan import Plan
from ..engine.snapshot import Snapshot
from ..store.records import Workload
from .engine_view import EngineChanges
from .isolation import Faulty, Unplannable, plan_without_faulty, with_taken
from .world import World

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
        self._faulty = Faulty()
        self._one = asyncio.Lock()

    @property
    def left_out(self) -> Mapping[str, Exception]:
        """Return the workloads that the last plan was made without, and why."""
        return {name: error for (kind, name), error in self._faulty.reasons.items() if kind == "workload"}

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
        if self._clock() - self._built_at > RENEW_AFTER or self._is_due():
            incremental = None
        changes = self._world.changes(rows, now, incremental is None)
        if incremental is not None and not changes.whole:
            try:
                part = self._without(changes)
                plan = await loop.run_in_executor(self._threads, _decide, incremental, part, now, explain)
            except Exception:  # by what it was shown, or by its own state: built anew it may plan
                changes = self._world.changes(rows, now, True)
            else:
                self._incremental = incremental
                return plan
        self._built_at = self._clock()
        plans = _Plans(now, explain)
        search = (changes.snapshot, plans, tuple(self._faulty.reasons))
        try:
            found = await loop.run_in_executor(self._threads, plan_without_faulty, *search)
        except Unplannable as error:
            raise error.__cause__ or error from None
        self._incremental, plan, faulty = found
        self._set_aside(faulty)
        return plan

    def _is_due(self) -> bool:
        """Whether something that was left out is tried again, or is not there any more."""
        quarantine = self._world.quarantine
        return any(not quarantine.rests(PLANNING, kind, name) for kind, name in self._faulty.reasons)

    def _set_aside(self, faulty: Faulty) -> None:
        quarantine = self._world.quarantine
        for kind, name in self._faulty.reasons.keys() - faulty.reasons.keys():
            quarantine.passed(PLANNING, kind, name)
        for (kind, name), error in sorted(faulty.reasons.items(), key=lambda item: item[0]):
            quarantine.failed(PLANNING, kind, name, error)
        self._faulty = faulty

    def _without(self, changes: EngineChanges) -> EngineChanges:
        """Return changes without what is left out; what stands in for it stays as it was."""
        out = self._faulty.reasons
        if not out:
            return changes
        return replace(
            changes,
            changed=[each for each in changes.changed if ("workload", each.id) not in out],
            gone=[id for id in changes.gone if ("workload", id) not in out or id in self._faulty.stand_ins],
            nodes=[with_taken(node, self._faulty.taken) for node in changes.nodes if ("node", node.name) not in out],
            gone_nodes=[name for name in changes.gone_nodes if ("node", name) not in out],
        )


class _Plans:
    """Plan a snapshot with a new engine."""

    def __init__(self, now: float, explain: bool) -> None:
        self._now = now
        self._explain = explain

    def __call__(self, snapshot: Snapshot) -> tuple[IncrementalEngine, Plan]:
        incremental = IncrementalEngine(snapshot)
        return incremental, incremental.plan(self._now, self._explain)


def _decide(incremental: IncrementalEngine, changes: EngineChanges, now: float, explain: bool) -> Plan:
    incremental.use(changes.snapshot)
    if changes.nodes or changes.gone_nodes:
        incremental.change_nodes(changes.nodes, changes.gone_nodes)
    incremental.change(changes.changed, changes.gone)
    return incremental.plan(now, explain)
