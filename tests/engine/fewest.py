"""Find by exhaustive search whether the workloads that a plan serves could be served by stopping less.

Every set of running work is tried, and every way to place what the plan serves and moves: nothing of the engines'
search is used. A set is legal if the workloads, served class by class (rule 3), may each evict the part of it that they
need (rules 5.1 and 5.7). None is placed in a later pool than in the plan: pools come before the fewest GPUs (rule 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import prod

from engine.facts import Facts, State, amount, future
from engine.legal_sets import MAX_ORDERS, Leaving, Unit, above, is_protected, legal_sets, options, owns, without
from engine.properties import all_within_caps, in_quota, pools_of_nomination
from makeway_quota.engine import Placed, Plan, Workload
from makeway_quota.engine.snapshot import Placement

MAX_SETS = 20_000
"""With more sets than this a world is not small."""
Asking = list[tuple[Workload, str]]
Cost = tuple[int, int]
"""The milli-GPUs of stopped work, and all that are evicted, with those that elastic gangs give up."""


def cost_of(facts: Facts, plan: Plan) -> Cost:
    """Return what a plan costs."""
    stopped = sum(_held(facts, eviction.id) for eviction in plan.evict)
    moves = [move for move in plan.move if move.rule == "shrink"]
    given = sum(_held(facts, move.id) - amount(facts, facts.live[move.id], move.to) for move in moves)
    return stopped, stopped + given


def _held(facts: Facts, name: str) -> int:
    return amount(facts, facts.live[name], facts.live[name].placement)


def cheaper_sets(facts: Facts, plan: Plan) -> Iterator[tuple[Leaving, ...]]:
    """Iterate over the legal sets that cost less and leave room for all that a plan serves, the cheapest first."""
    result = _Served(facts, plan)
    able = [
        options(facts, o, place)
        for o, place in result.running.held.values()
        if not o.non_preemptible and o.state in ("starting", "running") and amount(facts, o, place)
    ]
    assert prod(len(item) + 1 for item in able) <= MAX_SETS, "not a small world"
    sets = [tuple(leaving for leaving in choice if leaving) for choice in product(*([None, *item] for item in able))]
    cost = cost_of(facts, plan)
    cheaper = sorted((item for item in sets if _is_cheaper(_cost(item), cost)), key=_cost)
    return (group for group in cheaper if result.is_enough(group))


def _is_cheaper(one: Cost, other: Cost) -> bool:
    """Whether fewer GPUs are evicted without stopping more; or nothing is stopped, which comes first (rule 5.5)."""
    return (one[0] <= other[0] and one[1] < other[1]) or one[0] == 0 < other[0]


def _cost(group: Sequence[Leaving]) -> Cost:
    stopped, given = 0, 0
    for leaving in group:
        units = sum(unit.amount for unit in leaving.units)
        stopped, given = (stopped, given + units) if leaving.kept else (stopped + units, given)
    return stopped, stopped + given


class _Served:
    """What a plan serves, and what runs or is nominated already."""

    def __init__(self, facts: Facts, plan: Plan) -> None:
        self.facts, self.plan = facts, plan
        new = {s.id: s.placement for s in plan.start} | {w.id: w.nomination for w in plan.pending if w.nomination}
        self.running = future(facts.snapshot, Plan())
        kept = {name: place for name, place in new.items() if place == facts.live[name].nomination}
        self.running.held |= {name: (facts.live[name], place) for name, place in kept.items()}
        after = future(facts.snapshot, plan)
        served = [facts.live[name] for name in new if name not in kept and name not in self.running.held]
        self.served = {w.id: (w, self._pools(after, w)) for w in served if facts.request(w)}
        self.moved = [facts.live[move.id] for move in plan.move if move.rule != "shrink"]
        item = [(w, pool) for w, _ in self.served.values() for pool in facts.pools_of(w)]
        self.quota = [(w, pool) for w, pool in item if in_quota(facts, plan, self.running, w, pool)]
        self.at_once = {start.id for start in plan.start}
        firm = {w.id for w, _ in self.quota if w.non_preemptible}
        others = {w.id for w, pool in self.quota if any(legal_sets(facts, self.running, w, pool, False))}
        self.own_last = firm - others
        """Firm work in quota that has no victims but jobs of its own team (rule 5.1)."""

    def _pools(self, after: State, w: Workload) -> list[str]:
        """Return the pool of a workload in the plan, and those before it where it may be as well."""
        order, own = self.facts.pools_of(w), self.facts.pool(after.held[w.id][1])
        able = pools_of_nomination(self.facts, self.plan, after, w)
        return [pool for pool in able if order.index(pool) <= order.index(own)]

    def is_enough(self, group: Sequence[Leaving]) -> bool:
        """Whether all are served once these have left, some of the moved jobs moving again; and may evict them."""
        state = without(self.running, group)
        stay = [w for w in self.moved if w.id in state.held]
        for again in product((False, True), repeat=len(stay)):
            moving = [w for w, moves in zip(stay, again, strict=True) if moves]
            places = [*(self.served.values()), *((w, list(self.facts.pools_of(w))) for w in moving)]
            remaining = State(
                self.facts, {n: item for n, item in state.held.items() if n not in {w.id for w in moving}}
            )
            for pools in product(*(able for _, able in places)):
                asking = [(w, pool) for (w, _), pool in zip(places, pools, strict=True)]
                if self._fits(remaining, asking) and self._is_legal(asking, group):
                    return True
        return False

    def _fits(self, left: State, asking: Asking) -> bool:
        capped = not asking or all_within_caps(self.facts, left, *asking[0], asking)
        return capped and self.facts.all_fit(left.rooms(), asking)

    def _is_legal(self, asking: Asking, group: Sequence[Leaving]) -> bool:
        """Whether each leaves for one of these, which are served one after the other, the best class first."""
        mine = [item for item in asking if item[0].id in self.served]
        orders = [
            order for order in permutations(mine) if list(map(self._class, order)) == sorted(map(self._class, mine))
        ]
        for choice in product(range(len(mine)), repeat=len(group)):
            for order in orders:
                parts = [
                    [item for item, at in zip(group, choice, strict=True) if at == turn] for turn in range(len(mine))
                ]
                if self._in_turn(asking[len(mine) :], order, parts):
                    return True
        return not group

    def _class(self, asks: tuple[Workload, str]) -> tuple[int, bool]:
        """Return the class of rule 3, over quota last; in a class, what the plan starts at once was served first."""
        w, _ = asks
        number = 3 if asks not in self.quota else 0 if w.kind == "session" else 1 if w.non_preemptible else 2
        return number, w.id not in self.at_once

    def _in_turn(
        self, moving: Asking, order: Sequence[tuple[Workload, str]], parts: Sequence[Sequence[Leaving]]
    ) -> bool:
        """Whether each of these, in its turn, needs just what it evicts then, and may evict it."""
        gone: list[Leaving] = []
        for turn, (w, pool) in enumerate(order):
            so_far = [*moving, *order[: turn + 1]]
            less = [[*gone, *(item for item in parts[turn] if item is not one)] for one in parts[turn]] or [gone]
            needless = any(self._fits(self._left(moving, item), so_far) for item in less)
            if needless == bool(parts[turn]) or not self._fits(self._left(moving, [*gone, *parts[turn]]), so_far):
                return False
            state = self._left((), gone)
            state.held |= {item.id: (item, self._somewhere(item, where)) for item, where in order[: turn + 1]}
            if not self._may_evict(state, w, pool, parts[turn]):
                return False
            gone += parts[turn]
        return True

    def _left(self, moving: Asking, gone: Sequence[Leaving]) -> State:
        remaining = without(self.running, gone)
        remaining.held = {name: item for name, item in remaining.held.items() if name not in {w.id for w, _ in moving}}
        return remaining

    def _may_evict(self, state: State, w: Workload, pool: str, part: Sequence[Leaving]) -> bool:
        units = sorted((unit for item in part for unit in item.units), key=lambda unit: unit.amount)
        orders = permutations(units) if len(units) <= MAX_ORDERS else [units]
        return any(
            all(self._has_right(state, w, pool, unit, order[:at]) for at, unit in enumerate(order)) for order in orders
        )

    def _has_right(self, state: State, w: Workload, pool: str, unit: Unit, gone: Sequence[Unit]) -> bool:
        if w.kind == "job" and is_protected(self.facts, unit.victim):
            return False
        quota = (w, pool) in self.quota
        if owns(self.facts, w, pool, unit.victim, w.id in self.own_last, quota):
            return True
        return quota and above(self.facts, state, w, pool, unit, gone)

    def _somewhere(self, w: Workload, pool: str) -> Placement:
        node = next(name for name, item in self.facts.nodes.items() if item.pool == pool)
        item = self.facts.profile(w).gpus
        share = min(item, 1000)
        devices = tuple(range(max(1, item // 1000)))
        return tuple(Placed(at, node, devices, share) for at in range(self.facts.least(w)))
