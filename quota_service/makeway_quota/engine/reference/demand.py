"""Find the pending work that machines of autoscaled pools could run, in the order of rights (engine rule 4)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from ..plan import Demand
from ..snapshot import Workload
from .state.cluster import Cluster, WorkerPlacement
from .state.groups import WorkloadGroup, sort_key
from .state.placement import find
from .state.quota import TeamQuotaLine, counts, in_quota, limiting, pool_usage, reserving, static_quota
from .state.spare import room_on_a_new_node


class Claim(NamedTuple):
    """A workload that will run on a new node of one of some pools."""

    group: WorkloadGroup
    pools: tuple[str, ...]


def find_demand(
    cluster: Cluster, waiting: Mapping[str, WorkloadGroup], awaiting: Mapping[str, WorkloadGroup]
) -> tuple[Demand, ...]:
    """Return the demand of the workloads that wait; those that will get what terminating work leaves are none.

    `awaiting`: those that are nominated to nodes which boot; each counts in the pool of its nomination, with its
    workers on such nodes.
    """
    growing = {pool.name for pool in cluster.pools.values() if pool.kind == "autoscaled"}
    trial, claims, result = cluster.copy(), list[Claim](), list[Demand]()
    bare = cluster.copy()
    for name in awaiting:
        del bare.nominations[name]
    for group, workload in in_order(bare, {**waiting, **awaiting}, growing, every=True) if growing else ():
        if workload.id in awaiting:
            mine = cluster.nominations[workload.id]
            if mine.pool in growing and helps(cluster, group, mine.pool):
                nodes = tuple(part.node for part in mine.parts)
                there = sum(cluster.nodes[name].boots for name in nodes)
                result.append(_demand(group, workload, (mine.pool,))._replace(workers=there, awaits=nodes))
            continue
        parts = _soon_free(cluster, trial, group, claims)
        if parts:
            trial.nominate(workload, parts)
            continue
        pools = tuple(
            pool
            for pool in group.pools
            if pool in growing and helps(cluster, group, pool) and admits(trial, group, pool, claims)
        )
        if pools:
            result.append(_demand(group, workload, pools))
            claims.append(Claim(group, pools))
    return tuple(result)


def _demand(group: WorkloadGroup, workload: Workload, pools: tuple[str, ...]) -> Demand:
    need = group.need
    shape = need.min_workers, need.gpus, need.cpu, need.memory, need.models, need.session
    return Demand(workload.id, pools, *shape)


def in_order(
    cluster: Cluster, waiting: Mapping[str, WorkloadGroup], growing: Container[str], every: bool = False
) -> list[tuple[WorkloadGroup, Workload]]:
    """Return the workloads without a nomination in the order of the first growing pool of each; or `every` workload."""
    entries = []
    for name, group in waiting.items():
        pools = [pool for pool in group.pools if pool in growing] or list(group.pools if every else ())
        if pools and name not in cluster.nominations:
            workload, over_quota = (
                cluster.live[name],
                not in_quota(cluster, group.chain, pools[0], group.need.total, group.non_preemptible),
            )
            entries.append((over_quota, sort_key(cluster, group, pools[0], workload, over_quota), group, workload))
    entries.sort(key=lambda item: item[:2])
    return [(group, workload) for _, _, group, workload in entries]


def helps(cluster: Cluster, group: WorkloadGroup, pool: str) -> bool:
    """Whether a new node of a pool would be of use to a group: it runs there, and no static quota keeps its GPUs."""
    need, chain = group.need, group.chain
    if need.session and not cluster.pools[pool].sessions:
        return False
    if need.total and any(static_quota(cluster, chain, pool, 0, in_future) for in_future in (False, True)):
        return False
    return not need.only_spare or room_on_a_new_node(cluster, pool, need)


def admits(cluster: Cluster, group: WorkloadGroup, pool: str, claims: Sequence[Claim], in_future: bool = False) -> bool:
    """Whether one more of a group is within limits and capacity beside all claims, and in quota where it must be."""
    amount, known = group.need.total, cluster.pools[pool]
    if amount and known.capacity is not None:
        here = sum(claim.group.need.total for claim in claims if pool in claim.pools)
        if pool_usage(cluster, pool, in_future) + here + amount > known.capacity:
            return False
    for line in limiting(cluster, group.chain, pool) if amount else ():
        counted = counts(cluster, line)
        used = counted.future_usage if in_future else max(counted.usage, counted.future_usage)
        if used + _claimed(cluster, line, claims) + amount > (line.quota.limit or 0):
            return False
    if group.may_borrow:
        return True

    def reserved(line: TeamQuotaLine, beyond: bool) -> int:
        alike = [claim for claim in claims if claim.group.non_preemptible or not group.non_preemptible]
        return _claimed(cluster, line, alike, beyond)

    return in_quota(cluster, group.chain, pool, amount, group.non_preemptible, reserved)


def _claimed(cluster: Cluster, line: TeamQuotaLine, claims: Sequence[Claim], beyond: bool = False) -> int:
    """Return what claims count on a line, each once; `beyond`: where no level below the line reserves anything."""
    total = 0
    for group, pools in claims:
        if line.team in group.chain:
            below = group.chain[: group.chain.index(line.team)]
            counted = [
                pool
                for pool in pools
                if line.quota.covers(pool) and not (beyond and any(reserving(cluster, level, pool) for level in below))
            ]
            total += group.need.total if counted else 0
    return total


def _soon_free(
    cluster: Cluster, trial: Cluster, group: WorkloadGroup, claims: Sequence[Claim]
) -> tuple[WorkerPlacement, ...]:
    """Return what one of a group will get of the room that terminating work leaves, in its first pool with any."""
    for pool in group.pools:
        if find(cluster, pool, group.need) or not admits(trial, group, pool, claims, in_future=True):
            continue  # it is kept off GPUs that are free already, or may not run there
        if group.need.total and static_quota(trial, group.chain, pool, group.need.total, True):
            continue
        parts = find(trial, pool, group.need, True)
        if parts:
            return parts
    return ()
