"""The quadratic demand for nodes that `rules/scaling.py` replaced, kept to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field

from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.index.nodes import UNLIMITED, PoolState, hosts, pick
from makeway_quota.engine.index.queues import Queue
from makeway_quota.engine.plan import Fact, Number, Scale, Waiting
from makeway_quota.engine.plan_builder import PlanBuilder
from makeway_quota.engine.request import Need
from makeway_quota.engine.rules.order import key
from makeway_quota.engine.rules.quota import Line
from makeway_quota.engine.state import GPU, Workload

_COULD_USE_A_NODE = {"no_free_gpus", "fragmented", "outranked", "node_failed", "held", "too_large"}


@dataclass(slots=True)
class _Imagined:
    """A node that does not exist yet."""

    left: list[int]
    cpu: int
    memory: int

    def take(self, need: Need) -> bool:
        if not hosts(need, self.left, self.left.count(GPU), self.cpu, self.memory):
            return False
        pick(need, self.left)
        self.cpu -= need.cpu
        self.memory -= need.memory
        return True

    def copy(self) -> _Imagined:
        return _Imagined(list(self.left), self.cpu, self.memory)


@dataclass(slots=True)
class _Demand:
    """How many nodes of one pool are wanted so far, and by whom."""

    pool: PoolState
    nodes: list[_Imagined] = field(default_factory=list)
    by: list[str] = field(default_factory=list)

    @property
    def budget(self) -> int:
        return max(0, self.pool.pool.max_nodes - len(self.pool.nodes))

    def add(self, need: Need) -> bool:
        """Make room for a workload on wanted nodes, old ones first; say whether the budget allows it."""
        tried = [node.copy() for node in self.nodes]
        for _ in range(need.least):
            if not any(node.take(need) for node in tried):
                fresh = self._fresh()
                if len(tried) >= self.budget or not fresh.take(need):
                    return False
                tried.append(fresh)
        self.nodes = tried
        return True

    def _fresh(self) -> _Imagined:
        pool = self.pool.pool
        return _Imagined([GPU] * pool.node_gpus, pool.node_cpu or UNLIMITED, pool.node_memory or UNLIMITED)


def scale(cluster: Cluster, builder: PlanBuilder, waiting: list[Queue]) -> None:
    """Turn waiting work that may use a pool that grows into demand for nodes, in the order of the queue."""
    demands = {name: _Demand(pool) for name, pool in cluster.pools.items() if pool.pool.kind == "autoscaled"}
    if not demands:
        return
    more: dict[Line, int] = {}
    for queue, workload in _in_order(cluster, builder, waiting):
        _ask(cluster, builder, demands, more, queue, workload)
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
            for each in demand.by:
                _tell(cluster, builder, demand, cluster.workloads[each])


def _in_order(cluster: Cluster, builder: PlanBuilder, waiting: list[Queue]) -> list[tuple[Queue, Workload]]:
    found = []
    by_number = {queue.number: queue for queue in waiting}
    for number, members, told in builder.groups:
        queue = by_number[abs(number)]
        growing = next((pool for pool in queue.pools if pool.pool.kind == "autoscaled"), None)
        if growing is None or told.code not in _COULD_USE_A_NODE:
            continue
        over = not cluster.ledger.in_quota(queue.account, growing.pool.name, queue.need.total, queue.non_preemptible)
        for workload in members:
            found.append((over, key(cluster, queue, growing, workload, over), queue, workload))
    found.sort(key=lambda each: each[:2])
    return [(queue, workload) for _, _, queue, workload in found]


def _ask(
    cluster: Cluster,
    builder: PlanBuilder,
    demands: dict[str, _Demand],
    more: dict[Line, int],
    queue: Queue,
    workload: Workload,
) -> None:
    need, account = queue.need, queue.account
    beyond = None
    for pool in queue.pools:
        demand = demands.get(pool.pool.name)
        if demand is None:
            continue
        name, minus = pool.pool.name, {line: -amount for line, amount in more.items()}
        if cluster.ledger.over_limit(account, name, need.total, False, minus) is not None:
            continue
        within = cluster.ledger.in_quota(account, name, need.total, queue.non_preemptible)
        if not within and not queue.borrows:
            continue
        if demand.add(need):
            demand.by.append(workload.id)
            for level in account.chain:
                for line in level.covering(name):
                    more[line] = more.get(line, 0) + need.total
            return
        beyond = demand
    if beyond is not None:
        _tell_over_budget(builder, beyond, workload)


def _tell(cluster: Cluster, builder: PlanBuilder, demand: _Demand, workload: Workload) -> None:
    name, wanted, booting = demand.pool.pool.name, len(demand.nodes), min(demand.pool.pool.booting, len(demand.nodes))
    numbers: dict[str, Number] = {"booting": booting, "wanted": wanted, "pool": name}
    builder.wait_instead(
        Waiting(workload.id, "waiting_for_node", "scale_up", (Fact("waiting_for_node", numbers),), numbers)
    )


def _tell_over_budget(builder: PlanBuilder, demand: _Demand, workload: Workload) -> None:
    name, most = demand.pool.pool.name, demand.pool.pool.max_nodes
    numbers: dict[str, Number] = {"max_nodes": most, "pool": name}
    full = Fact("over_budget", {**numbers, "kind": workload.kind})
    builder.wait_instead(Waiting(workload.id, "over_budget", "scale_up", (full,), numbers))
