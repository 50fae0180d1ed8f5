"""Find the reason code of every workload that waits (engine rule 7)."""

from __future__ import annotations

from collections.abc import Callable

from ..index.devices import UNLIMITED, hosts
from ..plan import Code
from ..request import Need, may_run
from ..snapshot import GPU
from .decisions import Decisions
from .state.cluster import Cluster, FreeResources
from .state.groups import WorkloadGroup
from .state.quota import in_quota, over_capacity, over_limit, static_quota

Reason = tuple[Code, str]
"""Code and rule."""
_FIRST: dict[Code, int] = {"held": 0, "static_quota": 0, "nominated": 0, "node_failed": 2, "too_large": 3}
"""Of several pools the one is named where GPUs idle, else the first that could ever do."""


def reason(decisions: Decisions, group: WorkloadGroup, held_for_it: str | None) -> Reason:
    """Return why a group waits; `held_for_it`: the pool in which GPUs are held for this very workload."""
    reasons = [_in_pool(decisions, group, pool, pool == held_for_it) for pool in group.pools]
    return min(reasons, key=lambda why: _FIRST.get(why[0], 1))


def _in_pool(decisions: Decisions, group: WorkloadGroup, pool: str, mine: bool) -> Reason:
    """Return the reason in one pool: what can never be, then what is not allowed, then what is not there."""
    cluster = decisions.cluster
    return (
        _never_fits(cluster, group, pool)
        or _not_allowed(cluster, group, pool)
        or _static(cluster, group, pool)
        or (None if mine else _held(decisions, group, pool))
        or _beside_guaranteed(cluster, group, pool)
        or _nominated(cluster, group, pool)
        or _not_there(decisions, group, pool)
    )


def _never_fits(cluster: Cluster, group: WorkloadGroup, pool: str) -> Reason | None:
    need = group.need
    nodes = cluster.nodes_of(pool)
    workers = [(min(_when_empty(cluster, name, need), need.min_workers), cluster.usable(name)) for name in nodes]
    every, up = sum(n for n, _ in workers), sum(n for n, usable in workers if usable)
    known = cluster.pools[pool]
    growing = known.kind == "autoscaled" and (known.max_nodes or not need.session)
    if every < need.min_workers and not growing:
        return "too_large", "place"
    return ("node_failed", "place") if up < need.min_workers <= every else None


def _when_empty(cluster: Cluster, name: str, need: Need) -> int:
    node = cluster.nodes[name]
    if node.boots or not may_run(need, node):
        return 0
    devices = len(cluster.capacity[name]) - len(node.foreign_devices)
    limits = node.cpu or UNLIMITED, node.memory or UNLIMITED, node.pods or UNLIMITED
    return hosts(need, [GPU] * devices, devices, *limits)


def _not_allowed(cluster: Cluster, group: WorkloadGroup, pool: str) -> Reason | None:
    amount = group.need.total
    if not amount:
        return None
    if not group.may_borrow and not in_quota(cluster, group.chain, pool, amount, group.non_preemptible):
        return "never_over_quota", "over_quota"
    if over_limit(cluster, group.chain, pool, amount, False) is not None:
        return "limit", "limit"
    return ("pool_capacity", "capacity") if over_capacity(cluster, pool, amount) else None


def _static(cluster: Cluster, group: WorkloadGroup, pool: str) -> Reason | None:
    kept = _kept_from(cluster, group, pool)
    return (
        ("static_quota", "lend") if kept and _fits(cluster, pool, group.need, _free_of_nominations(cluster)) else None
    )


def _kept_from(cluster: Cluster, group: WorkloadGroup, pool: str) -> bool:
    lines = [static_quota(cluster, group.chain, pool, group.need.total, in_future) for in_future in (False, True)]
    return bool(group.need.total) and any(line is not None for line in lines)


def _held(decisions: Decisions, group: WorkloadGroup, pool: str) -> Reason | None:
    cluster, holds = decisions.cluster, decisions.holds
    hold = holds.get(pool, next(iter(holds.values()), None))
    if hold is None or not _fits(cluster, pool, group.need, _free_of_nominations(cluster)):
        return None
    quota = in_quota(cluster, group.chain, pool, group.need.total, group.non_preemptible)
    return None if quota else ("held", "starvation")


def _beside_guaranteed(cluster: Cluster, group: WorkloadGroup, pool: str) -> Reason | None:
    fits = group.need.only_spare and _fits(cluster, pool, group.need, cluster.free)
    return ("held", "guaranteed_gpus") if fits else None


def _nominated(cluster: Cluster, group: WorkloadGroup, pool: str) -> Reason | None:
    if not any(n.pool == pool for n in cluster.nominations.values()) or _kept_from(cluster, group, pool):
        return None
    return ("nominated", "nomination") if _fits(cluster, pool, group.need, cluster.unused) else None


def _not_there(decisions: Decisions, group: WorkloadGroup, pool: str) -> Reason:
    cluster, need = decisions.cluster, group.need

    def at_first(name: str) -> FreeResources:
        return FreeResources(cluster.first[name].devices, UNLIMITED, UNLIMITED)

    if decisions.ahead.get(pool) and _fits(cluster, pool, need, at_first):
        return "outranked", "order"
    free = max(0, cluster.free_gpus(pool, False, need))
    stuck = cluster.stuck_gpus(pool)
    if free < need.total <= free + stuck and in_quota(cluster, group.chain, pool, need.total, group.non_preemptible):
        return "stuck", "terminating"
    return ("no_free_gpus" if free < need.total or not free else "fragmented"), "place"


def _free_of_nominations(cluster: Cluster) -> Callable[[str], FreeResources]:
    """Return what is free of GPUs, with all the CPU and memory that nothing holds now."""

    def free(name: str) -> FreeResources:
        now = cluster.unused(name)
        return FreeResources(cluster.free(name).devices, now.cpu, now.memory, now.pods)

    return free


def _fits(cluster: Cluster, pool: str, need: Need, free_on: Callable[[str], FreeResources]) -> bool:
    nodes = [name for name in cluster.nodes_of(pool) if cluster.suits(name, need)]
    return sum(free_on(name).workers(need) for name in nodes) >= need.min_workers
