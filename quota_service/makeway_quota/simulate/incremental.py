"""The incremental engine, kept between the decisions of a simulation, as the service keeps it.

What a simulation does not read is left out: reasons for waiting, and (if not asked for) forecasts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..control.world.engine_view import as_workload
from ..engine.incremental import IncrementalEngine
from ..engine.index.pending import Pending
from ..engine.plan import Plan, Waiting
from ..engine.request import need_of
from ..engine.snapshot import Node, Snapshot, TeamQuota
from ..engine.snapshot import Workload as Live
from ..history.durations import Durations
from ..store.records import Workload
from .cluster import SimulatedCluster
from .planner import placed

ASK_EVERY = 20
"""Decisions from one look at forecasts to the next."""


@dataclass(slots=True)
class Forecasts:
    """The forecasts that waiting jobs are given, and how they came out; learnt from `durations`."""

    durations: Durations
    given: dict[str, float] = field(default_factory=dict)
    """Id of a pending job to its first forecast."""
    early: list[float] = field(default_factory=list)
    """Seconds from the forecast to the start; negative where a job started before its forecast."""

    def follow(self, now: float, plan: Plan, pending: Pending) -> None:
        """Record first forecasts and the starts that followed; nominations are no forecasts."""
        for _, members, reason in pending.groups:
            if reason.not_before is not None:
                for workload in members:
                    self.given.setdefault(workload.id, reason.not_before)
        for start in plan.start:
            forecast = self.given.pop(start.id, None)
            if forecast is not None:
                self.early.append(now - forecast)


class IncrementalPlanner:
    """A planner whose cluster lives on. `mix` counts the jobs to come by profile, for the packing.

    With `forecasts`, waiting jobs are given a forecast at every ASK_EVERYth decision.
    """

    def __init__(
        self, cluster: SimulatedCluster, mix: Mapping[str, int] | None = None, forecasts: Forecasts | None = None
    ) -> None:
        self.forecasts = forecasts
        self._passes = 0
        self._ends: list[tuple[float, str]] = []
        self.engine = IncrementalEngine(
            Snapshot(0.0, cluster.settings, cluster.pools, cluster.nodes, cluster.profiles, cluster.policies)
        )
        for name, count in (mix or {}).items():
            self._expect(name, count)

    def _expect(self, profile: str, count: int) -> None:
        cluster = self.engine.cluster
        need = need_of(Live("", "", profile), cluster.profiles[profile])
        for pool in cluster.serving(profile):
            pool.mix[need.shape] = pool.mix.get(need.shape, 0) + count * need.min_workers
            pool.mixed += 1

    def show(self, policies: tuple[TeamQuota, ...]) -> None:
        """Take the policies as they are now: with their histories."""
        self.engine.use(replace(self.engine.shown, policies=policies))

    def show_nodes(self, changed: Sequence[Node], gone: Sequence[str]) -> None:
        """Take nodes that are new or different, and the names of those that are gone."""
        self.engine.change_nodes(changed, gone)

    def plan(self, now: float, rows: Mapping[str, Workload], changed: Iterable[str]) -> Plan:
        """Decide once. Only starts, evictions, moves and forecasts are in the plan."""
        self._passes += 1
        why = self.forecasts is not None and self._passes % ASK_EVERY == 0
        names = sorted({*changed, *self._outrun(now)} if why else changed)
        shown = [as_workload(rows[name], placed, self._expected(rows[name], now)) for name in names if name in rows]
        self.engine.change(shown, [name for name in names if name not in rows])
        plan = self.engine.plan(now, why=why)
        pending = plan.pending
        assert isinstance(pending, Pending)
        if self.forecasts is not None:
            self.forecasts.follow(now, plan, pending)
        if not (pending.single or pending.groups or self.engine.cluster.nominees):
            return plan
        return replace(plan, pending=tuple(self._forecasts(plan, pending.single)))

    def snapshot(self, now: float, rows: Iterable[Workload]) -> Snapshot:
        """Return the cluster as it is now, with some workloads."""
        shown = tuple(as_workload(row, placed, None) for row in rows)
        return replace(self.engine.snapshot(now), workloads=shown)

    def _expected(self, row: Workload, now: float) -> float | None:
        if self.forecasts is None:
            return None
        remaining = self.forecasts.durations.remaining(row, now)
        if remaining is not None and row.started_at is not None:
            heapq.heappush(self._ends, (row.started_at + remaining, row.id))
        return remaining

    def _outrun(self, now: float) -> Iterator[str]:
        """List the jobs that run longer than was expected of them."""
        while self._ends and self._ends[0][0] <= now:
            yield heapq.heappop(self._ends)[1]

    def _forecasts(self, plan: Plan, single: Mapping[str, Waiting]) -> Iterator[Waiting]:
        """List forecasts that were made, and those that are no longer valid."""
        known = single.keys() | {start.id for start in plan.start}
        for waiting in single.values():
            if waiting.nomination:
                yield waiting
        for name, workload in sorted(self.engine.cluster.nominees.items()):
            if workload.state == "pending" and name not in known:
                yield Waiting(name, "no_free_gpus", "place", (), {})
