"""Turn waiting workloads into demand for nodes of autoscaled pools, within their budgets."""

from __future__ import annotations

from collections.abc import Mapping

from ..index.devices import UNLIMITED, pick
from ..plan import Code, Fact, Number, Scale
from ..request import Need
from ..snapshot import GPU, Pool, Workload
from .demand import Claim, admits, helps, in_order
from .state.cluster import Cluster, FreeResources
from .state.groups import WorkloadGroup


class Wanted:
    """The nodes requested of one pool so far, and the workloads that would fill them."""

    def __init__(self, pool: Pool, nodes: int) -> None:
        self.pool, self.budget = pool, max(0, pool.max_nodes - nodes)
        self.nodes: list[FreeResources] = []
        self.by: list[str] = []

    def add(self, need: Need) -> bool:
        """Make room for a workload on the wanted nodes, old ones first; return whether the budget allows it."""
        tried = [FreeResources(list(node.devices), node.cpu, node.memory) for node in self.nodes]
        for _ in range(need.min_workers):
            at = next((at for at, node in enumerate(tried) if node.workers(need)), None)
            if at is None:
                pool = self.pool
                fresh = FreeResources([GPU] * pool.node_gpus, pool.node_cpu or UNLIMITED, pool.node_memory or UNLIMITED)
                if len(tried) >= self.budget or not fresh.workers(need):
                    return False
                tried.append(fresh)
                at = len(tried) - 1
            pick(need, tried[at].devices)
            tried[at] = tried[at]._replace(cpu=tried[at].cpu - need.cpu, memory=tried[at].memory - need.memory)
        self.nodes = tried
        return True


def scale(cluster: Cluster, waiting: Mapping[str, WorkloadGroup]) -> tuple[list[Scale], dict[str, Code]]:
    """Return the demand, and the codes of the workloads that wait for a node or for a larger budget instead."""
    growing = [pool for pool in cluster.pools.values() if pool.kind == "autoscaled" and pool.max_nodes]
    wanted = {pool.name: Wanted(pool, len(cluster.nodes_of(pool.name))) for pool in growing}
    claims: list[Claim] = []
    codes: dict[str, Code] = {}
    for group, workload in in_order(cluster, waiting, wanted):
        code = _ask(cluster, wanted, claims, group, workload)
        if code is not None:
            codes[workload.id] = code
    result = []
    for name, demand in sorted(wanted.items()):
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


def _ask(
    cluster: Cluster, wanted: Mapping[str, Wanted], claims: list[Claim], group: WorkloadGroup, workload: Workload
) -> Code | None:
    beyond = False
    for pool in [pool for pool in group.pools if pool in wanted]:
        if not (helps(cluster, group, pool) and admits(cluster, group, pool, claims)):
            continue
        if wanted[pool].add(group.need):
            wanted[pool].by.append(workload.id)
            claims.append(Claim(group, (pool,)))
            return "waiting_for_node"
        beyond = True
    return "over_budget" if beyond else None
