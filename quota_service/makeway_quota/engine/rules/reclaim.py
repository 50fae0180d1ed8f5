"""Who must leave: the fewest GPUs, in the right order, and nobody needlessly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..index.nodes import Allocation, NodeState, Part, hosts
from ..index.victim_ranking import Ranking, Scored, enough_devices, score
from ..placement.fit import allowed, enough, find
from ..state import GPU
from .victims import Preemptor

_SHARED = ("reservation", "fair_share")
"""Rights by which preemptors that are alike may ask the same; what is learned for one serves the next."""
_EXACT = 10
"""Up to so many candidates on a node, every set of them is looked at when the simple choice fails."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Who leaves, in the order in which they were chosen, and where the preemptor then starts."""

    victims: tuple[Allocation, ...]
    parts: tuple[Part, ...]


def reclaim(preemptor: Preemptor) -> Choice | None:
    """Choose victims and tell them to go; None (and nothing changed) if no legal set makes the preemptor fit."""
    ranked = (
        preemptor.need.least == 1 and preemptor.right in _SHARED
    )  # it is quick, so whether there is hope is asked last
    if not preemptor.anybody() or (not ranked and _hopeless(preemptor)):
        return None
    if preemptor.need.least == 1 and preemptor.within_caps():
        choice = _on_one_node(preemptor)
        if choice is not None:
            return choice
    elif preemptor.need.least > 1:
        choice = _on_many_nodes(preemptor)
        if choice is not None:
            return choice
    return None if ranked and _hopeless(preemptor) else _anywhere(preemptor)


def _hopeless(preemptor: Preemptor) -> bool:
    """Say whether there is no room for the preemptor even if everybody left who could be asked."""
    if not preemptor.where():
        return True
    pool, need = preemptor.pool, preemptor.need
    alone = need.least == 1 and not enough(pool, need, True)
    workers = 0
    for node in preemptor.nodes() if alone else pool.nodes:
        if not node.suits(need):
            continue
        have = node.workers(need, True)
        if have < need.least and node.allocations:
            able = preemptor.askable(node)
            have = _most(preemptor, node, able) if able and enough_devices(preemptor, node, able) else have
        workers += have
        if workers >= need.least:
            return False
    return True


# One worker: the node where the fewest GPUs have to leave


def _on_one_node(preemptor: Preemptor) -> Choice | None:
    ranking = _ranking(preemptor)
    chosen = ranking.best(preemptor)
    if chosen is None:
        chosen = _on_one_node_exactly(preemptor)
    return _carry_out(preemptor, chosen) if chosen else None


def _ranking(preemptor: Preemptor) -> Ranking:
    """Find what was learned for an earlier preemptor that is alike in all that matters."""
    if preemptor.right not in _SHARED:
        return Ranking(_judge)
    kind = preemptor.workload.kind == "job"
    alike = (preemptor.need, preemptor.account.policy.name, preemptor.pool.pool.name, preemptor.right, kind)
    ranking: Ranking = preemptor.cluster.rankings.setdefault(alike, Ranking(_judge))
    return ranking


def _judge(preemptor: Preemptor, node: NodeState, able: list[Allocation]) -> Scored | None:
    chosen = _fewest(preemptor, node, able) if _room(preemptor, node, able) else None
    return (score(preemptor, chosen), chosen) if chosen else None


def _on_one_node_exactly(preemptor: Preemptor) -> list[Allocation] | None:
    best: Scored | None = None
    for node in preemptor.nodes():
        if not node.suits(preemptor.need) or not node.allocations:
            continue
        able = preemptor.askable(node)
        if not able or not enough_devices(preemptor, node, able) or not _room(preemptor, node, able):
            continue
        exact = _exact(preemptor, node, sorted(able, key=preemptor.order))
        if exact is not None and (best is None or exact[0] < best[0]):
            best = exact
    return best[1] if best else None


def _fewest(preemptor: Preemptor, node: NodeState, able: list[Allocation]) -> list[Allocation] | None:
    """Choose on one node: alone if one is enough, else in order of terminating, then without the needless.

    `able` is in that order, and nobody was chosen yet, so each of them may be asked.
    """
    singles = [t for t in able if _room(preemptor, node, [t])]
    greedy = able[:1] if singles and singles[0] is able[0] else _greedy(preemptor, node, able)
    if not singles:
        return greedy
    single = min(singles, key=lambda t: (preemptor.level(t), preemptor.takes(t)))  # the first of those that are alike
    if (
        greedy is None
        or (len(greedy) == 1 and greedy[0] is single)
        or score(preemptor, [single]) <= score(preemptor, greedy)
    ):
        return [single]
    return greedy


def _greedy(preemptor: Preemptor, node: NodeState, able: Sequence[Allocation]) -> list[Allocation] | None:
    chosen: list[Allocation] = []
    fits = False
    for allocation in able:
        if preemptor.may_ask_now(allocation):
            preemptor.choose(allocation)
            chosen.append(allocation)
            if _room(preemptor, node, chosen):
                fits = True
                break
    for allocation in chosen:
        preemptor.choose(allocation, -1)
    if not fits:
        return None
    for allocation in reversed(chosen[:]):
        fewer = [t for t in chosen if t is not allocation]
        if fewer and _room(preemptor, node, fewer):
            chosen = fewer
    return chosen


def _exact(
    preemptor: Preemptor, node: NodeState, able: Sequence[Allocation]
) -> tuple[tuple[object, ...], list[Allocation]] | None:
    """Look at every set of a few candidates, for the cases where the order of terminating blocks itself."""
    best: Scored | None = None
    for size in range(1, min(len(able), _EXACT) + 1):
        for group in combinations(able[:_EXACT], size):
            if not _room(preemptor, node, group):
                continue
            legal = in_legal_order(preemptor, group)
            if legal is not None:
                scored = (score(preemptor, legal), legal)
                if best is None or scored[0] < best[0]:
                    best = scored
        if best is not None:
            return best
    return None


def in_legal_order(preemptor: Preemptor, group: Iterable[Allocation]) -> list[Allocation] | None:
    """Order a set so that each is entitled to be asked when its turn comes; smallest first; None if impossible."""
    rest = sorted(group, key=lambda t: (t.amount, preemptor.order(t)))
    done: list[Allocation] = []
    while rest:
        following = next((t for t in rest if preemptor.may_ask_now(t)), None)
        if following is None:
            break
        preemptor.choose(following)
        done.append(following)
        rest.remove(following)
    for allocation in done:
        preemptor.choose(allocation, -1)
    return None if rest else done


def _room(preemptor: Preemptor, node: NodeState, gone: Iterable[Allocation], workers: int = 1) -> bool:
    left, whole, cpu, memory = node.future, node.whole_future, node.cpu_future, node.memory_future
    copied = False
    for allocation in gone:
        for part in allocation.parts:
            if part.node is not node:
                continue
            if not copied:
                left, copied = list(left), True
            for at in part.devices:
                left[at] += part.milli
                whole += left[at] == GPU
            cpu += allocation.need.cpu
            memory += allocation.need.memory
    return hosts(preemptor.need, left, whole, cpu, memory) >= workers


# Gangs: the nodes that are cheapest to clear, one after the other


def _on_many_nodes(preemptor: Preemptor) -> Choice | None:
    offers = []
    where = preemptor.where()
    for node in preemptor.pool.nodes:
        if not node.suits(preemptor.need):
            continue
        able = sorted(where.get(node.position, ()), key=preemptor.order)
        have = node.workers(preemptor.need, True)
        most = _most(preemptor, node, able)
        if most:
            terminating = [] if most == have else able
            cost = sum(t.amount for t in terminating) / most
            orders = sorted(preemptor.order(t) for t in terminating)
            offers.append((cost, orders, node.position, node, able, most))
    offers.sort(key=lambda offer: offer[:3])
    missing = preemptor.need.least
    chosen: list[Allocation] = []
    for _, _, _, node, able, most in offers:
        if missing <= 0:
            break
        missing -= _clear(preemptor, node, able, min(most, missing), chosen)
    for allocation in chosen:
        preemptor.choose(allocation, -1)
    return _carry_out(preemptor, chosen) if chosen and missing <= 0 else None


def _most(preemptor: Preemptor, node: NodeState, able: Sequence[Allocation]) -> int:
    most = node.workers(preemptor.need, True)
    while most < preemptor.need.least and _room(preemptor, node, able, most + 1):
        most += 1
    return most


def _clear(
    preemptor: Preemptor, node: NodeState, able: Sequence[Allocation], workers: int, chosen: list[Allocation]
) -> int:
    """Choose victims on a node until it hosts so many workers; give how many it then hosts."""
    gone = [t for t in chosen if node.node.name in {p.node.node.name for p in t.parts}]
    for allocation in able:
        if _room(preemptor, node, gone, workers):
            return workers
        if allocation not in gone and preemptor.may_ask_now(allocation):
            preemptor.choose(allocation)
            chosen.append(allocation)
            gone.append(allocation)
    while workers and not _room(preemptor, node, gone, workers):
        workers -= 1
    return workers


# Anywhere: where limits or caps are in the way, or the simple ways found nothing


def _anywhere(preemptor: Preemptor) -> Choice | None:
    everyone = {t.workload.id: t for node in preemptor.nodes() for t in preemptor.askable(node)}
    able = sorted(everyone.values(), key=preemptor.order)
    if not able:
        return None
    for allocation in able:
        enough_free = preemptor.pool.future + allocation.amount >= preemptor.amount
        if enough_free and preemptor.may_ask_now(allocation) and _own_first(preemptor, allocation):
            choice = _carry_out(preemptor, [allocation])
            if choice is not None:
                return choice
    smallest_first = sorted(able, key=lambda t: (preemptor.order(t)[0], t.amount, preemptor.order(t)))
    return _gradually(preemptor, able) or _gradually(preemptor, smallest_first) or _any_set(preemptor, able)


def _any_set(preemptor: Preemptor, able: Sequence[Allocation]) -> Choice | None:
    """Try every small set where there are few to choose from."""
    if len(able) > _EXACT:
        return None
    for size in range(2, min(4, len(able)) + 1):
        for group in combinations(able, size):
            legal = in_legal_order(preemptor, group)
            choice = _carry_out(preemptor, legal) if legal else None
            if choice is not None:
                return choice
    return None


def _own_first(preemptor: Preemptor, allocation: Allocation) -> bool:
    """Say whether somebody may be asked while a limit is in the way: only those who count on that limit."""
    line = preemptor.cluster.ledger.over_limit(preemptor.account, preemptor.pool.pool.name, preemptor.amount, True)
    return line is None or line.account in preemptor.cluster.account(allocation.workload).chain


def _gradually(preemptor: Preemptor, able: Sequence[Allocation]) -> Choice | None:
    cluster = preemptor.cluster
    gone: list[Allocation] = []
    parts: tuple[Part, ...] = ()
    rest = list(able)
    while not parts and rest:
        following = next((t for t in rest if _own_first(preemptor, t) and preemptor.may_ask_now(t)), None)
        if following is None:
            break
        rest.remove(following)
        cluster.leave(following)
        gone.append(following)
        parts = _fit(preemptor)
    if not parts:
        for allocation in gone:
            cluster.stay(allocation)
        return None
    return _without_needless(preemptor, gone, parts)


def _without_needless(preemptor: Preemptor, gone: list[Allocation], parts: tuple[Part, ...]) -> Choice:
    """Let everybody stay whose terminating is not needed, those first who were asked last."""
    cluster, pool, need = preemptor.cluster, preemptor.pool, preemptor.need
    room = sum(node.workers(need, True) for node in pool.nodes if node.suits(need))
    needed = []
    for allocation in reversed(gone):
        nodes = {part.node.position: part.node for part in allocation.parts if part.node.suits(need)}.values()
        before = sum(node.workers(need, True) for node in nodes)
        cluster.stay(allocation)
        left = room - before + sum(node.workers(need, True) for node in nodes)
        if left >= need.least and allowed(cluster, preemptor.account, pool, preemptor.amount, True):
            room = left
        else:
            cluster.leave(allocation)
            needed.append(allocation)
    return Choice(tuple(reversed(needed)), find(pool, need, True))


def _carry_out(preemptor: Preemptor, chosen: Sequence[Allocation]) -> Choice | None:
    for allocation in chosen:
        preemptor.cluster.leave(allocation)
    parts = _fit(preemptor)
    if parts:
        return Choice(tuple(chosen), parts) if len(chosen) == 1 else _without_needless(preemptor, list(chosen), parts)
    for allocation in chosen:
        preemptor.cluster.stay(allocation)
    return None


def _fit(preemptor: Preemptor) -> tuple[Part, ...]:
    """Find where the preemptor would start, were everybody gone who was told to go."""
    if not allowed(preemptor.cluster, preemptor.account, preemptor.pool, preemptor.amount, True):
        return ()
    return find(preemptor.pool, preemptor.need, True)
