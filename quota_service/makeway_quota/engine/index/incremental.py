"""The engine kept on its feet between decisions: only what changed is put in its place again.

`IncrementalEngine.plan` returns what `schedule` returns for the same snapshot, without building the cluster anew.
What a decision does to the cluster is undone at its end: what was decided is true once the world says so, and comes
back as a change. Starts wait where they are until the next change, which confirms most of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop

from ..plan import Plan
from ..schedule import decide
from ..state import Node, Policy, Snapshot, Workload
from .allocations import change
from .cluster import Cluster
from .queues import PendingQueues


class IncrementalEngine:
    """One cluster and its queues. Not for several threads at once."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._stand(snapshot)

    def _stand(self, snapshot: Snapshot) -> None:
        self.shown = replace(snapshot, workloads=())
        self.cluster = Cluster(snapshot)
        self.cluster.take_back()
        self.queues = PendingQueues(self.cluster)

    def show(self, snapshot: Snapshot) -> None:
        """Take the pools, nodes, profiles, policies and settings as they are now; the workloads are not looked at."""
        old, new = self.shown, replace(snapshot, workloads=())
        nodes = {} if old.nodes is new.nodes else _nodes_that_changed(old, new)
        history = old.policies is not new.policies and _without_history(old) == _without_history(new)
        same = replace(old, now=new.now, nodes=new.nodes, policies=new.policies if history else old.policies) == new
        if nodes is None or not same:
            self._stand(replace(snapshot, workloads=tuple(self.cluster.workloads.values())))
            return
        self.shown = new
        if nodes:
            self.cluster.take_back()
        if history:
            for policy in new.policies:
                self.cluster.ledger.account(policy.name).policy = policy
            for account in self.cluster.ledger.accounts.values():
                account.forget()
        for node in nodes.values():
            self.cluster.renew(node)

    def change(self, workloads: Iterable[Workload], gone: Iterable[str] = ()) -> None:
        """Take workloads that are new or not what they were, and the ids of those that are no more."""
        told, left = list(workloads), list(gone)
        others = change(self.cluster, told, left)
        self.queues.change({*(w.id for w in told), *left, *others})

    def plan(self, now: float, why: bool = True) -> Plan:
        """Decide about the world as it was told last; without `why` nobody is told why they wait."""
        self.cluster.take_back()
        self.cluster.now = now
        self._let_yield()
        self.cluster.begin()
        try:
            return decide(self.cluster, self.queues, why)
        finally:
            self.queues.close()
            self.cluster.take_back_but_starts()

    def _let_yield(self) -> None:
        """Look again at who ran long enough by now to yield."""
        cluster, due = self.cluster, set()
        while cluster.yields_at and cluster.yields_at[0][0] <= cluster.now:
            due.add(heappop(cluster.yields_at)[1])
        told = [cluster.workloads[name] for name in sorted(due) if name in cluster.workloads]
        if told:
            self.change(told)

    def in_quota(self, workload: Workload) -> bool:
        """Say whether a workload would be within the reservation in one of its pools, as things are."""
        cluster = self.cluster
        cluster.take_back()
        cluster.begin()
        try:
            account, amount = cluster.account(workload), cluster.need(workload).total
            names = [pool.pool.name for pool in cluster.pools_of(workload)]
            return any(cluster.ledger.in_quota(account, name, amount, workload.non_preemptible) for name in names)
        finally:
            cluster.take_back()


def _nodes_that_changed(old: Snapshot, new: Snapshot) -> dict[str, Node] | None:
    """List the nodes that are not what they were; None if some came or went, or changed their pool or devices."""
    before = {node.name: node for node in old.nodes}
    if len(before) != len(new.nodes):
        return None
    changed = {}
    for node in new.nodes:
        known = before.get(node.name)
        if known is None or known.pool != node.pool or known.gpus != node.gpus or known.devices != node.devices:
            return None
        if known != node:
            changed[node.name] = node
    return changed


def _without_history(snapshot: Snapshot) -> list[Policy]:
    return [replace(policy, history=0) for policy in snapshot.policies]
