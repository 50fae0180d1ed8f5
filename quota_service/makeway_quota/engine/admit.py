"""How one workload gets its GPUs: free now, promised, by others moving over, or by others leaving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .book import Queue
from .cluster import Cluster
from .consolidate import Moving, Rearrangement, consolidate
from .draft import Draft
from .place import allowed, enough, find
from .reclaim import Choice, reclaim
from .shrink import shrink
from .state import Workload
from .victims import Right, Seeker, within_fair_share
from .world import Part, PoolState


def started(
    draft: Draft,
    queue: Queue,
    workload: Workload,
    pool: PoolState,
    held: tuple[Part, ...],
    in_quota: bool,
) -> bool:
    """Start a workload in a pool if it fits there now; where it was `held` a place, there."""
    cluster = draft.cluster
    need = queue.need
    mine = held if held and held[0].node.pool is pool and kept(held, queue) else ()
    if not mine and not enough(pool, need):
        return False
    if len(mine) > need.least and not allowed(cluster, queue.account, pool, need.gpus * len(mine)):
        mine = mine[: need.least]
    if len(mine) <= need.least and not allowed(cluster, queue.account, pool, need.total):
        return False
    parts = mine or find(pool, need)
    if not parts:
        return False
    _start(draft, queue, workload, parts, in_quota)
    return True


def _start(draft: Draft, queue: Queue, workload: Workload, parts: tuple[Part, ...], in_quota: bool) -> None:
    draft.start(workload, draft.cluster.start(workload, queue.need, parts), in_quota)
    draft.came_from[workload.id] = queue


def kept(parts: tuple[Part, ...], queue: Queue) -> bool:
    """Say whether a place that was promised is free by now."""
    if not parts:
        return False
    hosted: dict[str, int] = {}
    asked: dict[tuple[str, int], int] = {}
    for part in parts:
        node = part.node
        hosted[node.node.name] = hosted.get(node.node.name, 0) + 1
        for at in part.devices:
            key = (node.node.name, at)
            asked[key] = asked.get(key, 0) + part.milli
            if node.free[at] < asked[key]:
                return False
    for part in parts:
        node, many = part.node, hosted[part.node.node.name]
        if min(node.cpu_open, node.cpu_future) < many * queue.need.cpu:
            return False
        if min(node.memory_open, node.memory_future) < many * queue.need.memory:
            return False
    return True


def promised(
    draft: Draft,
    queue: Queue,
    workload: Workload,
    pools: Iterable[PoolState],
    held: tuple[Part, ...],
    over: bool,
) -> bool:
    """Claim what is on its way to be free: the place it was promised, or for work in quota any that is enough."""
    if over and not held and not queue.promised:
        return False
    cluster = draft.cluster
    account, amount = queue.account, queue.need.total
    for pool in sorted(pools, key=lambda p: not held or held[0].node.pool is not p):
        if not allowed(cluster, account, pool, amount, True):
            continue
        mine = held if held and held[0].node.pool is pool else ()
        parts = mine or (find(pool, queue.need, True) if not over or queue.promised else ())
        if parts:
            cluster.claim(workload, queue.need, parts)
            draft.promise(workload, pool, parts)
            draft.promised[workload.id] = workload, queue
            return True
    return False


def reclaimed(
    draft: Draft,
    queue: Queue,
    workload: Workload,
    pools: Iterable[PoolState],
    over: bool,
) -> bool:
    """Make room: jobs move over if that is enough, else jobs leave; by the rights that the workload has."""
    cluster = draft.cluster
    for pool in pools:
        if not over:
            seeker = Seeker(cluster, workload, queue.need, queue.account, pool, "reservation")
            change = consolidate(seeker)
            if change is not None:
                _rearrange(draft, queue, seeker, change)
                return True
        if over and allowed(cluster, queue.account, pool, queue.need.total, True) and find(pool, queue.need, True):
            continue  # enough is on its way, though not promised to it
        for seeker in _seekers(cluster, queue, workload, pool, over):
            choice = reclaim(seeker)
            if choice is not None:
                _carry_out(draft, queue, seeker, choice, over)
                return True
    return False


def _rearrange(draft: Draft, queue: Queue, seeker: Seeker, change: Rearrangement) -> None:
    """Note who moves over, and promise what that frees. Starts of this very plan are put elsewhere at once."""
    cluster, workload = draft.cluster, seeker.workload
    for moving in change.moves:
        if moving.tenancy.fresh:
            _start_elsewhere(draft, moving)
    moves = [moving for moving in change.moves if not moving.tenancy.fresh]
    if not moves and started(draft, queue, workload, seeker.pool, change.parts, True):
        return
    cluster.claim(workload, queue.need, change.parts)
    if moves:
        draft.move(workload, moves)
    draft.promise(workload, seeker.pool, change.parts, [moving.tenancy for moving in moves])
    draft.promised[workload.id] = workload, queue


def _start_elsewhere(draft: Draft, moving: Moving) -> None:
    cluster, tenancy = draft.cluster, moving.tenancy
    cluster.unclaim(tenancy.workload)
    cluster.stay(tenancy)
    cluster.withdraw(tenancy)
    in_quota = draft.started[tenancy.workload.id].in_quota
    draft.withdraw(tenancy.workload)
    draft.start(tenancy.workload, cluster.start(tenancy.workload, tenancy.need, moving.to), in_quota)


def _carry_out(draft: Draft, queue: Queue, seeker: Seeker, choice: Choice, over: bool) -> None:
    """Note who leaves and promise their GPUs. Starts of this very plan are withdrawn instead."""
    cluster = draft.cluster
    workload = seeker.workload
    fresh = [t for t in choice.victims if t.fresh]
    victims = [t for t in choice.victims if not t.fresh]
    for tenancy in fresh:
        cluster.stay(tenancy)
        cluster.withdraw(tenancy)
        draft.withdraw(tenancy.workload)
        draft.came_from.pop(tenancy.workload.id).put_back(tenancy.workload)
    smaller = shrink(seeker, victims)
    parts = find(seeker.pool, queue.need, True) if smaller else choice.parts
    if victims:
        draft.evict(seeker, victims, smaller)
    for pool in queue.pools:
        in_quota = not over and cluster.ledger.in_quota(queue.account, pool.pool.name, seeker.amount, queue.firm)
        if (in_quota or not queue.firm) and started(draft, queue, workload, pool, parts, in_quota):
            return
    cluster.claim(workload, queue.need, parts)
    draft.promise(workload, seeker.pool, parts, victims)
    draft.promised[workload.id] = workload, queue


def _seekers(cluster: Cluster, queue: Queue, workload: Workload, pool: PoolState, over: bool) -> Iterator[Seeker]:
    """List the rights by which it may make others leave, strongest first."""

    def by(right: Right) -> Seeker:
        return Seeker(cluster, workload, queue.need, queue.account, pool, right)

    line = cluster.ledger.over_limit(queue.account, pool.pool.name, queue.need.total, True)
    if not over:
        if line is None:
            yield by("reservation")
        elif queue.session:
            seeker = by("own_limit")
            seeker.blocked = (line,)
            yield seeker
    if workload.kind == "job" and cluster.settings.in_team_preemption and not queue.firm:
        yield by("own_team")
    if over and line is None and cluster.settings.fair_share == "reclaim" and within_fair_share(cluster, queue, pool):
        yield by("fair_share")
