"""Sets of victims: what each frees, whether it is legal and minimal, and which of two is better (rule 5.4).

Called by the search (on_node.py for one node at a time, rules/reclaim.py for a pool). Changes nothing in the cluster;
only the preemptor's count of what is gone is changed and restored.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from ...index.ledger import Account
from ...index.nodes import Allocation, NodeState, PoolState, WorkerPlacement
from ...snapshot import STARTING, QuotaLine
from .preemptor import ONLY_ABOVE, Preemptor

WITHDRAW, SHRINK, STOP = -1, 0, 1
"""The kinds of victims: a start of this very plan is withdrawn, an elastic gang gives up workers, a workload stops."""
MAX_SETS = 1024
"""With more combinations than this, not all sets are examined."""


class Victim(NamedTuple):
    """An allocation and those of its workers that are evicted."""

    allocation: Allocation
    kind: int
    gone: tuple[WorkerPlacement, ...]

    @property
    def milli_gpus(self) -> int:
        """Return the milli-GPUs that the victim gives up, with those of workers that cannot stay."""
        if self.kind != SHRINK:
            return self.allocation.milli_gpus
        return self.allocation.milli_gpus - self.allocation.need.gpus * len(self.kept)

    @property
    def loses(self) -> bool:
        """Whether anything may be lost: not where a start is withdrawn, or has not run yet."""
        return self.kind != WITHDRAW and self.allocation.workload.state != STARTING

    @property
    def counted(self) -> tuple[tuple[str, int], ...]:
        """Return each pool and how much of that counts there."""
        shares = self.allocation.shares or ((self.allocation.pool, self.milli_gpus),)
        return tuple((pool.pool.name, amount) for pool, amount in shares)

    def counts_on(self, quota: QuotaLine) -> int:
        """Return how much of that counts on a line of the victim's team, or of a department above it."""
        counted = self.allocation.counts_on(quota)
        return counted if self.kind != SHRINK else min(counted, self.milli_gpus)

    @property
    def kept(self) -> tuple[WorkerPlacement, ...]:
        """Return the parts that the victim keeps, with the numbers of their workers; empty unless it shrinks."""
        if self.kind != SHRINK:
            return ()
        rest = (part for part in self.allocation.parts if part not in self.gone)
        stay = sorted((part for part in rest if stays(self.allocation, part)), key=lambda part: part.worker)
        min_workers = self.allocation.need.min_workers
        return tuple(stay) if len(stay) >= min_workers else ()


Victims = tuple[Victim, ...]
_Places = Sequence[tuple[object, ...]]
Key = tuple[bool, int, int, _Places, int, _Places, _Places]
"""Stops, milli-GPUs of what runs and of what does not yet, protection of the members, their number and order, workers
given up."""
Scored = tuple[Key, Victims]
Ways = list[Victims]
"""The alternatives of one candidate, or of a group of equal ones."""
Fits = Callable[[Victims], bool]


def stays(allocation: Allocation, part: WorkerPlacement) -> bool:
    """Whether a worker of a gang that shrinks may stay: its node is usable, and none of its devices is lost."""
    return part.node.usable and len(part.devices) * part.milli_per_device == allocation.need.gpus


def extra_workers(allocation: Allocation) -> int:
    """Return the number of workers that an elastic gang can go on without; 0 for a start of this very plan."""
    extra = len(allocation.parts) - allocation.need.min_workers
    return 0 if extra < 0 or allocation.started_in_plan or allocation.all_or_nothing else extra


def whole(allocation: Allocation) -> Victim:
    """Return the victim that is evicted with all its workers."""
    return Victim(allocation, WITHDRAW if allocation.started_in_plan else STOP, allocation.parts)


def ways(allocation: Allocation, nodes: Sequence[NodeState]) -> Ways:
    """Return the ways in which a candidate makes room on these nodes: some of its extra workers, or all workers.

    Called where `combinations_of` is small: no way is tried that leaves too few workers.
    """
    result: Ways = [(whole(allocation),)]
    if not extra_workers(allocation):
        return result
    shrinks: list[tuple[int, tuple[WorkerPlacement, ...]]] = [(_spare_workers(allocation), ())]
    if shrinks[0][0] < 0:
        return result
    for node in nodes:
        parts = _last_first([part for part in allocation.parts if part.node is node])
        lost = _usable_among_first(allocation, parts)
        shrinks = [
            (extra - lost[count], (*gone, *parts[:count]))
            for extra, gone in shrinks
            for count in range(bisect_right(lost, extra))
        ]
    return [*result, *((Victim(allocation, SHRINK, gone),) for _, gone in shrinks if gone)]


def _last_first(parts: Iterable[WorkerPlacement]) -> list[WorkerPlacement]:
    return sorted(parts, key=lambda part: -part.worker)


def _spare_workers(allocation: Allocation) -> int:
    """Return how many of the workers that may stay a gang can give up; negative if too few may stay."""
    return sum(stays(allocation, part) for part in allocation.parts) - allocation.need.min_workers


def _usable_among_first(allocation: Allocation, parts: Iterable[WorkerPlacement]) -> list[int]:
    """Return, for each number of these parts, how many of the first ones could have stayed: from 0 for none of them."""
    return list(accumulate((stays(allocation, part) for part in parts), initial=0))


def combinations_of(candidates: Iterable[Allocation], node: NodeState | None) -> int:
    """Count the combinations of the ways of all candidates, on a node's host or (None) wherever they run.

    The count is exact up to MAX_SETS; beyond, it is any larger number.
    """
    count = 1
    for allocation in candidates:
        count *= _many_ways(allocation, node)
        if count > MAX_SETS:
            break
    return count


def _many_ways(allocation: Allocation, node: NodeState | None) -> int:
    """Count `ways`, and that the candidate stays; no way is listed."""
    if not extra_workers(allocation):
        return 2
    spare = _spare_workers(allocation)
    if spare < 0:
        return 2
    by_node: dict[int, list[WorkerPlacement]] = {}
    for part in allocation.parts:
        if node is None or part.node is node or part.node in node.host_peers:
            by_node.setdefault(part.node.position, []).append(part)
    many = [1]
    """Number of usable workers given up so far, to the number of ways to do so."""
    for parts in by_node.values():
        lost = _usable_among_first(allocation, _last_first(parts))
        longer = [0] * min(spare + 1, len(many) + lost[-1])
        for before, known in enumerate(many):
            for more in lost[: bisect_right(lost, spare - before)]:
                longer[before + more] += known
        many = longer
        if sum(many) >= MAX_SETS:
            break
    return 1 + sum(many)


# The order of sets


def key(preemptor: Preemptor, victims: Victims) -> Key:
    """Return what a set costs (rule 5.4 b to e): smaller is better."""
    if len(victims) == 1 and victims[0].kind == STOP and victims[0].loses:
        order = (STOP, *preemptor.order(victims[0].allocation))
        return True, victims[0].allocation.milli_gpus, 0, [order[:4]], 1, [order], []
    orders = sorted([(v.kind, *preemptor.order(v.allocation)) for v in victims], reverse=True)
    given = sorted([(v.allocation.workload.id, p.worker) for v in victims if v.kind == SHRINK for p in v.gone])
    idle = [v for v in victims if not v.loses]
    return (
        *(cost(victims) if idle else _cost_of(victims)),
        sum([v.milli_gpus for v in idle]),
        [order[:4] for order in orders],
        len(victims),
        orders,
        [(name, -worker) for name, worker in reversed(given)],
    )


def cost(victims: Victims) -> tuple[bool, int]:
    """Return the first two parts of the key: whether running work stops, and the milli-GPUs that it gives up."""
    return _cost_of([v for v in victims if v.loses])


def _cost_of(losing: Sequence[Victim]) -> tuple[bool, int]:
    return STOP in [v.kind for v in losing], sum([v.milli_gpus for v in losing])


def protection(preemptor: Preemptor, victim: Victim) -> tuple[object, ...]:
    """Return the sort key of protection, kinds first."""
    return victim.kind, *preemptor.order(victim.allocation)


# Legal sets


class _Item(NamedTuple):
    """A unit of a team's usage: a job, an extra worker, or the least workers of a gang."""

    evicted: bool
    """Starts that are withdrawn go first: what only they put above its reservation is no candidate."""
    always: bool
    """What can be evicted whatever its team uses goes last: what it puts above its reservation is a candidate."""
    amount: int
    order: tuple[object, ...]
    block: bool
    victim: Victim


def in_legal_order(preemptor: Preemptor, victims: Victims) -> Victims | None:
    """Return a set in an order in which each member may be evicted, smallest first if that is one; None if none is."""
    if len(victims) == 1 and not extra_workers(victims[0].allocation):
        return victims if preemptor.may_evict_now(victims[0].allocation) else None
    items = sorted(item for victim in victims for item in items_of(preemptor, victim))
    held_by = [(of.workload.team, preemptor.nearest(of)) for of in [item.victim.allocation for item in items]]
    last = {held_by[at]: at for at, item in enumerate(items) if not item.always}
    deciding = set(last.values())
    before = dict(preemptor.gone), dict(preemptor.gone_on)
    illegal: _Item | None = None
    for at, item in enumerate(items):  # the more is gone, the less is legal: the last of each team in a pool decides
        if at in deciding and not preemptor.may_evict_now(item.victim.allocation):
            illegal = item
            break
        preemptor.choose(item.victim.allocation, item.amount)
    preemptor.choose_again(before)
    if illegal is None:
        return _by_last(items)
    return None if _count_alike(preemptor, items, illegal) else _by_last(_from_the_end(preemptor, items)) or None


def _count_alike(preemptor: Preemptor, items: Iterable[_Item], illegal: _Item) -> bool:
    """Whether all units of a unit's team, and of teams with a department in common, count on the same lines.

    Then no other order of them is legal, either.
    """
    account = preemptor.cluster.account
    levels = set(account(illegal.victim.allocation.workload).chain)
    allocations = {item.victim.allocation.workload.id: item.victim.allocation for item in items}.values()
    related = [of for of in allocations if not levels.isdisjoint(account(of.workload).chain)]
    return len({of.pool.pool.name for of in related}) == 1 and not any(of.shares for of in related)


class _Kind(NamedTuple):
    """What decides when a unit may be evicted: units of one kind are equal in it."""

    account: Account
    pool: str
    shares: tuple[tuple[PoolState, int], ...]
    amount: int
    evicted: bool
    always: bool

    @classmethod
    def of(cls, preemptor: Preemptor, item: _Item) -> _Kind:
        """Return the kind of a unit."""
        allocation = item.victim.allocation
        account, pool = preemptor.cluster.account(allocation.workload), allocation.pool.pool.name
        return cls(account, pool, allocation.shares, item.amount, item.evicted, item.always)


def _from_the_end(preemptor: Preemptor, items: Sequence[_Item]) -> list[_Item]:
    """Return units that count on different lines in a legal order, found from the last one on; empty if there is none.

    Evicting less before more never takes a right away: what can go last need not go before.
    """
    before = preemptor.gone, preemptor.gone_on
    preemptor.choose_again((dict(before[0]), dict(before[1])))
    kinds = [_Kind.of(preemptor, item) for item in items]
    blocks = {id(item.victim) for item in items if item.block}
    rest, waiting = dict[_Kind, list[int]](), dict[int, list[int]]()
    """Kind to the numbers of its units that may go last; a gang that stops to those that go after its block."""
    for at, item in enumerate(items):
        preemptor.choose(item.victim.allocation, item.amount)
        if id(item.victim) in blocks and not item.block:
            waiting.setdefault(id(item.victim), []).append(at)
        else:
            rest.setdefault(kinds[at], []).append(at)
    evicted, illegal, ordered = sum(item.evicted for item in items), set[_Kind](), list[_Item]()
    while rest:
        able = [kind for kind in rest if kind not in illegal and (kind.evicted or not evicted)]
        for kind in sorted(able, key=lambda kind: -rest[kind][-1]):
            item = items[rest[kind][-1]]
            preemptor.choose(item.victim.allocation, -item.amount)
            if preemptor.may_evict_now(item.victim.allocation):
                break
            preemptor.choose(item.victim.allocation, item.amount)
            illegal.add(kind)
        else:
            break
        ordered.append(item)
        evicted -= item.evicted
        illegal = {other for other in illegal if set(other.account.chain).isdisjoint(kind.account.chain)}
        rest[kind].pop()
        if not rest[kind]:
            del rest[kind]
        for at in waiting.pop(id(item.victim), ()):
            insort(rest.setdefault(kinds[at], []), at)
    preemptor.choose_again(before)
    return [] if rest else ordered[::-1]


def in_order_of_items(preemptor: Preemptor, victims: Victims) -> Victims:
    """Return a legal set in the order in which its members are evicted."""
    return _by_last(sorted(item for victim in victims for item in items_of(preemptor, victim)))


def _by_last(items: Sequence[_Item]) -> Victims:
    last: dict[str, Victim] = {}
    for item in items:
        last.pop(item.victim.allocation.workload.id, None)
        last[item.victim.allocation.workload.id] = item.victim
    return tuple(last.values())


def items_of(preemptor: Preemptor, victim: Victim) -> Iterator[_Item]:
    """Return the units of a victim, smallest first."""
    allocation, order = victim.allocation, preemptor.order(victim.allocation)
    always = not allocation.milli_gpus if preemptor.rights in ONLY_ABOVE else preemptor.always_has_right(allocation)
    per_worker = allocation.need.gpus
    if victim.kind == SHRINK:
        more = len(victim.gone) - 1  # those that cannot stay leave with the first
        yield _Item(True, always, victim.milli_gpus - per_worker * more, order, False, victim)
        for _ in range(more):
            yield _Item(True, always, per_worker, order, False, victim)
        return
    extra = extra_workers(allocation)
    for _ in range(extra):
        yield _Item(victim.kind != WITHDRAW, always, per_worker, order, False, victim)
    yield _Item(victim.kind != WITHDRAW, always, allocation.milli_gpus - per_worker * extra, order, True, victim)


# Minimal sets


def minimal_sets(units: Sequence[Ways], fits: Fits, prune: Fits = lambda _: False) -> Iterator[Victims]:
    """List the sets that make room and would not without any one of their members or given-up workers.

    `prune`: whether a set, and every set that contains it, is skipped.
    """
    largest = [max(unit, key=lambda way: sum(len(v.gone) for v in way)) for unit in units]
    rest = [tuple(v for way in largest[at:] for v in way) for at in range(len(units) + 1)]

    def extend(at: int, chosen: Victims) -> Iterator[Victims]:
        if chosen and fits(chosen):
            if not any(fits(fewer) for fewer in one_less(chosen)):
                yield chosen
        elif at < len(units) and not prune(chosen) and fits((*chosen, *rest[at])):
            for way in units[at]:
                yield from extend(at + 1, (*chosen, *way))
            yield from extend(at + 1, chosen)

    return extend(0, ())


def all_minimal_sets(units: Sequence[Ways], fits: Fits) -> Iterator[Victims]:
    """List the minimal sets where a larger set may make less room than a smaller one (`Preemptor.may_tighten`)."""
    for combination in product(*(((), *unit) for unit in units)):
        victims = tuple(victim for way in combination for victim in way)
        if victims and fits(victims) and not any(fits(fewer) for fewer in one_less(victims)):
            yield victims


def one_less(victims: Victims) -> Iterator[Victims]:
    """Iterate over the sets with one member less, or with one worker less of a gang that shrinks."""
    for at, victim in enumerate(victims):
        others = (*victims[:at], *victims[at + 1 :])
        if victim.kind != SHRINK or len(victim.gone) == 1:
            yield others
            continue
        for part in victim.gone:
            kept = victim._replace(gone=tuple(other for other in victim.gone if other is not part))
            yield (*victims[:at], kept, *victims[at + 1 :])
