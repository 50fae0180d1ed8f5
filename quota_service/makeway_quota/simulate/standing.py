"""The engine kept standing between decisions: only what changed is put in its place again.

The rules are the engine's own (`schedule`); this only spares it building the same cluster for every event. What a
simulation does not read is left out: sentences why somebody waits, and forecasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..engine.cluster import Cluster
from ..engine.draft import Draft
from ..engine.grow import grow
from ..engine.order import queues
from ..engine.packing import Shape
from ..engine.plan import Plan, Waiting
from ..engine.reasons import closed_or_paused
from ..engine.schedule import _let_go, _until_nothing_changes
from ..engine.state import ADMITTED, Snapshot
from ..engine.state import Workload as Live
from ..engine.world import PoolState, Tenancy, need_of
from ..shown import as_workload
from ..store.records import Workload
from .estate import Estate
from .planner import placed


class Standing:
    """A planner whose cluster lives on. `mix` counts the jobs to come by profile, for the packing."""

    def __init__(self, estate: Estate, mix: Mapping[str, int] | None = None) -> None:
        self.cluster = Cluster(
            Snapshot(0.0, estate.settings, estate.pools, estate.nodes, estate.profiles, estate.policies)
        )
        self.pending: dict[str, Live] = {}
        self._closed: dict[tuple[str, str], bool] = {}
        self._fresh: list[str] = []
        for name, count in (mix or {}).items():
            self._expect(name, count)

    def _expect(self, profile: str, count: int) -> None:
        need = need_of(Live("", "", profile), self.cluster.profiles[profile])
        shape = Shape(need.gpus, need.cpu, need.memory, need.models)
        for pool in self.cluster.pools_of(Live("", "", profile)):
            pool.mix[shape] = pool.mix.get(shape, 0) + count * need.least

    def plan(self, now: float, rows: Mapping[str, Workload], changed: Iterable[str]) -> Plan:
        """Decide once. Only starts, evictions, moves and promises are in the plan."""
        cluster = self.cluster
        cluster.now = now
        for id in sorted(changed):
            self._take(id, rows.get(id))
        self._turn_the_page()
        draft = Draft(cluster)
        waiting = queues(cluster, self._open(draft))
        _until_nothing_changes(cluster, draft, waiting)
        grow(cluster, draft, waiting)
        _let_go(draft)
        self._fresh = list(draft.started)
        return Plan(
            start=tuple(draft.started.values()),
            evict=tuple(draft.evicted.values()),
            move=tuple(draft.moved.values()),
            pending=tuple(self._promises(draft)),
        )

    def _open(self, draft: Draft) -> list[Live]:
        """List those whose queue takes work."""
        found = []
        for workload in self.pending.values():
            key = (workload.policy, workload.profile)
            if key not in self._closed:
                self._closed[key] = closed_or_paused(self.cluster, draft, workload)
            if not self._closed[key]:
                found.append(workload)
        return found

    def _promises(self, draft: Draft) -> Iterable[Waiting]:
        """List promises that were made, and those that are void now."""
        cluster = self.cluster
        for id in sorted(draft.waiting):
            if id in cluster.claims:
                yield draft.waiting[id]
        for id, workload in self.pending.items():
            if id in draft.started or id in draft.waiting:
                continue
            if id in cluster.claims:
                cluster.unclaim(workload)
            if workload.claim:
                yield Waiting(id, "no_free_gpus", "place", "What was promised is not there any more.", {})

    # What changed

    def _take(self, id: str, row: Workload | None) -> None:
        """Put one workload where it is now."""
        cluster = self.cluster
        tenancy = cluster.tenancies.get(id)
        if tenancy is not None and (row is None or row.state not in ADMITTED):
            self._clear(tenancy)
        if row is None:
            self.pending.pop(id, None)
            known = cluster.workloads.pop(id, None)
            if known is not None:
                cluster.unclaim(known)
            return
        workload = cluster.workloads[id] = as_workload(row, placed, None)
        if id in cluster.claims:
            cluster.claims[id].workload = workload
        if row.state not in ADMITTED:
            self.pending[id] = workload
            return
        self.pending.pop(id, None)
        if tenancy is None:
            cluster._admit(workload)
            return
        tenancy.workload = workload
        if workload.state == "checkpointing":
            if not tenancy.leaving:
                cluster.leave(tenancy)
            known_by = cluster.promised_by.setdefault(workload.promised_to or "", [])
            if tenancy not in known_by:
                known_by.append(tenancy)

    def _clear(self, tenancy: Tenancy) -> None:
        """Take a workload off its nodes and lines."""
        cluster, id = self.cluster, tenancy.workload.id
        del cluster.tenancies[id]
        leaving = tenancy.amount if tenancy.leaving else 0
        cluster._book(tenancy, now=-tenancy.amount, leaving=-leaving)
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, 1, 0 if tenancy.leaving else 1)
            part.node.guests.pop(id, None)
        promised = cluster.promised_by.get(tenancy.workload.promised_to or "")
        if promised and tenancy in promised:
            promised.remove(tenancy)
            if not promised:
                del cluster.promised_by[tenancy.workload.promised_to or ""]

    def _turn_the_page(self) -> None:
        """Forget what belonged to the decision before."""
        cluster = self.cluster
        for id in self._fresh:
            if id in cluster.tenancies:
                cluster.tenancies[id].fresh = False
        self._fresh = []
        cluster.rankings.clear()
        cluster.answers.clear()
        cluster.ledger.grown.clear()
        for pool in cluster.pools.values():
            _catch_up(pool)


def _catch_up(pool: PoolState) -> None:
    if pool.packing is not None:
        pool.packing.catch_up()
        pool.packing.seen = 0
    for position in set(pool.touched):
        pool.at_first[position] = list(pool.nodes[position].free)
    pool.touched.clear()
