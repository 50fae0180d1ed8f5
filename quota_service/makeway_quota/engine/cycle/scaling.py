"""Compute the demand for nodes of autoscaled pools: the nodes that pending work would fill, within the budget.

Linear in the pending workloads: imagined nodes only fill up and limits only get closer, so a need that found no room
on a node, in a pool or under a limit once is not tried there again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..index.cluster import Cluster
from ..index.devices import UNLIMITED, hosts, pick
from ..index.ledger import LineState
from ..index.nodes import PoolState
from ..index.queues import Queue
from ..placement.spare import surplus
from ..plan import Fact, Facts, Number, Scale, Waiting
from ..plan_builder import PlanBuilder
from ..request import Need, Shape
from ..rules.order import common
from ..snapshot import GPU, Workload

_COULD_USE_A_NODE = {
    "no_free_gpus",
    "fragmented",
    "outranked",
    "node_failed",
    "held",
    "static_quota",
    "nominated",
    "too_large",
    "protected",
    "patience",
}
Entry = tuple[int, int, float, str, Queue, Workload]
"""A pending workload in the order of the queues: the rank of its queue, what its owner runs, its age, its id."""


@dataclass(slots=True)
class _Imagined:
    """A node that does not exist yet."""

    left: list[int]
    cpu: int
    memory: int

    def take(self, need: Need) -> bool:
        """Add one worker; False if it does not fit."""
        if not hosts(need, self.left, self.left.count(GPU), self.cpu, self.memory):
            return False
        pick(need, self.left)
        self.cpu -= need.cpu
        self.memory -= need.memory
        return True


@dataclass(slots=True)
class _Demand:
    """The nodes of one pool that are wanted so far, and the ids of the workloads that would fill them."""

    pool: PoolState
    nodes: list[_Imagined] = field(default_factory=list)
    by: list[str] = field(default_factory=list)
    full: dict[Shape, int] = field(default_factory=dict)
    """Shape to the number of leading nodes without room for one more of its workers."""
    too_large: set[Need] = field(default_factory=set)
    """Requests for which the budget has no room."""
    reasons: dict[str, tuple[Facts, dict[str, Number]]] = field(default_factory=dict)
    """Kind of workload to the reason to wait where the budget is too small."""

    @property
    def budget(self) -> int:
        return max(0, self.pool.pool.max_nodes - len(self.pool.nodes))

    def add(self, need: Need) -> bool:
        """Add a workload to the wanted nodes, or to new ones; return whether the budget allows it."""
        many, first, before = len(self.nodes), self.full.get(need.shape, 0), dict[int, _Imagined]()
        for _ in range(need.min_workers):
            if not self._take(need, before):
                self.too_large.add(need)
                for at, node in before.items():
                    self.nodes[at] = node
                del self.nodes[many:]
                self.full[need.shape] = first
                return False
        return True

    def leaves_enough(self, need: Need) -> bool:
        """Whether a worker on a new node would leave guaranteed GPUs the CPU and memory that they need (rule 2)."""
        smallest, node = self.pool.smallest(""), self._fresh()
        if smallest is None:
            return True
        before, after = (
            smallest.gpus * hosts(smallest, node.left, len(node.left), node.cpu - cpu, node.memory - memory)
            for cpu, memory in ((0, 0), (need.cpu, need.memory))
        )
        return before == after or surplus(self.pool, True) + after >= 0

    def _take(self, need: Need, before: dict[int, _Imagined]) -> bool:
        """Add one worker to the first node with room; record the prior state of nodes that are changed in `before`."""
        for at in range(self.full.get(need.shape, 0), len(self.nodes)):
            node = self.nodes[at]
            if need.min_workers > 1 and at not in before:
                before[at] = _Imagined(list(node.left), node.cpu, node.memory)
            if node.take(need):
                return True
            self.full[need.shape] = at + 1
        fresh = self._fresh()
        if len(self.nodes) >= self.budget or not fresh.take(need):
            return False
        self.nodes.append(fresh)
        return True

    def _fresh(self) -> _Imagined:
        pool = self.pool.pool
        return _Imagined([GPU] * pool.node_gpus, pool.node_cpu or UNLIMITED, pool.node_memory or UNLIMITED)


def scale(cluster: Cluster, builder: PlanBuilder, waiting: list[Queue]) -> None:
    """Record the demand for nodes of pending work that may use an autoscaled pool, in the order of the queues."""
    demands = {name: _Demand(pool) for name, pool in cluster.pools.items() if pool.pool.kind == "autoscaled"}
    if not demands:
        return
    admission = _Admission(cluster, demands)
    for *_, queue, workload in _in_order(cluster, builder, waiting):
        beyond = admission.admit(queue, workload)
        if beyond is not None:
            _report_over_budget(builder, beyond, workload)
    for name, demand in sorted(demands.items()):
        if demand.nodes:
            wanted = len(demand.nodes)
            builder.scaled.append(
                Scale(
                    name,
                    wanted,
                    tuple(demand.by),
                    "scale_up",
                    (Fact("scale_up", {"workloads": len(demand.by), "wanted": wanted, "pool": name}),),
                    {"wanted": wanted, "booting": demand.pool.pool.booting, "budget_left": demand.budget},
                )
            )
            _report_waiting(builder, demand)


def _in_order(cluster: Cluster, builder: PlanBuilder, waiting: list[Queue]) -> list[Entry]:
    """Return the pending workloads that a new node could help, sorted by `order.key` in their autoscaled pool."""
    by_number = {queue.number: queue for queue in waiting}
    groups = []
    for number, members, reason in builder.groups:
        queue = by_number[abs(number)]
        growing = next((pool for pool in queue.pools if pool.pool.kind == "autoscaled"), None)
        if growing is None or reason.code not in _COULD_USE_A_NODE:
            continue
        if reason.code in ("protected", "patience") and cluster.over_capacity(growing, queue.need.total):
            continue
        over = not cluster.ledger.in_quota(queue.account, growing.pool.name, queue.need.total, queue.non_preemptible)
        groups.append(((over, common(queue, growing, over)), queue, members))
    groups.sort(key=lambda item: item[0])
    result: list[Entry] = []
    rank, last = 0, None
    for place, queue, members in groups:
        rank += place != last
        last = place
        owners = queue.account.owners if cluster.settings.user_fairness else {}
        result += [(rank, owners.get(w.owner, 0), w.submitted_at, w.id, queue, w) for w in members]
    result.sort(key=lambda item: item[:4])
    return result


class _Admission:
    """The autoscaled pools, and the queues that cannot get room in them."""

    def __init__(self, cluster: Cluster, demands: dict[str, _Demand]) -> None:
        self.cluster, self.demands = cluster, demands
        self.minus: dict[LineState, int] = {}
        """Line to the negated milli-GPUs that the demand so far would add to it."""
        self.able: dict[int, list[_Demand]] = {}
        """Queue number to the demand of the pools that it may grow."""
        self.limited: set[tuple[int, str]] = set()
        """Queues and pools where a limit leaves no room for one more."""

    def admit(self, queue: Queue, workload: Workload) -> _Demand | None:
        """Add a workload to the demand; return the last pool where the budget, and no limit, is too small."""
        need, account, beyond = queue.need, queue.account, None
        for demand in self._able(queue):
            name = demand.pool.pool.name
            if (queue.number, name) in self.limited:
                continue
            if self.cluster.ledger.over_limit(account, name, need.total, False, self.minus) is not None:
                self.limited.add((queue.number, name))
            elif need.only_spare and not demand.leaves_enough(need):
                continue  # the GPUs of a new node would need its CPU and memory themselves
            elif need in demand.too_large or not demand.add(need):
                beyond = demand
            else:
                demand.by.append(workload.id)
                for line in account.limiting(name):
                    self.minus[line] = self.minus.get(line, 0) - need.total
                return None
        return beyond

    def _able(self, queue: Queue) -> list[_Demand]:
        result = self.able.get(queue.number)
        if result is None:
            result = self.able[queue.number] = [
                self.demands[pool.pool.name]
                for pool in queue.pools
                if pool.pool.name in self.demands and self._may_run(queue, pool.pool.name)
            ]
        return result

    def _may_run(self, queue: Queue, pool: str) -> bool:
        in_quota = self.cluster.ledger.in_quota(queue.account, pool, queue.need.total, queue.non_preemptible)
        return in_quota or queue.borrows


def _report_waiting(builder: PlanBuilder, demand: _Demand) -> None:
    name, wanted, booting = demand.pool.pool.name, len(demand.nodes), min(demand.pool.pool.booting, len(demand.nodes))
    numbers: dict[str, Number] = {"booting": booting, "wanted": wanted, "pool": name}
    facts = (Fact("waiting_for_node", numbers),)
    for id in demand.by:
        builder.wait_instead(Waiting(id, "waiting_for_node", "scale_up", facts, numbers))


def _report_over_budget(builder: PlanBuilder, demand: _Demand, workload: Workload) -> None:
    kind = workload.kind
    if kind not in demand.reasons:
        numbers: dict[str, Number] = {"max_nodes": demand.pool.pool.max_nodes, "pool": demand.pool.pool.name}
        demand.reasons[kind] = (Fact("over_budget", {**numbers, "kind": kind}),), numbers
    builder.wait_instead(Waiting(workload.id, "over_budget", "scale_up", *demand.reasons[kind]))
