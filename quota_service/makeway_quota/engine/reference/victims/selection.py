"""Choose the victims of one preemptor: the best of all legal victim sets (engine rule 5.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod

from ..state.cluster import Allocation, FreeResources, WorkerPlacement
from ..state.groups import Key
from ..state.placement import count_workers, find
from ..state.quota import allowed, counts_on, limiting, over_limit
from .cascade import REPEATS, Return, may_cascade, returns
from .victims import (
    Member,
    Preemptor,
    Victims,
    candidates,
    has_right,
    here_or_beside,
    items,
    legal_order,
    order,
    set_key,
    shrunk,
    stopped,
    without,
)

MAX_COMBINATIONS = 1024
"""Up to so many combinations are all looked at; beyond, a stated greedy is followed."""
MAX_CASCADE_CHECKS = 64
"""So many sets are examined for cascades before the first of them is taken all the same."""

Test = Callable[[Sequence[Member]], bool]


@dataclass(frozen=True, slots=True)
class Choice:
    """The victims, in a legal order, and the place where the preemptor starts once they are gone."""

    victims: Victims
    parts: tuple[WorkerPlacement, ...]
    victim_returns: bool = False
    """Whether a victim could return at once by evicting another workload, as in every other set that was examined."""


def select(p: Preemptor, check_returns: bool = True) -> Choice | None:
    """Return the best legal victim set, or None if no legal set makes the preemptor fit."""
    able = candidates(p)
    if not able or not _could_fit(p, able):
        return None
    unlimited = allowed(p.cluster, p.chain, p.pool, p.need.total, True)
    if (
        unlimited
        and p.need.min_workers == 1
        and (choice := _first(p, _on_one_node(p, able), check_returns)) is not None
    ):
        return choice
    if _combinations(p, able) <= MAX_COMBINATIONS:
        return _first(p, _in_order(p, _all_sets(p, able), lambda s: fits(p, s)), check_returns)
    greedy = _for_a_gang(p, able) if unlimited and p.need.min_workers > 1 else None
    victims = greedy or _step_by_step(p, able)
    return _first(p, iter((victims,)), check_returns) if victims else None


def _choice(p: Preemptor, victims: Victims, victim_returns: bool) -> Choice:
    return Choice(victims, find(without(p.cluster, victims), p.pool, p.need, True), victim_returns)


def fits(p: Preemptor, victims: Iterable[Member]) -> bool:
    """Whether the preemptor has a placement in the future without these victims."""
    trial = without(p.cluster, victims)
    room = count_workers(trial, p.pool, p.need, True) >= p.need.min_workers
    return room and allowed(trial, p.chain, p.pool, p.need.total, True)


def _could_fit(p: Preemptor, able: Sequence[Allocation]) -> bool:
    trial = without(p.cluster, [stopped(a) for a in able])
    return count_workers(trial, p.pool, p.need, True) >= p.need.min_workers


def _first(p: Preemptor, sets: Iterator[Victims], check_returns: bool) -> Choice | None:
    """Return the first set without a member that could return at once by evicting another workload (rule 5.4 a).

    If each examined set has one, the first set; over quota no set with a member that could return in quota, or only by
    evicting what it made way for. Without `check_returns`, nothing is examined.
    """
    first: Victims | None = None
    for examined, victims in enumerate(sets):
        if examined >= MAX_CASCADE_CHECKS:
            break
        back = _returns(p, victims) if check_returns else "none"
        if back == "none":
            return _choice(p, victims, False)
        if first is None and not (back in REPEATS and p.over_quota):
            first = victims
    return None if first is None else _choice(p, first, True)


def _returns(p: Preemptor, victims: Victims) -> Return:
    """Return how a victim could return at once by evicting, once the preemptor has started; the worst of all.

    A start that replaced one of the preemptor in this plan would do so again.
    """
    trial = without(p.cluster, victims, released=True)
    trial.nominate(p.workload, find(without(p.cluster, victims), p.pool, p.need, True))
    stops = [member.allocation.workload for member in victims if member.kind == 1]
    ways = {returns(trial, p.workload, w, _exists) for w in stops}
    again = [m.allocation.workload for m in victims if m.kind == -1 and m.allocation.id in p.replaced_by]
    if any(returns(trial, p.workload, w, _exists) != "none" for w in again if p.cluster.need(w).total):
        return "back"
    return next((how for how in ("back", "in_quota", "others") if how in ways), "none")


def _exists(p: Preemptor) -> bool:
    return select(p, check_returns=False) is not None


# All sets of some candidates


def _options(p: Preemptor, victim: Allocation, node: str | None = None) -> list[Member | None]:
    """Return what may happen to a candidate: nothing, a shrink (on one host) by its highest workers, a stop."""
    extra = 0 if victim.fixed else len(victim.parts) - victim.need.min_workers
    options: list[Member | None] = [None]
    if extra > 0:
        names = dict.fromkeys(part.node for part in victim.parts if node is None or _on_host(p, part, node))
        by_node = [sorted(victim.on(name), key=lambda part: -part.worker) for name in names]
        for many in product(*(range(min(extra, len(parts)) + 1) for parts in by_node)):
            gone = [part for n, parts in zip(many, by_node, strict=True) for part in parts[:n]]
            member = shrunk(p.cluster, victim, gone) if len(gone) <= extra else None
            options += [member] if member else []
    return [*options, stopped(victim)]


def _combinations(p: Preemptor, able: Iterable[Allocation], node: str | None = None) -> int:
    return prod(len(_options(p, victim, node)) for victim in able)


def _all_sets(p: Preemptor, able: Iterable[Allocation], node: str | None = None) -> Iterator[Victims]:
    for combination in product(*(_options(p, victim, node) for victim in able)):
        victims = tuple(member for member in combination if member is not None)
        if victims:
            yield victims


def _in_order(p: Preemptor, sets: Iterable[Victims], enough: Test) -> Iterator[Victims]:
    """Iterate over the minimal sets that are enough and legal, the best first."""
    for victims in sorted(sets, key=lambda s: set_key(p, s)):
        if enough(victims) and not any(enough(less) for less in _one_less(p, victims)):
            legal = legal_order(p, victims)
            if legal is not None:
                yield legal


def _one_less(p: Preemptor, victims: Sequence[Member]) -> Iterator[Victims]:
    """Iterate over the sets with one member less, or with one worker less given up."""
    for at, member in enumerate(victims):
        others = (*victims[:at], *victims[at + 1 :])
        yield others
        for less in _fewer_given_up(p, member):
            yield (*others, less)


def _fewer_given_up(p: Preemptor, member: Member) -> Iterator[Member]:
    """Iterate over the ways to keep one more worker of a gang that shrinks, or some of one that is stopped."""
    if member.whole:
        yield from (less for less in _options(p, member.allocation) if less is not None and not less.whole)
    for part in sorted(member.gone, key=lambda item: item.worker) if not member.whole else ():
        less = shrunk(p.cluster, member.allocation, [other for other in member.gone if other is not part])
        if less is not None:
            yield less


# One worker: the node where the best set is


def _on_one_node(p: Preemptor, able: Sequence[Allocation]) -> Iterator[Victims]:
    sets: list[Victims] = []
    for node in p.cluster.nodes_of(p.pool):
        here = here_or_beside(p, node, able)
        if here and p.cluster.suits(node, p.need):
            sets += _on_node(p, node, here, 1, ())
    unique = {frozenset((m.allocation.id, m.gone) for m in victims): victims for victims in sets}
    ordered = sorted(unique.values(), key=lambda s: set_key(p, s))
    return (s for s in ordered if not any(fits(p, less) for less in _one_less(p, s)))  # less may do on another node


def _on_node(p: Preemptor, node: str, here: Sequence[Allocation], workers: int, chosen: Victims) -> list[Victims]:
    """Return sets that make room for so many workers on a node, the best first; legal after those `chosen`."""
    free = p.cluster.free_later(node)

    def enough(victims: Sequence[Member]) -> bool:
        return room_on(p, node, free, (*chosen, *victims)) >= workers and (
            bool(chosen)
            or p.need.min_workers > 1
            or allowed(without(p.cluster, victims), p.chain, p.pool, p.need.total, True)
        )

    if not enough([stopped(a) for a in here]) and room_on(p, node, free, _everything(here, chosen)) < workers:
        return []
    if _combinations(p, here, node) <= MAX_COMBINATIONS:
        every = _in_order(p, _all_sets(p, here, node), enough)
        return [s for s in every if legal_order(p, (*chosen, *s)) is not None]
    singles = [(stopped(a),) for a in here]
    greedy = _greedy(p, _units(p, here, node), enough, chosen)
    sets = [*(s for s in singles if enough(s) and legal_order(p, (*chosen, *s))), *([greedy] if greedy else [])]
    return sorted(sets, key=lambda s: set_key(p, s))


def _everything(here: Iterable[Allocation], chosen: Victims) -> Victims:
    taken = {member.allocation.id for member in chosen}
    return (*chosen, *(stopped(a) for a in here if a.id not in taken))


def room_on(p: Preemptor, node: str, free: FreeResources, victims: Iterable[Member]) -> int:
    """Count the workers that fit on a node without these victims."""
    devices, cpu, memory, pods = list(free.devices), free.cpu, free.memory, free.pods
    host = p.cluster.host_of(node)
    for member in victims:
        for part in member.freed:
            if part.node in host:
                pods += 1
                cpu, memory = cpu + member.allocation.need.cpu, memory + member.allocation.need.memory
                for at in part.devices if part.node == node else ():
                    devices[at] += part.milli_per_device
    return FreeResources(devices, cpu, memory, pods).workers(p.need)


# Greedy walks, where there are too many combinations


def _units(p: Preemptor, able: Sequence[Allocation], node: str | None = None) -> list[Member]:
    """Return candidates in order of leaving: withdrawals, then extra workers one by one, then stops."""
    whole = [stopped(victim) for victim in able]
    extras = [unit for victim in able for unit in _extra_workers(p, victim, node)]
    return [*(m for m in whole if m.kind < 0), *extras, *(m for m in whole if m.kind > 0)]


def _extra_workers(p: Preemptor, victim: Allocation, node: str | None) -> Iterator[Member]:
    """Iterate over the workers that a gang can give up one after the other, the highest number first."""
    here = [part for part in victim.parts if node is None or _on_host(p, part, node)]
    gone: list[WorkerPlacement] = []
    for part in sorted(here, key=lambda item: -item.worker):
        more = len(victim.parts) - len(gone) > victim.need.min_workers
        unit = shrunk(p.cluster, victim, [part])
        if more and unit is not None and shrunk(p.cluster, victim, [*gone, part]) is not None:
            gone.append(part)
            yield unit


def _on_host(p: Preemptor, part: WorkerPlacement, node: str) -> bool:
    return part.node in p.cluster.host_of(node)


def _by_amount(p: Preemptor, units: Sequence[Member]) -> list[Member]:
    return sorted(units, key=lambda m: (m.kind, m.amount, order(p, m.allocation), -m.gone[0].worker if m.gone else 0))


def _greedy(p: Preemptor, units: Sequence[Member], enough: Test, chosen: Victims = ()) -> Victims | None:
    """Evict one unit after the other, by protection, else the smallest first, else without withdrawing starts.

    A start of this plan may be all that puts others above a reservation.
    """
    not_withdrawn = [unit for unit in units if unit.kind >= 0]
    return (
        _walk(p, units, enough, chosen)
        or _walk(p, _by_amount(p, units), enough, chosen)
        or (_walk(p, not_withdrawn, enough, chosen) if len(not_withdrawn) < len(units) else None)
    )


def _joined(p: Preemptor, victims: Victims, unit: Member) -> Victims:
    """Add a unit to a set: workers of one gang become one member, and a stop includes them."""
    old = next((m for m in victims if m.allocation.id == unit.allocation.id), None)
    if old is None:
        return (*victims, unit)
    others = tuple(m for m in victims if m is not old)
    return (*others, unit if unit.whole else shrunk(p.cluster, old.allocation, (*old.gone, *unit.gone)) or old)


def _walk(p: Preemptor, units: Sequence[Member], enough: Test, chosen: Victims = ()) -> Victims | None:
    """Evict one unit after the other, each if it is legal then, until it is enough; then spare what is needless."""
    victims: Victims = ()
    gone = [(member.allocation, member.amount) for member in chosen]
    for unit in units:
        before = next((m for m in victims if m.allocation is unit.allocation), None)
        joined = _joined(p, victims, unit)
        amounts = _more(next(m for m in joined if m.allocation is unit.allocation), before)
        if _counts_on_limit(p, victims, unit) and (more := _legal_next(p, unit.allocation, amounts, gone)):
            victims, gone = joined, more
            if enough(victims):
                return _without_needless(p, victims, enough)
    return None


def _more(member: Member, before: Member | None) -> list[int]:
    """Return what a member gives up more than before, in milli-GPUs, one worker after the other."""
    amounts = [amount for amount, _ in items(member)]
    if before is None:
        return amounts
    return amounts[len(before.freed) if member.whole else len(before.gone) :]


def _legal_next(
    p: Preemptor, victim: Allocation, amounts: Iterable[int], gone: Sequence[tuple[Allocation, int]]
) -> list[tuple[Allocation, int]] | None:
    """Return what is gone once a candidate gives up these amounts one by one; None if one of them is not legal."""
    after = list(gone)
    for amount in amounts:
        if not has_right(p, victim, after):
            return None
        after.append((victim, amount))
    return after


def _counts_on_limit(p: Preemptor, victims: Victims, unit: Member) -> bool:
    """Whether an eviction helps while a limit is in the way: only those that count on the limit do."""
    trial = without(p.cluster, victims)
    line = over_limit(trial, p.chain, p.pool, p.need.total, True) if limiting(trial, p.chain, p.pool) else None
    return line is None or counts_on(p.cluster, line, unit.allocation)


def _without_needless(p: Preemptor, victims: Victims, enough: Test) -> Victims:
    """Spare what is not needed, the most protected first; then worker by worker, the lowest number first."""
    for member in sorted(victims, key=lambda m: (m.kind, *order(p, m.allocation)), reverse=True):
        fewer = tuple(m for m in victims if m is not member)
        if fewer and enough(fewer):
            victims = fewer
            continue
        for part in sorted(member.gone, key=lambda item: item.worker) if not member.whole else ():
            now = next(m for m in victims if m.allocation is member.allocation)
            less = shrunk(p.cluster, now.allocation, [other for other in now.gone if other is not part])
            changed = tuple(less if m is now and less else m for m in victims)
            if less is not None and enough(changed):
                victims = changed
    legal = legal_order(p, victims)
    return victims if legal is None else legal


def _for_a_gang(p: Preemptor, able: Sequence[Allocation]) -> Victims | None:
    """Clear the node that costs least per worker gained, one after the other."""
    chosen: Victims = ()
    nodes = [name for name in p.cluster.nodes_of(p.pool) if p.cluster.suits(name, p.need)]
    while True:
        free = {name: p.cluster.free_later(name) for name in nodes}
        have = {name: room_on(p, name, free[name], chosen) for name in nodes}
        missing = p.need.min_workers - sum(have.values())
        if missing <= 0:
            return _without_needless(p, chosen, lambda s: fits(p, s)) if fits(p, chosen) else None
        best: tuple[Key, Victims] | None = None
        taken = {member.allocation.id for member in chosen}
        for at, name in enumerate(nodes):
            here = [a for a in here_or_beside(p, name, able) if a.id not in taken]
            for gain in range(1, missing + 1) if here else ():
                for victims in _on_node(p, name, here, have[name] + gain, chosen)[:1]:
                    rated = _rate(p, chosen, victims, gain, at)
                    if best is None or rated < best[0]:
                        best = rated, victims
        if best is None:
            return None
        chosen = (*chosen, *best[1])


def _rate(p: Preemptor, chosen: Victims, victims: Victims, gain: int, position: int) -> Key:
    stops, amount, *rest = set_key(p, victims)
    assert isinstance(amount, int)
    evicted = (*chosen, *victims)
    cascade = any(m.kind == 1 and may_cascade(p, evicted, m.allocation) for m in victims)
    return cascade, stops, Fraction(amount, gain), *rest, -gain, position


def _step_by_step(p: Preemptor, able: Sequence[Allocation]) -> Victims | None:
    """Follow the stated order of attempts, where there are too many sets to look at all of them."""

    def enough(victims: Sequence[Member]) -> bool:
        return fits(p, victims)

    units = _units(p, able)
    shrinks = _walk(p, [m for m in units if not m.whole], enough)
    if shrinks:
        return shrinks
    ordered = sorted(able, key=lambda a: set_key(p, (stopped(a),)))
    single = next((way for a in ordered if enough((stopped(a),)) and (way := _least_way(p, a, enough))), None)
    return single or _greedy(p, units, enough)


def _least_way(p: Preemptor, victim: Allocation, enough: Test) -> Victims | None:
    """Return the best minimal legal set among the ways of one candidate: some of its workers, or all of them."""
    few = _combinations(p, [victim]) <= MAX_COMBINATIONS
    sets = list(_all_sets(p, [victim])) if few else [(stopped(victim),)]
    return next(_in_order(p, sets, enough), None)
