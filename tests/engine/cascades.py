"""Check I11: without other events, no evicted workload evicts another one where that is avoidable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import combinations

from engine.engines import Engine
from engine.facts import Facts, State, amount, future
from engine.properties import MOST_CANDIDATES, is_legal, is_protected
from makeway_quota.engine import Plan, Workload
from worlds import World

ROUNDS = 40


def come_to_rest(world: World, engine: Engine) -> int:
    """Plan, apply and release until nothing changes; check I11 and return the number of cascades."""
    world.engine = engine
    evicted: dict[str, tuple[World, Plan, str]] = {}
    cascades = 0
    for _ in range(ROUNDS):
        before, plan = _copy(world), world.plan()
        for each in plan.evict:
            if each.preemptor in evicted:
                cascades += 1
                then, earlier, preemptor = evicted[each.preemptor]
                avoidable(then, earlier, preemptor, each.preemptor, engine)
        evicted |= {each.id: (before, plan, each.preemptor) for each in plan.evict}
        world.apply(plan)
        world.now += 1
        if not plan.acts and not world.named("checkpointing"):
            return cascades
        world.release()
    raise AssertionError("the world does not come to rest")


def avoidable(world: World, plan: Plan, preemptor: str, victim: str, engine: Engine) -> None:
    """Fail if there was a minimal legal set for the only preemptor of a plan without a member that would return."""
    mine = [each for each in (*plan.evict, *plan.move) if each.preemptor == preemptor]
    if len(mine) < len(plan.evict) + len(plan.move) or plan.start or any(e.rule != "reclaim" for e in mine):
        return  # another decision, or another right, may have been in the way of it
    facts = Facts(world.snapshot())
    gone = [facts.live[each.id] for each in plan.evict]
    if not returns(world, preemptor, gone, facts.live[victim], engine):
        return  # alone it would start without an eviction
    for group in minimal_legal_sets(facts, facts.live[preemptor]):
        back = [w.id for w in group if returns(world, preemptor, group, w, engine)]
        assert back, f"I11: {[w.id for w in group]} would have led to no cascade, after {plan}"


def returns(world: World, preemptor: str, group: Sequence[Workload], victim: Workload, engine: Engine) -> bool:
    """Whether a victim, as the only pending workload once the preemptor has started, evicts another one."""
    other = _copy(world)
    waiting = [w.id for w in world.workloads.values() if w.state == "pending" and w.id != preemptor]
    other.end(*waiting, *(w.id for w in group if w.id != victim.id), state="cancelled")
    other.change(victim.id, state="checkpointing", evicted_for=preemptor, deadline=other.now)
    for _ in range(ROUNDS):
        other.release()
        plan = engine(other.snapshot())
        if any(each.preemptor == victim.id for each in plan.evict):
            return True
        if not plan.acts:
            return False
        other.apply(plan)
        other.now += 1
    return True


def minimal_legal_sets(facts: Facts, asking: Workload) -> Iterator[list[Workload]]:
    """Iterate over the sets of whole workloads that make room for one by rule 5.1, and no smaller set does."""
    pool = facts.pools_of(asking)[0]
    now = future(facts.snapshot, Plan())
    able = [
        (w, place)
        for w, place in now.held.values()
        if w.state in ("starting", "running")
        and not w.non_preemptible
        and facts.pool(place) == pool
        and amount(facts, w, place)
        and len(place) == facts.least(w)
        and not (asking.kind == "job" and is_protected(facts, w))
    ]
    every = [place for w, place in now.held.values() if not w.non_preemptible and facts.pool(place) == pool]
    if len(every) > MOST_CANDIDATES:
        return  # beyond the number of sets that the engines examine
    found: list[set[str]] = []
    for size in range(1, len(able) + 1):
        for group in combinations(able, size):
            names = {w.id for w, _ in group}
            left = State(facts, {n: each for n, each in now.held.items() if n not in names})
            room = facts.workers(left.rooms(), asking, pool) >= facts.least(asking)
            if any(smaller <= names for smaller in found) or not room:
                continue
            if left.admits(asking, pool, facts.request(asking)):
                found.append(names)
                if is_legal(facts, now, asking, pool, group):
                    yield [w for w, _ in group]


def _copy(world: World) -> World:
    other = copy(world)
    other.nodes, other.workloads, other.plans = dict(world.nodes), dict(world.workloads), []
    return other
