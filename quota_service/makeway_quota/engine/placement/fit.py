"""Find nodes and devices for a workload, or the static quota that keeps it out."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, islice

from ..index.cluster import Cluster
from ..index.devices import pick
from ..index.ledger import Account, LineState, is_within, kept_together
from ..index.nodes import NodeState, Part, PoolState
from ..request import Need
from ..snapshot import GPU
from .pack_index import PackIndex
from .spare import Spare


def find(pool: PoolState, need: Need, later: bool = False) -> tuple[Part, ...]:
    """Return a placement in a pool for the least number of workers, now or `later`; empty if there is none.

    `pack` keeps the most useful free GPUs for the mix of work that the pool serves (packing.py), `spread` takes
    the node with the most free GPUs; ties go to the name. A gang gets as few nodes as possible, all of it or nothing.
    """
    parts = _find(pool, need, later, None)
    if need.only_spare and parts:
        spare = Spare(pool, need, later)
        return parts if spare.admits(parts) else _find(pool, need, later, spare)
    return parts


def _find(pool: PoolState, need: Need, later: bool, spare: Spare | None) -> tuple[Part, ...]:
    """Return a placement, only on nodes that have something to spare if that is asked."""
    if need.min_workers == 1:
        if not enough(pool, need, later):
            return ()
        if not later and pool.pool.strategy == "pack" and pool.mix and not need.avoid:
            return _packed(pool, need, spare)
        node = _one(pool, need, later, spare)
        return _parts_on(node, need, 0, 1, later) if node else ()
    return _gang(pool, need, later, spare)


def _workers(node: NodeState, need: Need, later: bool, spare: Spare | None) -> int:
    """Return how many workers a node could host, and spare what they take."""
    count = node.workers(need, later)
    return count if spare is None or not count else spare.workers(node, count)


def enough(pool: PoolState, need: Need, later: bool = False) -> bool:
    """Whether the number of free GPUs could be enough; False is certain, True is not."""
    if not need.whole:
        return (pool.future if later else pool.free) >= need.total
    buckets, whole = pool.by_future if later else pool.by_free, need.whole
    if need.min_workers == 1:
        return any(buckets[whole:])
    return sum([len(bucket) * (size // whole) for size, bucket in enumerate(buckets) if bucket]) >= need.min_workers


def _packed(pool: PoolState, need: Need, spare: Spare | None) -> tuple[Part, ...]:
    """Return the placement that keeps the most useful free GPUs for the mix; in a full pool only one node is left."""
    able = list(islice(chain.from_iterable(pool.by_free[need.whole :]), 2)) if need.whole else []
    if len(able) == 1:
        only = pool.nodes[able[0]]
        return _parts_on(only, need, 0, 1, False) if only.suits(need) and only.workers(need, False) else ()
    if pool.packing is None:
        pool.packing = PackIndex(pool)
    among = None
    if spare is not None or (need.session and pool.limits_sessions):
        among = [n.position for n in pool.nodes if n.suits(need) and _workers(n, need, False, spare)]
    best = pool.packing.best(need, among)
    if best is None:
        return ()
    node, device = best
    if 0 < need.gpus < GPU:
        return (Part(0, node, (device,), need.gpus),)
    return _parts_on(node, need, 0, 1, False)


def _one(pool: PoolState, need: Need, later: bool, spare: Spare | None) -> NodeState | None:
    if 0 < need.gpus < GPU:
        return _shared(pool, need, later)
    buckets = pool.by_future if later else pool.by_free
    sizes = range(need.whole, len(buckets))
    for size in sizes if pool.pool.strategy == "pack" else reversed(sizes):
        for position in buckets[size]:
            node = pool.nodes[position]
            if node.suits(need) and _workers(node, need, later, spare):
                return node
    return None


def _shared(pool: PoolState, need: Need, later: bool) -> NodeState | None:
    """Return the node whose device a share of one fills best; untouched devices come last, on the fullest node."""
    best: tuple[int, int, int] | None = None
    for node in pool.nodes:
        if not node.suits(need) or not node.workers(need, later):
            continue
        free = min(f for f in (node.future if later else node.free) if f >= need.gpus)
        whole = node.whole_future if later else node.whole_free
        key = (free, whole if pool.pool.strategy == "pack" else -whole, node.position)
        if best is None or key < best:
            best = key
    return pool.nodes[best[2]] if best else None


def _gang(pool: PoolState, need: Need, later: bool, spare: Spare | None) -> tuple[Part, ...]:
    if not enough(pool, need, later):
        return ()
    buckets = pool.by_future if later else pool.by_free
    nodes = (pool.nodes[at] for bucket in buckets[need.whole :] for at in bucket)
    able = [(_workers(node, need, later, spare), node) for node in nodes if node.suits(need)]
    able = [(count, node) for count, node in able if count]
    able.sort(key=lambda item: (-item[0], item[1].whole_free, item[1].position))
    parts: list[Part] = []
    while able and len(parts) < need.min_workers:
        missing = need.min_workers - len(parts)
        at = 0
        if able[0][0] >= missing:
            at = min((i for i, (count, _) in enumerate(able) if count >= missing), key=lambda i: (able[i][0], i))
        count, node = able.pop(at)
        parts += _parts_on(node, need, len(parts), min(count, missing), later)
    return tuple(parts) if len(parts) == need.min_workers else ()


def _parts_on(node: NodeState, need: Need, first: int, count: int, later: bool) -> tuple[Part, ...]:
    free = list(node.future if later else node.free)
    avoid = node.free if later else None
    parts = []
    for worker in range(first, first + count):
        devices, milli = pick(need, free, avoid)
        parts.append(Part(worker, node, devices, milli))
    return tuple(parts)


def static_quota(cluster: Cluster, account: Account, pool: PoolState, amount: int, later: bool) -> LineState | None:
    """Return the static quota of another team whose idle GPUs `amount` more would use; None if there is none.

    Static quotas within its pools are kept as well: those that cover `pool`, and as far as their own pools have free
    GPUs those that do not, its own team's too.
    """
    ledger, name = cluster.ledger, pool.pool.name
    kept = [line for line, _ in ledger.static_quotas(account, name, later)]
    if not kept:
        return None
    elsewhere = [line for line in ledger.holding if line.kept_free(later) and not line.quota.covers(name)]
    for line in kept:
        here = [(other.account, other.kept_free(later)) for other in kept if is_within(other.quota, line.quota)]
        outside = [other for other in elsewhere if is_within(other.quota, line.quota)]
        held = kept_together(here)
        if outside:
            more = [
                (other.account, min(other.kept_free(later), _free_in(cluster, other.quota.pools, later)))
                for other in outside
            ]
            pools = {pool for other in outside for pool in other.quota.pools}
            held = min(kept_together([*here, *more]), held + _free_in(cluster, pools, later))
        if _free_in(cluster, line.quota.pools, later) - amount < held:
            return line
    return None


def _free_in(cluster: Cluster, pools: Collection[str], later: bool) -> int:
    """Return the free milli-GPUs of pools, of all where none is named."""
    return sum(_available(cluster, pool, later) for name, pool in cluster.pools.items() if not pools or name in pools)


def _available(cluster: Cluster, pool: PoolState, later: bool) -> int:
    free = pool.future if later else pool.free
    if pool.pool.capacity is not None:
        name = pool.pool.name
        used = cluster.pool_future[name] if later else max(cluster.pool_now[name], cluster.pool_future[name])
        free = min(free, max(0, pool.pool.capacity - used))
    return free


def allowed(cluster: Cluster, account: Account, pool: PoolState, amount: int, later: bool = False) -> bool:
    """Whether limits, the pool's capacity and other teams' static quotas admit `amount` more."""
    return not amount or (
        not cluster.over_capacity(pool, amount, later)
        and cluster.ledger.over_limit(account, pool.pool.name, amount, later) is None
        and (later or static_quota(cluster, account, pool, amount, False) is None)
        and static_quota(cluster, account, pool, amount, True) is None
    )
