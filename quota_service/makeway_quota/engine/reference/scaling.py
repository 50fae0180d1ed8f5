"""Turn waiting workloads into demand for nodes of autoscaled pools, within their budgets."""

from __future__ import annotations

from collections.abc import Mapping

from ..index.devices import UNLIMITED, pick
from ..plan import Code, Fact, Number, Scale
from ..request import Need
from ..snapshot import GPU, Pool, Workload
from .state.cluster import Cluster, Left
from .state.queues import Queue, key
from .state.quota import PolicyLine, counts, covering, in_quota, limiting, over_capacity
from .state.spare import room_on_a_new_node

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


class Demand:
    """The nodes requested of one pool so far, and the workloads that would fill them."""

    def __init__(self, pool: Pool, nodes: int) -> None:
        self.pool, self.budget = pool, max(0, pool.max_nodes - nodes)
        self.nodes: list[Left] = []
        self.by: list[str] = []

    def add(self, need: Need) -> bool:
        """Make room for a workload on the wanted nodes, old ones first; return whether the budget allows it."""
        tried = [Left(list(node.devices), node.cpu, node.memory) for node in self.nodes]
        for _ in range(need.min_workers):
            at = next((at for at, node in enumerate(tried) if node.workers(need)), None)
            if at is None:
                pool = self.pool
                fresh = Left([GPU] * pool.node_gpus, pool.node_cpu or UNLIMITED, pool.node_memory or UNLIMITED)
                if len(tried) >= self.budget or not fresh.workers(need):
                    return False
                tried.append(fresh)
                at = len(tried) - 1
            pick(need, tried[at].devices)
            tried[at] = tried[at]._replace(cpu=tried[at].cpu - need.cpu, memory=tried[at].memory - need.memory)
        self.nodes = tried
        return True


def scale(cluster: Cluster, waiting: Mapping[str, tuple[Queue, Code]]) -> tuple[list[Scale], dict[str, Code]]:
    """Return the demand, and the codes of the workloads that wait for a node or for a larger budget instead."""
    growing = [pool for pool in cluster.pools.values() if pool.kind == "autoscaled"]
    demands = {pool.name: Demand(pool, len(cluster.nodes_of(pool.name))) for pool in growing}
    more: dict[PolicyLine, int] = {}
    codes: dict[str, Code] = {}
    for queue, workload in _in_order(cluster, waiting, demands):
        code = _ask(cluster, demands, more, queue, workload)
        if code is not None:
            codes[workload.id] = code
    result = []
    for name, demand in sorted(demands.items()):
        if demand.nodes:
            numbers: dict[str, Number] = {
                "wanted": len(demand.nodes),
                "booting": demand.pool.booting,
                "budget_left": demand.budget,
            }
            result.append(
                Scale(
                    name,
                    len(demand.nodes),
                    tuple(demand.by),
                    "scale_up",
                    (Fact("scale_up", {"workloads": len(demand.by), "pool": name, **numbers}),),
                    numbers,
                )
            )
    return result, codes


def _in_order(
    cluster: Cluster, waiting: Mapping[str, tuple[Queue, Code]], demands: Mapping[str, Demand]
) -> list[tuple[Queue, Workload]]:
    result = []
    for name, (queue, code) in waiting.items():
        pool = next((pool for pool in queue.pools if pool in demands), None)
        full = pool and code in ("protected", "patience") and over_capacity(cluster, pool, queue.need.total)
        if pool is not None and code in _COULD_USE_A_NODE and not full:
            over = not in_quota(cluster, queue.levels, pool, queue.need.total, queue.guaranteed)
            workload = cluster.live[name]
            result.append((over, key(cluster, queue, pool, workload, over), queue, workload))
    result.sort(key=lambda item: item[:2])
    return [(queue, workload) for _, _, queue, workload in result]


def _ask(
    cluster: Cluster, demands: Mapping[str, Demand], more: dict[PolicyLine, int], queue: Queue, workload: Workload
) -> Code | None:
    need, levels, beyond = queue.need, queue.levels, False
    for pool in queue.pools:
        demand = demands.get(pool)
        if demand is None or _over_limit(cluster, levels, pool, need.total, more):
            continue
        if not queue.may_borrow and not in_quota(cluster, levels, pool, need.total, queue.guaranteed):
            continue
        if need.only_spare and not room_on_a_new_node(cluster, pool, need):
            continue
        if demand.add(need):
            demand.by.append(workload.id)
            for line in (line for level in levels for line in covering(cluster, level, pool)):
                more[line] = more.get(line, 0) + need.total
            return "waiting_for_node"
        beyond = True
    return "over_budget" if beyond else None


def _over_limit(
    cluster: Cluster, levels: tuple[str, ...], pool: str, amount: int, more: Mapping[PolicyLine, int]
) -> bool:
    for line in limiting(cluster, levels, pool):
        each = counts(cluster, line)
        if max(each.now, each.future) + more.get(line, 0) + amount > (line.quota.limit or 0):
            return True
    return False
