"""One decision: a snapshot goes in, a plan comes out."""

from __future__ import annotations

from .admit import kept, promised, reclaimed, started
from .book import Book, Queue
from .cluster import Cluster
from .draft import Draft
from .grow import grow
from .hold import hold, outranked, starving
from .hopeless import Hopeless
from .order import Turn
from .plan import Plan
from .reasons import explain, refuse
from .scale import scale
from .state import Snapshot, Workload
from .world import Part, PoolState

_ROUNDS = 100
"""Far more than any plan takes; a stop for the case that two workloads would displace each other for ever."""


def schedule(snapshot: Snapshot) -> Plan:
    """Decide who starts, leaves, moves and waits. The same snapshot always gives the same plan."""
    cluster = Cluster(snapshot)
    return decide(cluster, Book(cluster))


def decide(cluster: Cluster, book: Book, why: bool = True) -> Plan:
    """Make one plan for a cluster and everybody who waits; what it does to both is still to be taken back.

    Without `why`, nobody is told why they wait but those who were promised something.
    """
    draft = Draft(cluster)
    for name, told in book.aside.items():
        cluster.unclaim(cluster.workloads[name])  # claims of those who may not start are void
        draft.wait(told)
    waiting = book.open()
    late = waiting if book.anybody_starves() else []
    _until_nothing_changes(cluster, draft, waiting, late, why)
    if grow(cluster, draft, waiting):
        _until_nothing_changes(cluster, draft, waiting, late, why)  # who grew has a larger share now
    _let_go(draft)
    refused = [q for q in waiting if q.session and not any(_guaranteed(cluster, q, pool) for pool in q.pools)]
    for queue in refused:
        refuse(cluster, draft, queue)
    if why:
        explain(cluster, draft, [q for q in waiting if q not in refused] if refused else waiting)
    scale(cluster, draft, waiting)
    return draft.plan()


def _until_nothing_changes(cluster: Cluster, draft: Draft, waiting: list[Queue], late: list[Queue], why: bool) -> None:
    """Serve sessions in quota, jobs in quota, then over quota; again while that changes what others may do.

    A start over quota can put its team above its reservation, and an eviction can free more than it was
    for: both may help somebody who was turned down a moment ago. Deciding it now keeps plans stable.
    Jobs that may not be preempted count on the reservation like sessions, and so go before the others.
    `late`: the queues in which somebody may have waited too long. `why`: find out what is held even where that makes
    no difference.
    """
    _keep_promises(cluster, draft, waiting)
    sessions = [q for q in waiting if q.session]
    firm = [q for q in waiting if q.firm and not q.session]
    others = [q for q in waiting if not q.firm]
    before, quiet, settled = -1, False, False
    for _ in range(_ROUNDS):
        if before == draft.decisions:
            break
        before, eased, raised, claimed = draft.decisions, draft.eased, draft.raised, bool(cluster.claims)
        last = _holds(draft)
        _hold_nothing(draft)
        _new_promises(cluster, draft)
        if not settled:
            _serve(cluster, draft, sessions)
            _serve(cluster, draft, firm)
            _serve(cluster, draft, others)
        in_quota = draft.decisions
        hopeless = Hopeless(cluster, draft)
        if why or _anybody_may_hope(hopeless, others):
            _hold_for_the_starving(cluster, draft, late)
            if quiet and draft.decisions == before and _holds(draft) == last:
                break  # all were turned down when there was more room: since then there were only starts
            _serve(cluster, draft, others, Hopeless(cluster, draft) if draft.holds else hopeless)
        if not draft.promised and not any(any(queue.lines.values()) for queue in waiting):
            _hold_nothing(draft)
            break  # nobody waits any more
        quiet = draft.eased == eased and not draft.promised and _starts_only_take(cluster, draft)
        settled = quiet and not claimed and _settled(cluster, draft, waiting, raised)
        if settled and (draft.decisions == in_quota or not (draft.holds or (why and late))):
            break  # what is held is what was held


def _settled(cluster: Cluster, draft: Draft, waiting: list[Queue], raised: int) -> bool:
    """Say whether starts since then can help nobody in quota: nobody may be asked who could not be before.

    `raised`: how many starts had put their team above its reservation by then. With departments a start may do the
    same to its department, and any start gives those who may not be stopped somebody of their own team to ask:
    there it only holds where nobody like that is left.
    """
    if cluster.claims:
        return False
    firm_only = draft.raised == raised and not cluster.ledger.nested
    return not any(
        (queue.firm or not firm_only) and _in_quota(queue) and any(queue.lines.values()) for queue in waiting
    )


def _in_quota(queue: Queue) -> bool:
    """Say whether one of a queue would be within the reservation in one of its pools."""
    return queue.total <= max([queue.account.unreserved(pool.pool.name, queue.firm) for pool in queue.pools])


def _let_go(draft: Draft) -> None:
    for held in draft.holds.values():
        held.lift()


def _hold_nothing(draft: Draft) -> None:
    _let_go(draft)
    draft.holds = {}


def _holds(draft: Draft) -> list[tuple[object, ...]]:
    return [(hold.workload, hold.pool, hold.until, hold.rooms) for hold in draft.holds.values()]


def _starts_only_take(cluster: Cluster, draft: Draft) -> bool:
    """Say whether starts over quota do nothing for others who are over quota, but take room away.

    Else they may let somebody stop others: those who are beyond their fair share now, or its own team's work, where
    what was started took what was on its way to be free.
    """
    return cluster.settings.fair_share != "reclaim" and not (cluster.leaving or draft.evicted or draft.moved)


def _anybody_may_hope(hopeless: Hopeless, others: list[Queue]) -> bool:
    """Say whether there is room for any of them, or anybody whom they could ask."""
    for queue in others:
        if (queue.promised or queue.borrows) and not hopeless(queue) and any(queue.lines.values()):
            return True
    return False


def _hold_for_the_starving(cluster: Cluster, draft: Draft, waiting: list[Queue]) -> None:
    """Let those who waited too long go first, one a pool; where they do not fit, keep for them what would do."""
    for queue, workload in starving(cluster, waiting):
        free = [pool for pool in queue.pools if pool.pool.name not in draft.holds]
        if not free:
            continue
        team = [other for other in waiting if other.account is queue.account and other.priority > queue.priority]
        pools = [pool for pool in free if not (team and outranked(cluster, queue, pool, team))]
        if any(_started_late(cluster, draft, queue, workload, pool) for pool in pools):
            queue.pop(workload)
            continue
        found = next((found for pool in pools if (found := hold(cluster, queue, workload, pool))), None)
        if found is not None:
            found.put()
            draft.holds[found.pool.pool.name] = found


def _started_late(cluster: Cluster, draft: Draft, queue: Queue, workload: Workload, pool: PoolState) -> bool:
    in_quota = _guaranteed(cluster, queue, pool)
    return (in_quota or queue.borrows) and started(draft, queue, workload, pool, (), in_quota)


def _begun(draft: Draft, queue: Queue, workload: Workload, pool: PoolState, held: tuple[Part, ...], over: bool) -> bool:
    """Start a workload if it fits now; over quota, it must not delay who waited too long."""
    found = draft.holds.get(pool.pool.name)
    if found is None:
        return started(draft, queue, workload, pool, held, not over)
    if not over or found.ends_in_time(workload):
        with found.being(put=False):
            return started(draft, queue, workload, pool, held, not over)
    with found.being(put=True):
        if found.line_in_the_way(queue) or found.over_capacity(queue):
            return False
        done = started(draft, queue, workload, pool, held, False)
    if done:
        found.count(draft.cluster.tenancies[workload.id])
    return done


def _reclaimed(draft: Draft, queue: Queue, workload: Workload, pools: list[PoolState], over: bool) -> bool:
    """Let others leave for it; over quota not where GPUs are held, but for the one that they are held for."""
    if queue.patient or (over and not _may_ask(draft.cluster, queue, pools)):
        return False
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


def _may_ask(cluster: Cluster, queue: Queue, pools: list[PoolState]) -> bool:
    """Say whether there is anybody whom one of a queue could ask to leave, though it is over quota."""
    if cluster.settings.fair_share == "reclaim":
        return True
    return cluster.lowest(queue.account.policy.name, pools) < queue.priority


def _keep_promises(cluster: Cluster, draft: Draft, waiting: list[Queue]) -> None:
    """Start whoever was promised a place that is free by now: nothing else can take it."""
    promised = [q for q in waiting if q.promised and any(w.id in cluster.claims for w in q.members())]
    if not promised:
        return
    for queue, workload, _ in Turn(cluster, promised, False):
        if _kept_promise(cluster, draft, queue, workload):
            queue.pop(workload)


def _kept_promise(cluster: Cluster, draft: Draft, queue: Queue, workload: Workload) -> bool:
    held = cluster.unclaim(workload)
    pool = held[0].node.pool
    in_quota = queue.firm or _guaranteed(cluster, queue, pool, len(held))
    able = in_quota or queue.borrows
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
            able = in_quota or queue.borrows
            if able and started(draft, queue, workload, pool, held, in_quota):
                del draft.promised[workload.id]
                del draft.waiting[workload.id]
                break
        else:
            cluster.claim(workload, queue.need, held)


def _guaranteed(cluster: Cluster, queue: Queue, pool: PoolState, workers: int = 0) -> bool:
    amount = max(queue.need.total, queue.need.gpus * workers)
    return cluster.ledger.in_quota(queue.account, pool.pool.name, amount, queue.firm)


def _serve(cluster: Cluster, draft: Draft, waiting: list[Queue], hopeless: Hopeless | None = None) -> None:
    """Let one class start in order: in the first pool with room, else by a promise, else by reclaim.

    Who is in quota in one of its pools may start over quota in another: better than making somebody leave.
    `hopeless`: of the class over quota, for whom nothing can be done.
    """
    if not waiting:
        return
    over = hopeless is not None

    def may(queue: Queue, pool: PoolState) -> bool:
        return queue.borrows if over else _guaranteed(cluster, queue, pool)

    entered, out = _sorted_out(cluster, waiting, hopeless)
    if not entered:
        return
    turn = Turn(cluster, entered, over, hopeless)
    eased = draft.eased
    for queue, workload, at in turn:
        pool = queue.pools[at]
        held = cluster.unclaim(workload)
        right = [p for p in queue.pools if may(queue, p)]
        able = right or _owed(queue, held)
        here = pool in able or (bool(able) and queue.borrows)
        if here and _begun(draft, queue, workload, pool, held, over or pool not in able):
            _served(turn, queue, workload)
        elif able and at + 1 < len(queue.pools):
            if held:
                cluster.claim(workload, queue.need, held)
            turn.enter(queue, at + 1)
        elif not (_kept_elsewhere(queue, held, able) and not over) and (
            promised(draft, queue, workload, able, held, over) or _reclaimed(draft, queue, workload, right, over)
        ):
            _served(turn, queue, workload)
        else:
            turn.leave(queue)
            if held and not over and not queue.firm:
                cluster.claim(workload, queue.need, held)
            elif held:
                draft.decisions += 1  # a promise that cannot be kept any more: others may have these GPUs
                draft.eased += 1
        if out and draft.eased != eased:
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
    return [held[0].node.pool] if held and queue.firm else []


def _sorted_out(cluster: Cluster, waiting: list[Queue], hopeless: Hopeless | None) -> tuple[list[Queue], list[Queue]]:
    """List the queues of a class that may start something, and (over quota) those for which there is no room yet."""
    found: list[Queue] = []
    out: list[Queue] = []
    if hopeless is not None:
        for queue in waiting:
            if queue.promised or queue.borrows:
                (out if hopeless(queue) else found).append(queue)
        return found, out
    for queue in waiting:
        if queue.promised or _in_quota(queue):
            found.append(queue)
    return found, out


def _served(turn: Turn, queue: Queue, workload: Workload) -> None:
    queue.pop(workload)
    turn.again(queue, workload.owner)
