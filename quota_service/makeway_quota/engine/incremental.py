"""Keep the engine's state between decisions, and apply only what changed.

`IncrementalEngine.plan` returns what `schedule` returns for the same snapshot, without building the cluster anew.
The effects of a decision on the cluster are undone at its end: a decision is true once the world shows it, and comes
back as a change. Starts stay where they are until the next change, which confirms most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop

from .index import node_changes
from .index.allocations import change
from .index.cluster import Cluster
from .index.groups import PendingWorkloads
from .plan import Plan
from .schedule import decide
from .snapshot import Node, Snapshot, TeamQuota, Workload


class IncrementalEngine:
    """One cluster and its groups. Not thread-safe.

    `keeps_bounds`: the next decision is likely to search victims for the same requests. `pause` is called between the
    steps of a search for victims, and may block.
    """

    def __init__(self, snapshot: Snapshot, keeps_bounds: bool = False, pause: Callable[[], None] | None = None) -> None:
        self._keeps_bounds = keeps_bounds
        self._pause = pause
        self.demand = True
        """whether plans say what machines of autoscaled pools are for"""
        self._build(snapshot)

    def _build(self, snapshot: Snapshot) -> None:
        self.shown = replace(snapshot, nodes=(), workloads=())
        self.cluster = Cluster(snapshot)
        self.cluster.keeps_bounds = self._keeps_bounds
        self.cluster.pause = self._pause or self.cluster.pause
        self.cluster.reset()
        self.groups = PendingWorkloads(self.cluster)

    def snapshot(self, now: float) -> Snapshot:
        """Return all that the engine was shown, at a time; what its plans decided is not in it."""
        nodes = tuple(state.node for state in self.cluster.nodes.values())
        return replace(self.shown, now=now, nodes=nodes, workloads=tuple(self.cluster.workloads.values()))

    def show(self, snapshot: Snapshot) -> None:
        """Apply a snapshot's time, settings, pools, profiles, teams and nodes; its workloads are ignored."""
        self.use(snapshot)
        known = self.cluster.nodes
        changed = [n for n in snapshot.nodes if n.name not in known or known[n.name].node != n]
        gone = known.keys() - {node.name for node in snapshot.nodes}
        if changed or gone:
            self.change_nodes(changed, gone)

    def use(self, snapshot: Snapshot) -> None:
        """Apply time, settings, pools, profiles and teams; a difference rebuilds the cluster.

        Nodes and workloads are ignored. A difference in the teams' history alone needs no rebuild.
        """
        old, new = self.shown, replace(snapshot, nodes=(), workloads=())
        history = old.policies is not new.policies and _without_history(old) == _without_history(new)
        if replace(old, now=new.now, policies=new.policies if history else old.policies) != new:
            self._build_anew(new)
            return
        self.shown = new
        if history:
            for team in new.policies:
                self.cluster.ledger.account(team.name).team = team
            for account in self.cluster.ledger.accounts.values():
                account.forget()

    def change_nodes(self, nodes: Iterable[Node], gone: Iterable[str] = ()) -> None:
        """Apply new and changed nodes, and the names of removed ones."""
        cluster, changed, removed = self.cluster, list(nodes), list(gone)
        known = [cluster.nodes[name].node for name in {*removed, *(n.name for n in changed)} if name in cluster.nodes]
        if not all(node_changes.known_pool(cluster, node) for node in (*changed, *known)):
            named = {name: state.node for name, state in cluster.nodes.items() if name not in removed}
            self._build_anew(self.shown, (named | {node.name: node for node in changed}).values())
            return
        cluster.reset()
        others: set[str] = set()
        for name in removed:
            others |= node_changes.remove(cluster, name)
        for node in changed:
            others |= node_changes.put(cluster, node)
        self.groups.change(others)

    def _build_anew(self, snapshot: Snapshot, nodes: Iterable[Node] | None = None) -> None:
        """Rebuild the cluster from a snapshot and the nodes and workloads that are known."""
        cluster = self.cluster
        kept = [state.node for state in cluster.nodes.values()] if nodes is None else nodes
        self._build(replace(snapshot, nodes=tuple(kept), workloads=tuple(cluster.workloads.values())))

    def change(self, workloads: Iterable[Workload], gone: Iterable[str] = ()) -> None:
        """Apply new and changed workloads, and the ids of removed ones."""
        changed, removed = list(workloads), list(gone)
        others = change(self.cluster, changed, removed)
        self.groups.change({*(w.id for w in changed), *removed, *others})

    def plan(self, now: float, why: bool = True) -> Plan:
        """Return the plan for the present state; without `why`, it has no reasons for waiting."""
        self.cluster.reset()
        before, self.cluster.now = self.cluster.now, now
        self._let_time_pass(before)
        self.cluster.begin()
        try:
            return decide(self.cluster, self.groups, why, self.demand)
        finally:
            self.groups.end()
            self.cluster.reset_except_starts()

    def _let_time_pass(self, before: float) -> None:
        """Lower the priority of jobs that ran for `yields_after` by now; what terminates for too long is stuck."""
        cluster, due = self.cluster, set()
        for moments in (cluster.yields_at, cluster.late.workloads):
            while moments and moments[0][0] <= cluster.now:
                due.add(heappop(moments)[1])
        if cluster.now < before:  # the clock was set back: what was stuck, or yielded, may not any more
            due.update(cluster.terminating, cluster.yielding)
        node_changes.take_stuck_off_future(cluster, check_all=cluster.now < before)
        due_workloads = [cluster.workloads[name] for name in sorted(due) if name in cluster.workloads]
        if due_workloads:
            self.change(due_workloads)

    def in_quota(self, workload: Workload) -> bool:
        """Whether a workload would be within the reservation in one of its pools now."""
        cluster = self.cluster
        cluster.reset()
        cluster.begin()
        try:
            account, amount = cluster.account(workload), cluster.need(workload).total
            names = [pool.pool.name for pool in cluster.pools_of(workload)]
            return any(cluster.ledger.in_quota(account, name, amount, workload.non_preemptible) for name in names)
        finally:
            cluster.reset()


def _without_history(snapshot: Snapshot) -> list[TeamQuota]:
    return [replace(team, history=0) for team in snapshot.policies]
