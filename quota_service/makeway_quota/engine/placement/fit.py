"""Find nodes and devices for a workload, or the static quota that keeps it out."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, islice

from ..index.cluster import Cluster
from ..index.devices import pick
from ..index.ledger import Account, LineState, is_within, kept_together
from ..index.nodes import NodeState, PoolState, WorkerPlacement
from ..request import Need
from ..snapshot import GPU
from .pack_index import PackIndex
from .spare import Spare


def find_placement(pool: PoolState, need: Need, in_future: bool = False) -> tuple[WorkerPlacement, ...]:
    """Return a placement in a pool for `min_workers` workers, now or `in_future`; empty if there is none.

    `pack` keeps free GPUs as useful as possible for the mix of work that the pool serves (packing.py), `spread` takes
    the node with the most free GPUs, `fill` the one with the fewest, so that others empty; ties go to the name. A gang
    gets as few nodes as possible, all of it or nothing.
    """
    parts = _placement_in_pool(pool, need, in_future, None)
    if need.only_spare and parts:
        spare = Spare(pool, need, in_future)
        return parts if spare.admits(parts) else _placement_in_pool(pool, need, in_future, spare)
    return parts


def _placement_in_pool(
    pool: PoolState, need: Need, in_future: bool, spare: Spare | None
) -> tuple[WorkerPlacement, ...]:
    """Return a placement, only on nodes that have something to spare if that is asked."""
    if need.min_workers == 1:
        if not may_have_enough_gpus(pool, need, in_future):
            return ()
        if not in_future and pool.pool.strategy == "pack" and pool.mix and not need.avoid:
            return _packed_placement(pool, need, spare)
        node = _node_for_worker(pool, need, in_future, spare)
        return _parts_on(node, need, 0, 1, in_future) if node else ()
    return _gang_placement(pool, need, in_future, spare)


def _workers(node: NodeState, need: Need, in_future: bool, spare: Spare | None) -> int:
    """Return how many workers a node could host, and spare what they take."""
    count = node.workers(need, in_future)
    return count if spare is None or not count else spare.workers(node, count)


def may_have_enough_gpus(pool: PoolState, need: Need, in_future: bool = False) -> bool:
    """Whether the number of free GPUs could be enough; False is certain, True is not."""
    if not need.whole_devices:
        return (pool.free_later if in_future else pool.free) >= need.total
    buckets, whole = pool.by_free_later if in_future else pool.by_free, need.whole_devices
    if need.min_workers == 1:
        return any(buckets[whole:])
    return sum([len(bucket) * (size // whole) for size, bucket in enumerate(buckets) if bucket]) >= need.min_workers


def _packed_placement(pool: PoolState, need: Need, spare: Spare | None) -> tuple[WorkerPlacement, ...]:
    """Return the placement that keeps free GPUs as useful as possible for the mix; a full pool has one node left."""
    candidates = list(islice(chain.from_iterable(pool.by_free[need.whole_devices :]), 2)) if need.whole_devices else []
    if len(candidates) == 1:
        only = pool.nodes[candidates[0]]
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
        return (WorkerPlacement(0, node, (device,), need.gpus),)
    return _parts_on(node, need, 0, 1, False)


def _node_for_worker(pool: PoolState, need: Need, in_future: bool, spare: Spare | None) -> NodeState | None:
    if 0 < need.gpus < GPU:
        return _node_for_share(pool, need, in_future)
    buckets = pool.by_free_later if in_future else pool.by_free
    sizes = range(need.whole_devices, len(buckets))
    for size in reversed(sizes) if pool.pool.strategy == "spread" else sizes:
        for position in buckets[size]:
            node = pool.nodes[position]
            if node.suits(need) and _workers(node, need, in_future, spare):
                return node
    return None


def _node_for_share(pool: PoolState, need: Need, in_future: bool) -> NodeState | None:
    """Return the node whose device a share of one fills best; untouched devices come last, on the fullest node."""
    best: tuple[int, int, int] | None = None
    for node in pool.nodes:
        if not node.suits(need) or not node.workers(need, in_future):
            continue
        free = min(f for f in (node.free_later if in_future else node.free) if f >= need.gpus)
        whole = node.whole_free_later if in_future else node.whole_free
        key = (free, -whole if pool.pool.strategy == "spread" else whole, node.position)
        if best is None or key < best:
            best = key
    return pool.nodes[best[2]] if best else None


def _gang_placement(pool: PoolState, need: Need, in_future: bool, spare: Spare | None) -> tuple[WorkerPlacement, ...]:
    if not may_have_enough_gpus(pool, need, in_future):
        return ()
    buckets = pool.by_free_later if in_future else pool.by_free
    nodes = (pool.nodes[at] for bucket in buckets[need.whole_devices :] for at in bucket)
    candidates = [(_workers(node, need, in_future, spare), node) for node in nodes if node.suits(need)]
    candidates = [(count, node) for count, node in candidates if count]
    candidates.sort(key=lambda item: (-item[0], item[1].whole_free, item[1].position))
    parts: list[WorkerPlacement] = []
    while candidates and len(parts) < need.min_workers:
        missing = need.min_workers - len(parts)
        at = 0
        if candidates[0][0] >= missing:
            at = min(
                (i for i, (count, _) in enumerate(candidates) if count >= missing), key=lambda i: (candidates[i][0], i)
            )
        count, node = candidates.pop(at)
        parts += _parts_on(node, need, len(parts), min(count, missing), in_future)
    return tuple(parts) if len(parts) == need.min_workers else ()


def _parts_on(node: NodeState, need: Need, first: int, count: int, in_future: bool) -> tuple[WorkerPlacement, ...]:
    free = list(node.free_later if in_future else node.free)
    avoid = node.free if in_future else None
    parts = []
    for worker in range(first, first + count):
        devices, milli = pick(need, free, avoid)
        parts.append(WorkerPlacement(worker, node, devices, milli))
    return tuple(parts)


def static_quota(cluster: Cluster, account: Account, pool: PoolState, amount: int, in_future: bool) -> LineState | None:
    """Return the static quota of another team whose idle GPUs `amount` more would use; None if there is none.

    Also counted: static quotas whose pools lie within that line's. Those covering `pool` count fully; the others, this
    team's own included, count at most what their own pools have free.
    """
    ledger, name = cluster.ledger, pool.pool.name
    covering = [line for line, _ in ledger.static_quotas(account, name, in_future)]
    if not covering:
        return None
    other_pools = [line for line in ledger.unlent_lines if line.kept_free(in_future) and not line.quota.covers(name)]
    for line in covering:
        within = [
            (other.account, other.kept_free(in_future)) for other in covering if is_within(other.quota, line.quota)
        ]
        others_within = [other for other in other_pools if is_within(other.quota, line.quota)]
        keep_free = kept_together(within)
        if others_within:
            at_most_free = [
                (other.account, min(other.kept_free(in_future), _free_in(cluster, other.quota.pools, in_future)))
                for other in others_within
            ]
            pools = {pool for other in others_within for pool in other.quota.pools}
            keep_free = min(kept_together([*within, *at_most_free]), keep_free + _free_in(cluster, pools, in_future))
        if _free_in(cluster, line.quota.pools, in_future) - amount < keep_free:
            return line
    return None


def _free_in(cluster: Cluster, pools: Collection[str], in_future: bool) -> int:
    """Return the free milli-GPUs of pools, of all where none is named."""
    return sum(
        _available(cluster, pool, in_future) for name, pool in cluster.pools.items() if not pools or name in pools
    )


def _available(cluster: Cluster, pool: PoolState, in_future: bool) -> int:
    free = pool.free_later if in_future else pool.free
    if pool.pool.capacity is not None:
        name = pool.pool.name
        used = (
            cluster.future_pool_usage[name]
            if in_future
            else max(cluster.pool_usage[name], cluster.future_pool_usage[name])
        )
        free = min(free, max(0, pool.pool.capacity - used))
    return free


def within_limits(cluster: Cluster, account: Account, pool: PoolState, amount: int, in_future: bool = False) -> bool:
    """Whether limits, the pool's capacity and other teams' static quotas admit `amount` more."""
    return not amount or (
        not cluster.over_capacity(pool, amount, in_future)
        and cluster.ledger.over_limit(account, pool.pool.name, amount, in_future) is None
        and (in_future or static_quota(cluster, account, pool, amount, False) is None)
        and static_quota(cluster, account, pool, amount, True) is None
    )
