"""The engine kept standing between the decisions of a simulation, as the service keeps it.

What a simulation does not read is left out: sentences why somebody waits, and forecasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ..engine.packing import Shape
from ..engine.plan import Plan, Waiting
from ..engine.standing import Standing as Engine
from ..engine.state import Policy, Snapshot
from ..engine.state import Workload as Live
from ..engine.world import need_of
from ..shown import as_workload
from ..store.records import Workload
from .estate import Estate
from .planner import placed


class Standing:
    """A planner whose cluster lives on. `mix` counts the jobs to come by profile, for the packing."""

    def __init__(self, estate: Estate, mix: Mapping[str, int] | None = None) -> None:
        self.engine = Engine(
            Snapshot(0.0, estate.settings, estate.pools, estate.nodes, estate.profiles, estate.policies)
        )
        for name, count in (mix or {}).items():
            self._expect(name, count)

    def _expect(self, profile: str, count: int) -> None:
        cluster = self.engine.cluster
        need = need_of(Live("", "", profile), cluster.profiles[profile])
        shape = Shape(need.gpus, need.cpu, need.memory, need.models)
        for pool in cluster.serving(profile):
            pool.mix[shape] = pool.mix.get(shape, 0) + count * need.least
            pool.mixed += 1

    def show(self, policies: tuple[Policy, ...]) -> None:
        """Take the policies as they are now: with their histories."""
        self.engine.show(replace(self.engine.shown, policies=policies))

    def plan(self, now: float, rows: Mapping[str, Workload], changed: Iterable[str]) -> Plan:
        """Decide once. Only starts, evictions, moves and promises are in the plan."""
        names = sorted(changed)
        news = [as_workload(rows[name], placed, None) for name in names if name in rows]
        self.engine.change(news, [name for name in names if name not in rows])
        plan = self.engine.plan(now, why=False)
        return replace(plan, pending=tuple(self._promises(plan)))

    def _promises(self, plan: Plan) -> Iterator[Waiting]:
        """List promises that were made, and those that are void now."""
        told = {waiting.id for waiting in plan.pending} | {start.id for start in plan.start}
        for waiting in plan.pending:
            if waiting.claim:
                yield waiting
        for name, workload in sorted(self.engine.cluster.claimants.items()):
            if workload.state == "pending" and name not in told:
                yield Waiting(name, "no_free_gpus", "place", "What was promised is not there any more.", {})
