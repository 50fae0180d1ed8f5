"""Compute the demand for nodes of autoscaled pools: the nodes that pending work would fill, within the budget.

Linear in the pending workloads: imagined nodes only fill up and limits only get closer, so a need that found no room
on a node, in a pool or under a limit once is not tried there again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..index.cluster import Cluster
from ..index.devices import UNLIMITED, hosts, pick
from ..index.groups import WorkloadGroup
from ..index.nodes import PoolState
from ..plan import Fact, Facts, Number, Scale, Waiting
from ..plan_builder import PlanBuilder
from ..request import Need, Shape
from ..snapshot import GPU, Workload
from .demand import Allowance, in_order, useful_pools


@dataclass(slots=True)
class _Imagined:
    """A node that does not exist yet."""

    free: list[int]
    cpu: int
    memory: int

    def take(self, need: Need) -> bool:
        """Add one worker; False if it does not fit."""
        if not hosts(need, self.free, self.free.count(GPU), self.cpu, self.memory):
            return False
        pick(need, self.free)
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

    def _take(self, need: Need, before: dict[int, _Imagined]) -> bool:
        """Add one worker to the first node with room; record the prior state of nodes that are changed in `before`."""
        for at in range(self.full.get(need.shape, 0), len(self.nodes)):
            node = self.nodes[at]
            if need.min_workers > 1 and at not in before:
                before[at] = _Imagined(list(node.free), node.cpu, node.memory)
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


def scale(cluster: Cluster, builder: PlanBuilder, waiting: list[WorkloadGroup], why: bool) -> None:
    """Record the demand for nodes of pending work that may use an autoscaled pool, in the order of rights.

    `why`: record as well that the workloads wait for these nodes, or for a larger budget.
    """
    demands = {
        name: _Demand(pool)
        for name, pool in cluster.pools.items()
        if pool.pool.kind == "autoscaled" and (pool.pool.max_nodes or not cluster.launches)
    }
    allowance = Allowance(cluster, waiting)
    growing = [demand.pool for demand in demands.values()]
    able = useful_pools(cluster, waiting, growing)
    for group, workload in in_order(cluster, waiting, growing):
        beyond = _admit(allowance, [demands[pool.pool.name] for pool in able[group.number]], group, workload)
        if beyond is not None and why:
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
            if why:
                _report_waiting(builder, demand)


def _admit(allowance: Allowance, able: list[_Demand], group: WorkloadGroup, workload: Workload) -> _Demand | None:
    """Add a workload to the demand of the first pool; return the last one where the budget alone is too small."""
    beyond = None
    for demand in able:
        if not allowance.admits(group, demand.pool, in_future=False):
            continue
        if group.need in demand.too_large or not demand.add(group.need):
            beyond = demand
            continue
        demand.by.append(workload.id)
        allowance.claim(group, (demand.pool.pool.name,))
        return None
    return beyond


def _report_waiting(builder: PlanBuilder, demand: _Demand) -> None:
    name, wanted, booting = demand.pool.pool.name, len(demand.nodes), min(demand.pool.pool.booting, len(demand.nodes))
    numbers: dict[str, Number] = {"booting": booting, "wanted": wanted, "pool": name}
    facts = (Fact("waiting_for_node", numbers),)
    for id in demand.by:
        builder.wait_with_own_reason(Waiting(id, "waiting_for_node", "scale_up", facts, numbers))


def _report_over_budget(builder: PlanBuilder, demand: _Demand, workload: Workload) -> None:
    kind = workload.kind
    if kind not in demand.reasons:
        numbers: dict[str, Number] = {"max_nodes": demand.pool.pool.max_nodes, "pool": demand.pool.pool.name}
        demand.reasons[kind] = (Fact("over_budget", {**numbers, "kind": kind}),), numbers
    builder.wait_with_own_reason(Waiting(workload.id, "over_budget", "scale_up", *demand.reasons[kind]))
