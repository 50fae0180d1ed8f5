"""Who must leave: the fewest GPUs, in the right order, and nobody needlessly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from .cheapest import Ranking, Scored, enough_devices, score
from .place import allowed, enough, find
from .state import GPU
from .victims import Seeker
from .world import NodeState, Part, Tenancy, hosts

_SHARED = ("reservation", "fair_share")
"""Rights by which seekers that are alike may ask the same; what is learned for one serves the next."""
_EXACT = 10
"""Up to so many candidates on a node, every set of them is looked at when the simple choice fails."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Who leaves, in the order in which they were chosen, and where the seeker then starts."""

    victims: tuple[Tenancy, ...]
    parts: tuple[Part, ...]


def reclaim(seeker: Seeker) -> Choice | None:
    """Choose victims and tell them to go; None (and nothing changed) if no legal set makes the seeker fit."""
    ranked = seeker.need.least == 1 and seeker.right in _SHARED  # it is quick, so whether there is hope is asked last
    if not seeker.anybody() or (not ranked and _hopeless(seeker)):
        return None
    if seeker.need.least == 1 and seeker.within_caps():
        choice = _on_one_node(seeker)
        if choice is not None:
            return choice
    elif seeker.need.least > 1:
        choice = _on_many_nodes(seeker)
        if choice is not None:
            return choice
    return None if ranked and _hopeless(seeker) else _anywhere(seeker)


def _hopeless(seeker: Seeker) -> bool:
    """Say whether there is no room for the seeker even if everybody left who could be asked."""
    if not seeker.where():
        return True
    pool, need = seeker.pool, seeker.need
    alone = need.least == 1 and not enough(pool, need, True)
    workers = 0
    for node in seeker.nodes() if alone else pool.nodes:
        if not node.suits(need):
            continue
        have = node.workers(need, True)
        if have < need.least and node.guests:
            able = seeker.askable(node)
            have = _most(seeker, node, able) if able and enough_devices(seeker, node, able) else have
        workers += have
        if workers >= need.least:
            return False
    return True


# One worker: the node where the fewest GPUs have to leave


def _on_one_node(seeker: Seeker) -> Choice | None:
    ranking = _ranking(seeker)
    chosen = ranking.best(seeker)
    if chosen is None:
        chosen = _on_one_node_exactly(seeker)
    return _carry_out(seeker, chosen) if chosen else None


def _ranking(seeker: Seeker) -> Ranking:
    """Find what was learned for an earlier seeker that is alike in all that matters."""
    if seeker.right not in _SHARED:
        return Ranking(_judge)
    kind = seeker.workload.kind == "job"
    alike = (seeker.need, seeker.account.policy.name, seeker.pool.pool.name, seeker.right, kind)
    ranking: Ranking = seeker.cluster.rankings.setdefault(alike, Ranking(_judge))
    return ranking


def _judge(seeker: Seeker, node: NodeState, able: list[Tenancy]) -> Scored | None:
    chosen = _fewest(seeker, node, able) if _room(seeker, node, able) else None
    return (score(seeker, chosen), chosen) if chosen else None


def _on_one_node_exactly(seeker: Seeker) -> list[Tenancy] | None:
    best: Scored | None = None
    for node in seeker.nodes():
        if not node.suits(seeker.need) or not node.guests:
            continue
        able = seeker.askable(node)
        if not able or not enough_devices(seeker, node, able) or not _room(seeker, node, able):
            continue
        exact = _exact(seeker, node, sorted(able, key=seeker.order))
        if exact is not None and (best is None or exact[0] < best[0]):
            best = exact
    return best[1] if best else None


def _fewest(seeker: Seeker, node: NodeState, able: list[Tenancy]) -> list[Tenancy] | None:
    """Choose on one node: alone if one is enough, else in order of leaving, then without the needless.

    `able` is in that order, and nobody was chosen yet, so each of them may be asked.
    """
    singles = [t for t in able if _room(seeker, node, [t])]
    greedy = able[:1] if singles and singles[0] is able[0] else _greedy(seeker, node, able)
    if not singles:
        return greedy
    single = min(singles, key=lambda t: (seeker.level(t), seeker.takes(t)))  # the first of those that are alike
    if greedy is None or (len(greedy) == 1 and greedy[0] is single) or score(seeker, [single]) <= score(seeker, greedy):
        return [single]
    return greedy


def _greedy(seeker: Seeker, node: NodeState, able: Sequence[Tenancy]) -> list[Tenancy] | None:
    chosen: list[Tenancy] = []
    fits = False
    for tenancy in able:
        if seeker.may_ask_now(tenancy):
            seeker.choose(tenancy)
            chosen.append(tenancy)
            if _room(seeker, node, chosen):
                fits = True
                break
    for tenancy in chosen:
        seeker.choose(tenancy, -1)
    if not fits:
        return None
    for tenancy in reversed(chosen[:]):
        fewer = [t for t in chosen if t is not tenancy]
        if fewer and _room(seeker, node, fewer):
            chosen = fewer
    return chosen


def _exact(seeker: Seeker, node: NodeState, able: Sequence[Tenancy]) -> tuple[tuple[object, ...], list[Tenancy]] | None:
    """Look at every set of a few candidates, for the cases where the order of leaving blocks itself."""
    best: Scored | None = None
    for size in range(1, min(len(able), _EXACT) + 1):
        for group in combinations(able[:_EXACT], size):
            if not _room(seeker, node, group):
                continue
            legal = in_legal_order(seeker, group)
            if legal is not None:
                scored = (score(seeker, legal), legal)
                if best is None or scored[0] < best[0]:
                    best = scored
        if best is not None:
            return best
    return None


def in_legal_order(seeker: Seeker, group: Iterable[Tenancy]) -> list[Tenancy] | None:
    """Order a set so that each is entitled to be asked when its turn comes; smallest first; None if impossible."""
    rest = sorted(group, key=lambda t: (t.amount, seeker.order(t)))
    done: list[Tenancy] = []
    while rest:
        following = next((t for t in rest if seeker.may_ask_now(t)), None)
        if following is None:
            break
        seeker.choose(following)
        done.append(following)
        rest.remove(following)
    for tenancy in done:
        seeker.choose(tenancy, -1)
    return None if rest else done


def _room(seeker: Seeker, node: NodeState, gone: Iterable[Tenancy], workers: int = 1) -> bool:
    left, whole, cpu, memory = node.future, node.whole_future, node.cpu_future, node.memory_future
    copied = False
    for tenancy in gone:
        for part in tenancy.parts:
            if part.node is not node:
                continue
            if not copied:
                left, copied = list(left), True
            for at in part.devices:
                left[at] += part.milli
                whole += left[at] == GPU
            cpu += tenancy.need.cpu
            memory += tenancy.need.memory
    return hosts(seeker.need, left, whole, cpu, memory) >= workers


# Gangs: the nodes that are cheapest to clear, one after the other


def _on_many_nodes(seeker: Seeker) -> Choice | None:
    offers = []
    where = seeker.where()
    for node in seeker.pool.nodes:
        if not node.suits(seeker.need):
            continue
        able = sorted(where.get(node.position, ()), key=seeker.order)
        have = node.workers(seeker.need, True)
        most = _most(seeker, node, able)
        if most:
            leaving = [] if most == have else able
            cost = sum(t.amount for t in leaving) / most
            orders = sorted(seeker.order(t) for t in leaving)
            offers.append((cost, orders, node.position, node, able, most))
    offers.sort(key=lambda offer: offer[:3])
    missing = seeker.need.least
    chosen: list[Tenancy] = []
    for _, _, _, node, able, most in offers:
        if missing <= 0:
            break
        missing -= _clear(seeker, node, able, min(most, missing), chosen)
    for tenancy in chosen:
        seeker.choose(tenancy, -1)
    return _carry_out(seeker, chosen) if chosen and missing <= 0 else None


def _most(seeker: Seeker, node: NodeState, able: Sequence[Tenancy]) -> int:
    most = node.workers(seeker.need, True)
    while most < seeker.need.least and _room(seeker, node, able, most + 1):
        most += 1
    return most


def _clear(seeker: Seeker, node: NodeState, able: Sequence[Tenancy], workers: int, chosen: list[Tenancy]) -> int:
    """Choose victims on a node until it hosts so many workers; give how many it then hosts."""
    gone = [t for t in chosen if node.node.name in {p.node.node.name for p in t.parts}]
    for tenancy in able:
        if _room(seeker, node, gone, workers):
            return workers
        if tenancy not in gone and seeker.may_ask_now(tenancy):
            seeker.choose(tenancy)
            chosen.append(tenancy)
            gone.append(tenancy)
    while workers and not _room(seeker, node, gone, workers):
        workers -= 1
    return workers


# Anywhere: where limits or caps are in the way, or the simple ways found nothing


def _anywhere(seeker: Seeker) -> Choice | None:
    everyone = {t.workload.id: t for node in seeker.nodes() for t in seeker.askable(node)}
    able = sorted(everyone.values(), key=seeker.order)
    if not able:
        return None
    for tenancy in able:
        enough_free = seeker.pool.future + tenancy.amount >= seeker.amount
        if enough_free and seeker.may_ask_now(tenancy) and _own_first(seeker, tenancy):
            choice = _carry_out(seeker, [tenancy])
            if choice is not None:
                return choice
    smallest_first = sorted(able, key=lambda t: (seeker.order(t)[0], t.amount, seeker.order(t)))
    return _gradually(seeker, able) or _gradually(seeker, smallest_first) or _any_set(seeker, able)


def _any_set(seeker: Seeker, able: Sequence[Tenancy]) -> Choice | None:
    """Try every small set where there are few to choose from."""
    if len(able) > _EXACT:
        return None
    for size in range(2, min(4, len(able)) + 1):
        for group in combinations(able, size):
            legal = in_legal_order(seeker, group)
            choice = _carry_out(seeker, legal) if legal else None
            if choice is not None:
                return choice
    return None


def _own_first(seeker: Seeker, tenancy: Tenancy) -> bool:
    """Say whether somebody may be asked while a limit is in the way: only those who count on that limit."""
    line = seeker.cluster.ledger.over_limit(seeker.account, seeker.pool.pool.name, seeker.amount, True)
    return line is None or line.account in seeker.cluster.account(tenancy.workload).chain


def _gradually(seeker: Seeker, able: Sequence[Tenancy]) -> Choice | None:
    cluster = seeker.cluster
    gone: list[Tenancy] = []
    parts: tuple[Part, ...] = ()
    rest = list(able)
    while not parts and rest:
        following = next((t for t in rest if _own_first(seeker, t) and seeker.may_ask_now(t)), None)
        if following is None:
            break
        rest.remove(following)
        cluster.leave(following)
        gone.append(following)
        parts = _fit(seeker)
    if not parts:
        for tenancy in gone:
            cluster.stay(tenancy)
        return None
    return _without_needless(seeker, gone, parts)


def _without_needless(seeker: Seeker, gone: list[Tenancy], parts: tuple[Part, ...]) -> Choice:
    """Let everybody stay whose leaving is not needed, those first who were asked last."""
    cluster, pool, need = seeker.cluster, seeker.pool, seeker.need
    room = sum(node.workers(need, True) for node in pool.nodes if node.suits(need))
    needed = []
    for tenancy in reversed(gone):
        nodes = {part.node.position: part.node for part in tenancy.parts if part.node.suits(need)}.values()
        before = sum(node.workers(need, True) for node in nodes)
        cluster.stay(tenancy)
        left = room - before + sum(node.workers(need, True) for node in nodes)
        if left >= need.least and allowed(cluster, seeker.account, pool, seeker.amount, True):
            room = left
        else:
            cluster.leave(tenancy)
            needed.append(tenancy)
    return Choice(tuple(reversed(needed)), find(pool, need, True))


def _carry_out(seeker: Seeker, chosen: Sequence[Tenancy]) -> Choice | None:
    for tenancy in chosen:
        seeker.cluster.leave(tenancy)
    parts = _fit(seeker)
    if parts:
        return Choice(tuple(chosen), parts) if len(chosen) == 1 else _without_needless(seeker, list(chosen), parts)
    for tenancy in chosen:
        seeker.cluster.stay(tenancy)
    return None


def _fit(seeker: Seeker) -> tuple[Part, ...]:
    """Find where the seeker would start, were everybody gone who was told to go."""
    if not allowed(seeker.cluster, seeker.account, seeker.pool, seeker.amount, True):
        return ()
    return find(seeker.pool, seeker.need, True)
