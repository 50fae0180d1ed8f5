"""Search for the victims of one preemptor: the best minimal set, in the order of rule 5.4.

Called for a workload that does not fit, with one of its rights (victims/preemptor.py). One worker takes the best set of
one node; gangs, and workloads that a limit, capacity or static quota keeps out, are looked at pool-wide.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from ..index.nodes import Allocation, NodeState, WorkerPlacement, nodes_of
from ..placement.fit import may_have_enough_gpus, within_limits
from .victims.node_by_node import node_by_node
from .victims.on_node import NodeVictims, NodeVictimsInQuotas, room_on
from .victims.one_by_one import one_by_one, orders, steps_of
from .victims.preemptor import Preemptor, Rights, each_once
from .victims.ranking import Ranking, enough_devices
from .victims.returning import REPEATS
from .victims.returning import returns as victims_return
from .victims.sets import (
    MAX_SETS,
    SHRINK,
    Key,
    Scored,
    Victims,
    all_minimal_sets,
    combinations_of,
    extra_workers,
    in_legal_order,
    in_order_of_items,
    key,
    minimal_sets,
    one_less,
    ways,
    whole,
)
from .victims.trial import PoolTrial, allowed_without, evict, place, restore

_SHARED: tuple[Rights, ...] = (("reservation",), ("fair_share",))
"""Rights by which equivalent preemptors have the same candidates: their rankings are shared."""
_MAX_RETURNS = 64
"""At most so many sets are checked for a member that would return at once."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The victims in a legal order, and the preemptor's placement once they are gone."""

    victims: Victims
    parts: tuple[WorkerPlacement, ...]
    victim_returns: bool = False
    """Whether a victim could return at once by evicting another workload, as in every other set that was examined."""


def reclaim(preemptor: Preemptor, returns: bool = True) -> Choice | None:
    """Return the victims, evicted in the cluster; None, with nothing changed, if no legal set makes room.

    `returns`: prefer a set without a member that could return at once.
    """
    if not preemptor.has_candidates():
        return None
    capped = not within_limits(preemptor.cluster, preemptor.account, preemptor.pool, preemptor.milli_gpus, True)
    one = preemptor.need.min_workers == 1 and not capped
    if one and preemptor.rights in _SHARED:
        return _by_node(preemptor, returns)  # without candidates() first: the ranking is quicker
    if not preemptor.candidates() or _impossible(preemptor):
        return None
    return _by_node(preemptor, returns) if one else _in_pool(preemptor, capped, returns)


def restore_all(preemptor: Preemptor, victims: Victims) -> None:
    """Undo the evictions of a choice."""
    for victim in victims:
        restore(preemptor, victim)


def evict_all(preemptor: Preemptor, victims: Victims) -> None:
    """Repeat the evictions of a choice that were undone."""
    for victim in victims:
        evict(preemptor, victim)


def finds_victims(preemptor: Preemptor) -> bool:
    """Whether there is a legal set of victims, cascades ignored; changes nothing."""
    choice = reclaim(preemptor, returns=False)
    if choice is not None:
        restore_all(preemptor, choice.victims)
    return choice is not None


def _by_node(preemptor: Preemptor, returns: bool) -> Choice | None:
    """Evict the best set of one node; if static quotas rule all of them out, the best of the pool."""
    choice = _take(preemptor, _sets_by_node(preemptor, NodeVictims), returns)
    if choice is None and preemptor.kept_out:
        return None if _impossible(preemptor) else _in_pool(preemptor, False, returns)
    return choice


def _take(preemptor: Preemptor, sets: Iterable[Victims], returns: bool) -> Choice | None:
    """Evict the first of these sets without a member that returns at once; if each has one, the first set.

    Over quota no set is taken of which a member could return in quota, or only by evicting what it made way for. A set
    of one node that contains one which makes room elsewhere is not minimal, and is skipped.
    """
    first: Choice | None = None
    tried: list[frozenset[tuple[str, int]]] = []
    for victims in sets:
        evicted = _evicted_workers(victims) if tried else None  # most often the first set will do
        if evicted is not None and any(fewer <= evicted for fewer in tried):
            continue
        choice = _evicted(preemptor, victims)
        if choice is None:
            continue
        back = victims_return(preemptor, choice.victims, choice.parts, finds_victims) if returns else "none"
        if back == "none":
            return choice
        for victim in choice.victims:
            restore(preemptor, victim)
        if not (back in REPEATS and preemptor.over_quota):
            first = first or choice
        tried.append(_evicted_workers(victims) if evicted is None else evicted)
        if len(tried) == _MAX_RETURNS:
            break
    again = _evicted(preemptor, first.victims) if first else None
    return replace(again, victim_returns=True) if again else None


def _evicted_workers(victims: Victims) -> frozenset[tuple[str, int]]:
    """Return the workers that are evicted, by id and number; -1 where none of a victim's nodes is in the inventory."""
    return frozenset((v.allocation.workload.id, at) for v in victims for at in [p.worker for p in v.gone] or [-1])


def _evicted(preemptor: Preemptor, victims: Victims) -> Choice | None:
    legal = in_legal_order(preemptor, victims)
    if legal is None:
        return None
    for victim in legal:
        evict(preemptor, victim)
    parts = place(preemptor)
    if parts:
        return Choice(legal, parts)
    for victim in legal:
        restore(preemptor, victim)
    return None


def _impossible(preemptor: Preemptor) -> bool:
    """Whether there is no room even without all candidates; limits are not checked."""
    pool, need = preemptor.pool, preemptor.need
    alone = need.min_workers == 1 and not may_have_enough_gpus(pool, need, True)
    workers = 0
    for node in preemptor.nodes() if alone else pool.nodes:
        if not node.suits(need):
            continue
        have = node.workers(need, True)
        if have < need.min_workers and (node.allocations or node.host_peers):
            candidates = each_once([*preemptor.candidates_on(node), *preemptor.candidates_beside(node)])
            if candidates and enough_devices(preemptor, node, candidates):
                have = min(need.min_workers, room_on(preemptor, node, map(whole, candidates)))
        workers += have
        if workers >= need.min_workers:
            return False
    return True


# One worker: the best set of one node


def _sets_by_node(preemptor: Preemptor, kind: type[NodeVictims]) -> Iterator[Victims]:
    """List the sets of all nodes, the best first; from the first that a static quota rules out, include these."""
    ranking = _ranking(preemptor, kind)
    others: list[tuple[Key, int, Victims]] = []
    done: set[int] = set()
    while True:
        top = ranking.best(preemptor, done)
        if others and (top is None or others[0][:2] < top[:2]):
            at, victims = None, heapq.heappop(others)[2]
        elif top is not None:
            at, victims = top, top.victims
        else:
            return
        if kind is NodeVictims and not allowed_without(preemptor, victims):
            preemptor.kept_out = True
            yield from _sets_by_node(preemptor, NodeVictimsInQuotas)
            return
        yield victims
        if at is not None:  # the node's other sets, only once the best of it was not taken
            done.add(at.position)
            node = preemptor.pool.nodes[at.position]
            for scored in kind(preemptor, node, preemptor.candidates_on(node)).all():
                if scored[0] > at.key:
                    heapq.heappush(others, (scored[0], at.position, scored[1]))


def _ranking(preemptor: Preemptor, kind: type[NodeVictims]) -> Ranking:
    """Return the nodes by their best set; equivalent preemptors share one ranking."""

    def best_on(preemptor: Preemptor, node: NodeState, candidates: list[Allocation]) -> Scored | None:
        return kind(preemptor, node, candidates).best()

    if preemptor.rights not in _SHARED or kind is not NodeVictims:
        return Ranking(best_on)
    is_job = preemptor.workload.kind == "job"
    alike = (preemptor.need, preemptor.account.team.name, preemptor.pool.pool.name, preemptor.rights, is_job)
    ranking: Ranking = preemptor.cluster.rankings.setdefault(alike, Ranking(best_on))
    return ranking


# Gangs, and whatever limits, capacities and static quotas keep out


def _in_pool(preemptor: Preemptor, capped: bool, returns: bool) -> Choice | None:
    candidates = preemptor.candidates()
    for allocation in candidates:
        preemptor.order(allocation)  # before any eviction
    if combinations_of(candidates, None) <= MAX_SETS:
        return _take(preemptor, _all_sets(preemptor, candidates), returns)
    trial = PoolTrial(preemptor)
    victims = node_by_node(preemptor, trial) if preemptor.need.min_workers > 1 and not capped else ()
    victims = victims or _greedy(preemptor, candidates, trial)
    parts = place(preemptor) if victims else ()
    if parts:
        legal = in_order_of_items(preemptor, victims)
        back = victims_return(preemptor, legal, parts, finds_victims) if returns else "none"
        if not (back in REPEATS and preemptor.over_quota):
            return Choice(legal, parts, back != "none")
    trial.become()
    return None


def _all_sets(preemptor: Preemptor, candidates: list[Allocation]) -> list[Victims]:
    """Return all minimal legal sets, the best first."""
    trial = PoolTrial(preemptor)
    units = [ways(a, nodes_of(a.parts)) for a in candidates]
    sets = all_minimal_sets if preemptor.may_tighten() else minimal_sets
    minimal = list(sets(units, trial.fits_without))
    trial.become()
    return sorted(filter(partial(in_legal_order, preemptor), minimal), key=partial(key, preemptor))


def _greedy(preemptor: Preemptor, candidates: list[Allocation], trial: PoolTrial) -> Victims:
    """Evict the first set that is enough: extra workers of elastic gangs, one workload, else one after another."""
    tries = orders(preemptor, (step for a in candidates for step in steps_of(a)))
    steps = next(tries)

    def counts_on_the_limit(allocation: Allocation) -> bool:
        cluster, pool = preemptor.cluster, preemptor.pool.pool.name
        line = cluster.ledger.over_limit(preemptor.account, pool, preemptor.milli_gpus, True)
        if line is None:
            return True
        counted = allocation.counts_on(line.quota)
        return counted > 0 and line.account in cluster.account(allocation.workload).chain

    victims = one_by_one(preemptor, (s for s in steps if s.kind == SHRINK), trial, counts_on_the_limit)
    victims = victims or _single(preemptor, candidates, trial)
    for order in chain((steps,), tries) if not victims else ():
        victims = victims or one_by_one(preemptor, order, trial, counts_on_the_limit)
    return victims


def _single(preemptor: Preemptor, candidates: list[Allocation], trial: PoolTrial) -> Victims:
    """Evict the first workload that is enough; of an elastic gang, the workers that are."""
    plain = [a for a in candidates if not extra_workers(a)]
    illegal = {a.workload.id for a in plain if not in_legal_order(preemptor, (whole(a),))}  # before any eviction
    for victims in sorted([(whole(a),) for a in candidates], key=partial(key, preemptor)):
        allocation = victims[0].allocation
        if allocation.workload.id in illegal:
            continue
        if trial.fits_without(victims) and (fewest := _least_way(preemptor, allocation, trial)):
            trial.become(fewest)
            return fewest
    trial.become()
    return ()


def _least_way(preemptor: Preemptor, allocation: Allocation, trial: PoolTrial) -> Victims:
    """Return the best minimal legal set among the ways of one candidate, all of which is enough; empty if none is."""
    shrinks = _shrinks_that_may_do(preemptor, allocation, trial)
    trial.become()  # what is legal depends on the usage before any eviction
    legal = [way for way in (*shrinks, (whole(allocation),)) if in_legal_order(preemptor, way)]
    known: dict[frozenset[tuple[str, int]], bool] = {}

    def fits(victims: Victims) -> bool:
        evicted = _evicted_workers(victims)
        if evicted not in known:
            known[evicted] = trial.fits_without(victims)
        return known[evicted]

    for way in sorted(legal, key=partial(key, preemptor)):
        fewer = one_less(way) if way[0].kind == SHRINK else shrinks
        if fits(way) and not any(map(fits, fewer)):
            return way
    return ()


def _shrinks_that_may_do(preemptor: Preemptor, allocation: Allocation, trial: PoolTrial) -> list[Victims]:
    """Return the ways in which a gang shrinks; none if those that leave only its least workers are not enough."""
    if combinations_of([allocation], None) > MAX_SETS:
        return []
    nodes = nodes_of(allocation.parts)
    shrinks = [way for way in ways(allocation, nodes) if way[0].kind == SHRINK]
    if not shrinks or preemptor.may_tighten():
        return shrinks
    fullest = [way for way in shrinks if len(way[0].kept) == allocation.need.min_workers]
    trial.become(fullest[0])
    if not within_limits(preemptor.cluster, preemptor.account, preemptor.pool, preemptor.milli_gpus, True):
        return []  # limits and capacity count GPUs, and no way gives up more
    return shrinks if any(map(trial.fits_without, fullest)) else []
