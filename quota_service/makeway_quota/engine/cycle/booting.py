"""Nominate work in quota to nodes that boot, where neither free GPUs nor an eviction help it (rule 5.10).

Such a nomination stands for one round of a plan: the next one serves its workload anew, in the order of rights, so that
nothing is held for a node that does not boot any more. Called by the rounds of the admission cycle (rounds.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from ..index.cluster import Cluster
from ..index.devices import pick
from ..index.groups import WorkloadGroup
from ..index.ledger import Account
from ..index.nodes import NodeState, PoolState, WorkerPlacement
from ..placement.fit import static_quota
from ..plan_builder import PlanBuilder
from ..request import Need, may_run
from ..snapshot import Workload


def await_nodes(builder: PlanBuilder, group: WorkloadGroup, workload: Workload, pools: Iterable[PoolState]) -> bool:
    """Nominate a workload in the first of these pools where it fits once nodes that boot are ready."""
    cluster, need, account = builder.cluster, group.need, group.account
    for pool in pools if need.total else ():
        if not pool.booting or cluster.over_capacity(pool, need.total, True):
            continue
        if cluster.ledger.over_limit(account, pool.pool.name, need.total, True) is not None:
            continue
        parts = find_when_ready(cluster, account, pool, need)
        if parts:
            cluster.nominate(workload, need, parts)
            builder.awaiting[workload.id] = workload, group
            if group.non_preemptible:
                builder.helped_by_booting.clear()
            else:
                builder.helped_by_booting[group.number] = builder.progress.decisions
            return True
    return False


def only_booting_helps(builder: PlanBuilder, group: WorkloadGroup) -> bool:
    """Whether neither free GPUs nor an eviction help the next of a group, as they did not help one of it before.

    Nominations of preemptible work in quota only take room: except with departments, no work becomes a candidate.
    """
    return not builder.cluster.ledger.nested and (
        builder.helped_by_booting.get(group.number) == builder.progress.decisions
    )


def find_when_ready(cluster: Cluster, account: Account, pool: PoolState, need: Need) -> tuple[WorkerPlacement, ...]:
    """Return a placement for `min_workers` workers as soon as nodes that boot make it possible; empty if they do not.

    It takes as few workers as possible to nodes that are ready before: their GPUs are kept idle until then. None of
    these is one that a static quota of another team keeps free.
    """
    ready: list[tuple[int, NodeState]] = []
    if need.min_workers > 1:  # one worker alone would be nominated there
        ready = [(node.workers(need, True), node) for node in pool.nodes if node.suits(need)]
    room = sum([count for count, _ in ready])
    chosen: list[tuple[int, NodeState]] = []
    missing = need.min_workers  # the nodes that are ready have to take these
    for node in pool.booting_with(need.whole_devices):
        if may_run(need, node.node) and node.node.name not in need.avoid and (count := node.workers(need, True)):
            chosen.append((count, node))
            missing = max(0, missing - count)
            if missing <= room and static_quota(cluster, account, pool, missing * need.gpus, True) is None:
                break
    else:
        return ()
    parts: list[WorkerPlacement] = []
    for count, node in (*chosen, *ready):
        free, idle = list(node.free_later), None if node.boots else node.free
        for _ in range(min(count, need.min_workers - len(parts))):
            parts.append(WorkerPlacement(len(parts), node, *pick(need, free, idle)))
    return tuple(parts)


def serve_again(cluster: Cluster, builder: PlanBuilder) -> None:
    """Withdraw these nominations: the workloads are served anew."""
    for workload, group in reversed(builder.awaiting.values()):  # the heads of their groups come last
        cluster.withdraw_nomination(workload)
        group.put_back(workload)
    builder.awaiting.clear()
    builder.helped_by_booting.clear()
