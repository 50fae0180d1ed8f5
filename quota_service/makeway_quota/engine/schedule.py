"""One decision: a snapshot goes in, a plan comes out."""

from __future__ import annotations

from .index.cluster import Cluster
from .index.nodes import Part, PoolState
from .index.queues import PendingQueues, Queue
from .index.unschedulable import Unschedulable
from .plan import Plan
from .plan_builder import PlanBuilder
from .rules.admission import kept, promised, reclaimed, started
from .rules.growth import grow
from .rules.hold import hold, outranked, starving
from .rules.order import QueueHeads
from .rules.reasons import explain, refuse
from .rules.scaling import scale
from .rules.sparing import spare
from .state import Snapshot, Workload

_ROUNDS = 100
"""Far more than any plan takes; a stop for the case that two workloads would displace each other for ever."""


def schedule(snapshot: Snapshot) -> Plan:
    """Decide who starts, leaves, moves and waits. The same snapshot always gives the same plan."""
    cluster = Cluster(snapshot)
    return decide(cluster, PendingQueues(cluster))


def decide(cluster: Cluster, queues: PendingQueues, why: bool = True) -> Plan:
    """Make one plan for a cluster and everybody who waits; what it does to both is still to be taken back.

    Without `why`, nobody is told why they wait but those who were promised something.
    """
    builder = PlanBuilder(cluster)
    for name, told in queues.inadmissible.items():
        cluster.withdraw_nomination(cluster.workloads[name])  # nominations of those who may not start are void
        builder.wait(told)
    waiting = queues.open()
    late = waiting if queues.anybody_starves() else []
    _until_nothing_changes(cluster, builder, waiting, late, why)
    if grow(cluster, builder, waiting):
        _until_nothing_changes(cluster, builder, waiting, late, why)  # who grew has a larger share now
    spared: set[str] = set()
    for _ in range(_ROUNDS):
        if not spare(builder, spared):
            break
        _until_nothing_changes(cluster, builder, waiting, late, why)
    _let_go(builder)
    refused = [q for q in waiting if q.session and not q.borrows and not _in_quota(q)]
    for queue in refused:
        refuse(cluster, builder, queue)
    if why:
        explain(cluster, builder, [q for q in waiting if q not in refused] if refused else waiting)
    scale(cluster, builder, waiting)
    return builder.plan()


def _until_nothing_changes(
    cluster: Cluster, builder: PlanBuilder, waiting: list[Queue], late: list[Queue], why: bool
) -> None:
    """Serve sessions in quota, jobs in quota, then over quota; again while that changes what others may do.

    A start over quota can put its team above its reservation, and an eviction can free more than it was
    for: both may help somebody who was turned down a moment ago. Deciding it now keeps plans stable.
    Jobs that may not be preempted count on the reservation like sessions, and so go before the others.
    `late`: the queues in which somebody may have waited too long. `why`: find out what is held even where that makes
    no difference.
    """
    _keep_promises(cluster, builder, waiting)
    sessions = [q for q in waiting if q.session]
    non_preemptible = [q for q in waiting if q.non_preemptible and not q.session]
    others = [q for q in waiting if not q.non_preemptible or q.borrows]
    before, quiet, settled = -1, False, False
    for _ in range(_ROUNDS):
        if before == builder.decisions:
            break
        before, eased, raised, nominated = builder.decisions, builder.eased, builder.raised, bool(cluster.nominations)
        last = _holds(builder)
        _hold_nothing(builder)
        _new_promises(cluster, builder)
        if not settled:
            _serve(cluster, builder, sessions)
            _serve(cluster, builder, non_preemptible)
            _serve(cluster, builder, others)
        in_quota = builder.decisions
        unschedulable = Unschedulable(cluster, builder)
        if why or _anybody_may_hope(unschedulable, others):
            _hold_for_the_starving(cluster, builder, late)
            if quiet and builder.decisions == before and _holds(builder) == last:
                break  # all were turned down when there was more room: since then there were only starts
            _serve(cluster, builder, others, Unschedulable(cluster, builder) if builder.holds else unschedulable)
        if not builder.nominated and not any(any(queue.lines.values()) for queue in waiting):
            _hold_nothing(builder)
            break  # nobody waits any more
        quiet = builder.eased == eased and not builder.nominated and _starts_only_take(cluster, builder)
        settled = quiet and not nominated and _settled(cluster, builder, waiting, raised)
        if settled and (builder.decisions == in_quota or not (builder.holds or (why and late))):
            break  # what is held is what was held


def _settled(cluster: Cluster, builder: PlanBuilder, waiting: list[Queue], raised: int) -> bool:
    """Say whether starts since then can help nobody in quota: nobody may be asked who could not be before.

    `raised`: how many starts had put their team above its reservation by then. With departments a start may do the
    same to its department, and any start gives those who may not be stopped somebody of their own team to ask:
    there it only holds where nobody like that is left.
    """
    if cluster.nominations:
        return False
    non_preemptible_only = builder.raised == raised and not cluster.ledger.nested
    return not any(
        (queue.non_preemptible or not non_preemptible_only) and _in_quota(queue) and any(queue.lines.values())
        for queue in waiting
    )


def _in_quota(queue: Queue) -> bool:
    """Say whether one of a queue would be within the reservation in one of its pools."""
    return queue.total <= max([queue.account.unreserved(pool.pool.name, queue.non_preemptible) for pool in queue.pools])


def _let_go(builder: PlanBuilder) -> None:
    for held in builder.holds.values():
        held.lift()


def _hold_nothing(builder: PlanBuilder) -> None:
    _let_go(builder)
    builder.holds = {}


def _holds(builder: PlanBuilder) -> list[tuple[object, ...]]:
    return [(hold.workload, hold.pool, hold.until, hold.rooms) for hold in builder.holds.values()]


def _starts_only_take(cluster: Cluster, builder: PlanBuilder) -> bool:
    """Say whether starts over quota do nothing for others who are over quota, but take room away.

    Else they may let somebody stop others: those who are beyond their fair share now, or its own team's work, where
    what was started took what was on its way to be free.
    """
    return cluster.settings.fair_share != "reclaim" and not (cluster.terminating or builder.evicted or builder.moved)


def _anybody_may_hope(unschedulable: Unschedulable, others: list[Queue]) -> bool:
    """Say whether there is room for any of them, or anybody whom they could ask."""
    for queue in others:
        if (queue.promised or queue.borrows) and not unschedulable(queue) and any(queue.lines.values()):
            return True
    return False


def _hold_for_the_starving(cluster: Cluster, builder: PlanBuilder, waiting: list[Queue]) -> None:
    """Let those who waited too long go first, one a pool; where they do not fit, keep for them what would do."""
    for queue, workload in starving(cluster, waiting):
        free = [pool for pool in queue.pools if pool.pool.name not in builder.holds]
        if not free:
            continue
        team = [other for other in waiting if other.account is queue.account and other.priority > queue.priority]
        pools = [pool for pool in free if not (team and outranked(cluster, queue, pool, team))]
        if any(_started_late(cluster, builder, queue, workload, pool) for pool in pools):
            queue.pop(workload)
            continue
        found = next((found for pool in pools if (found := hold(cluster, queue, workload, pool))), None)
        if found is not None:
            found.put()
            builder.holds[found.pool.pool.name] = found


def _started_late(cluster: Cluster, builder: PlanBuilder, queue: Queue, workload: Workload, pool: PoolState) -> bool:
    in_quota = _guaranteed(cluster, queue, pool)
    return (in_quota or queue.borrows) and started(builder, queue, workload, pool, (), in_quota)


def _begin(
    builder: PlanBuilder, queue: Queue, workload: Workload, pool: PoolState, held: tuple[Part, ...], over: bool
) -> bool:
    """Start a workload if it fits now; over quota, it must not delay who waited too long."""
    found = builder.holds.get(pool.pool.name)
    if found is None:
        return started(builder, queue, workload, pool, held, not over)
    if not over or found.ends_in_time(workload):
        with found.being(put=False):
            return started(builder, queue, workload, pool, held, not over)
    with found.being(put=True):
        if found.line_in_the_way(queue) or found.over_capacity(queue):
            return False
        done = started(builder, queue, workload, pool, held, False)
    if done:
        found.count(builder.cluster.allocations[workload.id])
    return done


def _reclaimed(builder: PlanBuilder, queue: Queue, workload: Workload, pools: list[PoolState], over: bool) -> bool:
    """Let others leave for it; over quota not where GPUs are held, but for the one that they are held for.

    A workload that requests no GPUs never evicts (rule 2).
    """
    if not queue.total or queue.patient or (over and not _may_ask(builder.cluster, queue, pools)):
        return False
    found = [builder.holds[pool.pool.name] for pool in pools if over and pool.pool.name in builder.holds]
    mine = [each for each in found if each.workload is workload]
    open_to_all = [pool for pool in pools if not any(each.pool is pool for each in found)]
    if reclaimed(builder, queue, workload, open_to_all, over):
        return True
    for each in mine:
        with each.being(put=False):
            if reclaimed(builder, queue, workload, [each.pool], over):
                return True
    return False


def _may_ask(cluster: Cluster, queue: Queue, pools: list[PoolState]) -> bool:
    """Say whether there is anybody whom one of a queue could ask to leave, though it is over quota."""
    if cluster.settings.fair_share == "reclaim":
        return True
    return cluster.lowest(queue.account.policy.name, pools) < queue.priority


def _keep_promises(cluster: Cluster, builder: PlanBuilder, waiting: list[Queue]) -> None:
    """Start whoever was promised a place that is free by now: nothing else can take it."""
    promised = [q for q in waiting if q.promised and any(w.id in cluster.nominations for w in q.members())]
    if not promised:
        return
    for queue, workload, _ in QueueHeads(cluster, promised, False):
        if _kept_promise(cluster, builder, queue, workload):
            queue.pop(workload)


def _kept_promise(cluster: Cluster, builder: PlanBuilder, queue: Queue, workload: Workload) -> bool:
    held = cluster.withdraw_nomination(workload)
    pool = held[0].node.pool
    in_quota = queue.non_preemptible or _guaranteed(cluster, queue, pool, len(held))
    able = in_quota or queue.borrows
    if able and kept(held, queue) and started(builder, queue, workload, pool, held, in_quota):
        return True
    cluster.nominate(workload, queue.need, held)
    return False


def _new_promises(cluster: Cluster, builder: PlanBuilder) -> None:
    """Start whoever was promised a place by this plan, once nothing holds it back any more."""
    for workload, queue in list(builder.nominated.values()):
        if workload.id not in cluster.nominations:
            continue
        held = cluster.withdraw_nomination(workload)
        for pool in queue.pools:
            in_quota = _guaranteed(cluster, queue, pool)
            able = in_quota or queue.borrows
            if able and started(builder, queue, workload, pool, held, in_quota):
                del builder.nominated[workload.id]
                break
        else:
            cluster.nominate(workload, queue.need, held)


def _guaranteed(cluster: Cluster, queue: Queue, pool: PoolState, workers: int = 0) -> bool:
    amount = max(queue.need.total, queue.need.gpus * workers)
    return cluster.ledger.in_quota(queue.account, pool.pool.name, amount, queue.non_preemptible)


def _serve(
    cluster: Cluster, builder: PlanBuilder, waiting: list[Queue], unschedulable: Unschedulable | None = None
) -> None:
    """Let one class start in order: in the first pool with room, else by a promise, else by reclaim.

    Who is in quota in one of its pools may start over quota in another: better than making somebody leave.
    `unschedulable`: of the class over quota, for whom nothing can be done.
    """
    if not waiting:
        return
    over = unschedulable is not None

    def may(queue: Queue, pool: PoolState) -> bool:
        return queue.borrows if over else _guaranteed(cluster, queue, pool)

    entered, out = _sorted_out(cluster, waiting, unschedulable)
    if not entered:
        return
    turn = QueueHeads(cluster, entered, over, unschedulable)
    builder.returned.clear()
    eased = builder.eased
    for queue, workload, at in turn:
        pool = queue.pools[at]
        held = cluster.withdraw_nomination(workload)
        right = [p for p in queue.pools if may(queue, p)]
        able = right or _owed(queue, held)
        here = pool in able or (bool(able) and queue.borrows)
        if here and _begin(builder, queue, workload, pool, held, over or pool not in able):
            _served(turn, queue, workload)
        elif able and at + 1 < len(queue.pools):
            if held:
                cluster.nominate(workload, queue.need, held)
            turn.enter(queue, at + 1)
        elif not (_kept_elsewhere(queue, held, able) and not over) and (
            promised(builder, queue, workload, able, held, over) or _reclaimed(builder, queue, workload, right, over)
        ):
            _served(turn, queue, workload)
        else:
            turn.leave(queue)
            if held and not over and not queue.non_preemptible:
                cluster.nominate(workload, queue.need, held)
            elif held:
                builder.decisions += 1  # a promise that cannot be kept any more: others may have these GPUs
                builder.eased += 1
        while builder.returned:
            back, owner = builder.returned.pop()
            if any(each is back for each in waiting):
                turn.enter_again(back, owner)
        if out and builder.eased != eased:
            for each in out:  # there may be room for them now
                turn.enter(each, 0)
            out = []


def _kept_elsewhere(queue: Queue, held: tuple[Part, ...], able: list[PoolState]) -> bool:
    """Say whether it was promised a place over quota, in another pool: then nobody else has to leave for it."""
    return bool(held) and queue.borrows and not any(held[0].node.pool is pool for pool in able)


def _owed(queue: Queue, held: tuple[Part, ...]) -> list[PoolState]:
    """Give the pool of a promise that is kept, like a session that runs, even if the reservation is used up by now.

    A department's reservation can be: by a team of it that has one of its own.
    """
    return [held[0].node.pool] if held and queue.non_preemptible else []


def _sorted_out(
    cluster: Cluster, waiting: list[Queue], unschedulable: Unschedulable | None
) -> tuple[list[Queue], list[Queue]]:
    """List the queues of a class that may start something, and (over quota) those for which there is no room yet."""
    found: list[Queue] = []
    out: list[Queue] = []
    if unschedulable is not None:
        for queue in waiting:
            if queue.promised or queue.borrows:
                (out if unschedulable(queue) else found).append(queue)
        return found, out
    for queue in waiting:
        if queue.promised or _in_quota(queue):
            found.append(queue)
    return found, out


def _served(turn: QueueHeads, queue: Queue, workload: Workload) -> None:
    queue.pop(workload)
    turn.again(queue, workload.owner)
