"""One decision: a snapshot goes in, a plan comes out."""

from __future__ import annotations

from collections.abc import Iterable

from .admit import kept, promised, reclaimed, started
from .cluster import Cluster
from .draft import Draft
from .grow import grow
from .hold import hold, starving
from .order import Queue, Turn, queues
from .place import enough
from .plan import Plan
from .reasons import closed_or_paused, explain, refuse
from .scale import scale
from .state import Snapshot, Workload
from .world import Part, PoolState

_ROUNDS = 100
"""Far more than any plan takes; a stop for the case that two workloads would displace each other for ever."""


def schedule(snapshot: Snapshot) -> Plan:
    """Decide who starts, leaves, moves and waits. The same snapshot always gives the same plan."""
    cluster = Cluster(snapshot)
    draft = Draft(cluster)
    waiting = queues(cluster, _admissible(cluster, draft))
    _until_nothing_changes(cluster, draft, waiting)
    if grow(cluster, draft, waiting):
        _until_nothing_changes(cluster, draft, waiting)  # who grew has a larger share now
    _let_go(draft)
    for queue in waiting:
        if queue.session and not any(_guaranteed(cluster, queue, pool) for pool in queue.pools):
            refuse(cluster, draft, queue)
        else:
            explain(cluster, draft, queue)
    scale(cluster, draft, waiting)
    return draft.plan()


def _admissible(cluster: Cluster, draft: Draft) -> Iterable[Workload]:
    """Set aside what may not start at all, with the reason; its claims are void."""
    for workload in cluster.workloads.values():
        if workload.state != "pending":
            continue
        if closed_or_paused(cluster, draft, workload):
            cluster.unclaim(workload)
        else:
            yield workload


def _until_nothing_changes(cluster: Cluster, draft: Draft, waiting: list[Queue]) -> None:
    """Serve sessions in quota, jobs in quota, then over quota; again while that changes what others may do.

    A start over quota can put its team above its reservation, and an eviction can free more than it was
    for: both may help somebody who was turned down a moment ago. Deciding it now keeps plans stable.
    Jobs that may not be preempted count on the reservation like sessions, and so go before the others.
    """
    _keep_promises(cluster, draft, waiting)
    before = -1
    for _ in range(_ROUNDS):
        if before == draft.decisions:
            break
        before = draft.decisions
        _let_go(draft)
        _new_promises(cluster, draft)
        _serve(cluster, draft, [q for q in waiting if q.session], False)
        _serve(cluster, draft, [q for q in waiting if q.firm and not q.session], False)
        _serve(cluster, draft, [q for q in waiting if not q.firm], False)
        _hold_for_the_starving(cluster, draft, waiting)
        _serve(cluster, draft, [q for q in waiting if not q.firm], True)


def _let_go(draft: Draft) -> None:
    for held in draft.holds.values():
        held.lift()


def _hold_for_the_starving(cluster: Cluster, draft: Draft, waiting: list[Queue]) -> None:
    """Let those who waited too long go first, one a pool; where they do not fit, keep for them what would do."""
    draft.holds = {}
    for queue, workload, able in starving(cluster, waiting):
        pools = [pool for pool in able if pool.pool.name not in draft.holds]
        if any(_started_late(cluster, draft, queue, workload, pool) for pool in pools):
            queue.pop(workload)
            continue
        found = next((found for pool in pools if (found := hold(cluster, queue, workload, pool))), None)
        if found is not None:
            found.put()
            draft.holds[found.pool.pool.name] = found


def _started_late(cluster: Cluster, draft: Draft, queue: Queue, workload: Workload, pool: PoolState) -> bool:
    in_quota = _guaranteed(cluster, queue, pool)
    return (in_quota or _over_quota(queue)) and started(draft, queue, workload, pool, (), in_quota)


def _begun(draft: Draft, queue: Queue, workload: Workload, pool: PoolState, held: tuple[Part, ...], over: bool) -> bool:
    """Start a workload if it fits now; over quota, it must not delay who waited too long."""
    found = draft.holds.get(pool.pool.name)
    if found is None:
        return started(draft, queue, workload, pool, held, not over)
    early = not over or found.ends_in_time(workload)
    with found.being(put=not early):
        if not early and (found.line_in_the_way(queue) or found.over_capacity(queue)):
            return False
        done = started(draft, queue, workload, pool, held, not over)
    if done and not early:
        found.count(draft.cluster.tenancies[workload.id])
    return done


def _reclaimed(draft: Draft, queue: Queue, workload: Workload, pools: list[PoolState], over: bool) -> bool:
    """Let others leave for it; over quota not where GPUs are held, but for the one that they are held for."""
    found = [draft.holds[pool.pool.name] for pool in pools if over and pool.pool.name in draft.holds]
    mine = [each for each in found if each.workload is workload]
    open_to_all = [pool for pool in pools if not any(each.pool is pool for each in found)]
    if reclaimed(draft, queue, workload, open_to_all, over):
        return True
    for each in mine:
        with each.being(put=False):
            if reclaimed(draft, queue, workload, [each.pool], over):
                return True
    return False


def _keep_promises(cluster: Cluster, draft: Draft, waiting: list[Queue]) -> None:
    """Start whoever was promised a place that is free by now: nothing else can take it."""
    promised = [q for q in waiting if q.promised and any(w.id in cluster.claims for w in q.members())]
    for queue, workload, _ in Turn(cluster, promised, False):
        if _kept_promise(cluster, draft, queue, workload):
            queue.pop(workload)


def _kept_promise(cluster: Cluster, draft: Draft, queue: Queue, workload: Workload) -> bool:
    held = cluster.unclaim(workload)
    pool = held[0].node.pool
    in_quota = _guaranteed(cluster, queue, pool)
    able = in_quota or _over_quota(queue)
    if able and kept(held, queue) and started(draft, queue, workload, pool, held, in_quota):
        return True
    cluster.claim(workload, queue.need, held)
    return False


def _new_promises(cluster: Cluster, draft: Draft) -> None:
    """Start whoever was promised a place by this plan, once nothing holds it back any more."""
    for workload, queue in list(draft.promised.values()):
        if workload.id not in cluster.claims:
            continue
        held = cluster.unclaim(workload)
        for pool in queue.pools:
            in_quota = _guaranteed(cluster, queue, pool)
            able = in_quota or _over_quota(queue)
            if able and started(draft, queue, workload, pool, held, in_quota):
                del draft.promised[workload.id]
                del draft.waiting[workload.id]
                break
        else:
            cluster.claim(workload, queue.need, held)


def _guaranteed(cluster: Cluster, queue: Queue, pool: PoolState) -> bool:
    return cluster.ledger.in_quota(queue.account, pool.pool.name, queue.need.total, queue.firm)


def _over_quota(queue: Queue) -> bool:
    return not queue.firm and queue.account.policy.weight != "None"


def _serve(cluster: Cluster, draft: Draft, waiting: Iterable[Queue], over: bool) -> None:
    """Let one class start in order: in the first pool with room, else by a promise, else by reclaim.

    Who is in quota in one of its pools may start over quota in another: better than making somebody leave.
    """

    def may(queue: Queue, pool: PoolState) -> bool:
        return _over_quota(queue) if over else _guaranteed(cluster, queue, pool)

    def hopeless(queue: Queue) -> bool:
        return over and _hopeless(cluster, draft, queue)

    turn = Turn(cluster, (q for q in waiting if q.promised or any(may(q, pool) for pool in q.pools)), over, hopeless)
    for queue, workload, at in turn:
        pool = queue.pools[at]
        held = cluster.unclaim(workload)
        able = [p for p in queue.pools if may(queue, p)]
        here = pool in able or (bool(able) and _over_quota(queue))
        if here and _begun(draft, queue, workload, pool, held, over or pool not in able):
            _served(turn, queue, workload)
        elif able and at + 1 < len(queue.pools):
            if held:
                cluster.claim(workload, queue.need, held)
            turn.enter(queue, at + 1)
        elif promised(draft, queue, workload, able, held, over) or _reclaimed(draft, queue, workload, able, over):
            _served(turn, queue, workload)
        else:
            turn.leave(queue)
            if held and not over and not queue.firm:
                cluster.claim(workload, queue.need, held)
            elif held:
                draft.decisions += 1  # a promise that cannot be kept any more: others may have these GPUs


def _hopeless(cluster: Cluster, draft: Draft, queue: Queue) -> bool:
    """Say whether work over quota finds no room, and nobody whom it could ask, whoever of the queue it is."""
    if queue.promised or not queue.need.total or cluster.settings.fair_share == "reclaim":
        return False
    policy, preempts = queue.account.policy.name, cluster.settings.in_team_preemption
    for pool in queue.pools:
        lowest = cluster.stoppable.get(pool.pool.name, {}).get(policy, queue.priority)
        if pool.pool.name in draft.holds or enough(pool, queue.need) or (preempts and lowest < queue.priority):
            return False
    return True


def _served(turn: Turn, queue: Queue, workload: Workload) -> None:
    queue.pop(workload)
    turn.again(queue, workload.owner)
