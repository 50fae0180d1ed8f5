"""Check the invariants I1 to I11 of one plan of either engine by brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from math import prod
from random import Random

from engine.engines import Engine
from engine.facts import Facts, State, amount, future
from engine.overtaken import only_for_such_starts
from makeway_quota.engine import GPU, Plan, Snapshot, Workload
from makeway_quota.engine.snapshot import Placement
from worlds import World

HELD = {"held", "static_quota", "nominated", "paused", "queue_closed"}
MOST_CANDIDATES = 8
MOST_COMBINATIONS = 1024


def check(world: World, engine: Engine, shuffle: Random) -> Plan:
    """Plan, check the invariants, apply the plan and plan again."""
    before = world.snapshot()
    plan = engine(before)
    facts = Facts(before)
    every_workload_is_in_one_place(facts, plan)
    every_wait_has_a_code(plan)
    every_start_over_quota_may_borrow(facts, plan)
    victims_are_legal(facts, plan)
    the_order_of_the_input_does_not_matter(before, plan, engine, shuffle)
    after = future(before, plan)
    nothing_is_exceeded(facts, plan, after)
    no_victim_is_needless(facts, plan, after)
    in_quota_waits_only_without_legal_victims(facts, plan, after)
    world.apply(plan)
    world.now = before.now
    nothing_idles(world, plan, after)
    applied = world.snapshot()
    again = plan if applied == before else engine(applied)  # the same snapshot has the same plan (I8)
    assert not again.acts or only_for_such_starts(plan, again), f"I7: planning again acts: {again}\nafter {plan}"
    return plan


def every_workload_is_in_one_place(facts: Facts, plan: Plan) -> None:
    kinds = (plan.start, plan.evict, plan.move, plan.pending, plan.refused)
    places = [each.id for kind in kinds for each in kind]
    assert sorted([*places, *plan.keep, *plan.terminating]) == sorted(facts.live), "I10"


def every_wait_has_a_code(plan: Plan) -> None:
    for waiting in plan.pending:
        assert waiting.code, "I9"
        assert waiting.rule, "I9"
        assert (waiting.code == "reclaiming") == bool(waiting.nomination), f"I9: {waiting}"
        assert waiting.code != "reclaiming" or waiting.not_before is not None, "I9"


def every_start_over_quota_may_borrow(facts: Facts, plan: Plan) -> None:
    for start in plan.start:
        assert start.in_quota or _may_borrow(facts, facts.live[start.id]), f"I1: {start} is over quota"


def victims_are_legal(facts: Facts, plan: Plan) -> None:
    started = {s.id for s in plan.start}
    nominated = {w.id for w in plan.pending if w.nomination}
    for each in (*plan.evict, *plan.move):
        victim = facts.live[each.id]
        assert not victim.non_preemptible, "I2"
        assert victim.state in ("starting", "running"), "I2"
        assert each.id not in started, "I7"
        assert each.preemptor in started | nominated, f"I4: nothing starts for {each}"
    for move in plan.move:
        assert facts.pool(move.to) == facts.pool(move.source), "a job moves within its pool"
        if move.rule == "shrink":
            kept, had = (Counter((p.node, p.devices) for p in place) for place in (move.to, move.source))
            assert kept < had, "a gang goes on with a part of its placement"
            assert len(move.to) >= facts.least(facts.live[move.id]), "a gang keeps its least number of workers"
        else:
            assert len(move.to) == len(move.source), "a job that moves keeps its workers"
    every_victim_was_above_its_reservation(facts, plan)


def every_victim_was_above_its_reservation(facts: Facts, plan: Plan) -> None:
    """Check I3 by the plan alone: without its largest victim a team stays above its reservation."""
    freed = _freed(facts, plan)
    for preemptor in {b for b, _ in freed.values()}:
        mine = {name: milli for name, (b, milli) in freed.items() if b == preemptor}
        asking = facts.live[preemptor]
        for policy in {facts.live[name].policy for name in mine}:
            taken = [milli for name, milli in mine.items() if facts.live[name].policy == policy]
            if policy == asking.policy or not sum(taken):
                continue
            pool = facts.pool(facts.live[next(n for n in mine if facts.live[n].policy == policy)].placement)
            lines = [ln for ln in facts.policies[policy].quotas if ln.reserved and ln.covers(pool)]
            most = [_most_used(facts, plan, policy, line.pools) - sum(taken) + max(taken) for line in lines]
            fine = not lines or any(used > line.reserved for used, line in zip(most, lines, strict=True))
            assert fine, f"I3: {mine} of {policy} for {preemptor}"


def _freed(facts: Facts, plan: Plan) -> dict[str, tuple[str, int]]:
    """Return what each victim gives up, and for which workload; moves give up nothing."""
    found = {e.id: (e.preemptor, amount(facts, facts.live[e.id], facts.live[e.id].placement)) for e in plan.evict}
    for move in plan.move:
        if move.rule == "shrink":
            w = facts.live[move.id]
            found[move.id] = move.preemptor, amount(facts, w, move.source) - amount(facts, w, move.to)
    return found


def _most_used(facts: Facts, plan: Plan, policy: str, pools: Sequence[str]) -> int:
    """Return the most that a team can have used at any moment of the plan."""
    every = {w.id: (w, p) for w in facts.live.values() for p in (w.placement, w.nomination) if p}
    every |= {s.id: (facts.live[s.id], s.placement) for s in plan.start}
    every |= {w.id: (facts.live[w.id], w.nomination) for w in plan.pending if w.nomination}
    return sum(
        amount(facts, w, place)
        for w, place in every.values()
        if policy in {each.name for each in facts.family(w.policy)} and (not pools or facts.pool(place) in pools)
    )


def the_order_of_the_input_does_not_matter(snapshot: Snapshot, plan: Plan, engine: Engine, shuffle: Random) -> None:
    def mixed(values: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(shuffle.sample(values, len(values)))

    names = ("pools", "nodes", "profiles", "policies", "workloads")
    other = replace(snapshot, **{name: mixed(getattr(snapshot, name)) for name in names})
    assert engine(other) == plan, "I8"


def nothing_is_exceeded(facts: Facts, plan: Plan, after: State) -> None:
    """Check I1 now, and once all terminating work is gone."""
    running = {w.id: (w, w.placement) for w in facts.live.values() if w.placement}
    now = State(facts, running | {s.id: (facts.live[s.id], s.placement) for s in plan.start}, now=True)
    new = {s.id: s.placement for s in plan.start} | {w.id: w.nomination for w in plan.pending if w.nomination}
    touched = {placed.node for placement in new.values() for placed in placement}
    for state in (now, after):
        before = state.unplanned().rooms()  # foreign pods may have overbooked a node
        for name, room in state.rooms().items():
            if name in touched:
                assert min(room.devices, default=0) >= 0, f"I1: {name} {room}"
                assert room.cpu >= min(0, before[name].cpu), f"I1: CPU of {name}"
                assert room.memory >= min(0, before[name].memory), f"I1: memory of {name}"
    for name, placement in new.items():
        w, state = facts.live[name], now if name in now.held else after
        assert facts.least(w) <= len(placement) <= facts.profile(w).workers, "I1: gangs are all or nothing"
        pool = facts.pool(placement)
        for placed in placement:
            kept = name not in now.held and not facts.nodes[placed.node].ready  # a nomination, for a moment
            assert facts.usable(placed.node) or kept, "I1"
            assert len(placed.devices) * placed.milli == facts.profile(w).gpus, "I1"
        assert not amount(facts, w, placement) or state.admits(w, pool, 0) or _exceeded_before(facts, w, pool), "I1"


def _exceeded_before(facts: Facts, w: Workload, pool: str) -> bool:
    running = {o.id: (o, o.placement) for o in facts.live.values() if o.placement}
    return not State(facts, running).admits(w, pool, 1)


def no_victim_is_needless(facts: Facts, plan: Plan, after: State) -> None:
    """Check I4: with any single victim still running, some preemptor of the plan has no placement."""
    if facts.static:
        return
    for each in (*plan.evict, *plan.move):
        victim = facts.live[each.id]
        pool = facts.pool(victim.placement)
        ours = [
            facts.live[w.id]
            for w in plan.pending
            if w.nomination and w.nomination != facts.live[w.id].nomination and facts.pool(w.nomination) == pool
        ]
        spared = State(facts, dict(after.held))
        spared.held[victim.id] = victim, victim.placement
        if not _within_caps(facts, spared, victim, pool):
            continue
        for w in ours:
            del spared.held[w.id]
        rooms, before = spared.rooms(), spared.unplanned().rooms()
        mine = [(rooms[placed.node], before[placed.node]) for placed in victim.placement]
        if any(
            min(room.devices, default=0) < 0 or room.cpu < min(0, was.cpu) or room.memory < min(0, was.memory)
            for room, was in mine
        ):
            continue  # a start, or a job that moves, uses its devices
        assert not facts.all_fit(rooms, [(w, pool) for w in ours]), f"I4: {each} is needless in {plan}"


def _within_caps(facts: Facts, state: State, victim: Workload, pool: str) -> bool:
    for policy in facts.family(victim.policy):
        for line in policy.quotas:
            if line.limit is not None and line.covers(pool) and state.usage(policy.name, line) > line.limit:
                return False
    capacity = facts.pools[pool].capacity
    return capacity is None or state.in_pool(pool) <= capacity


def in_quota_waits_only_without_legal_victims(facts: Facts, plan: Plan, after: State) -> None:
    """Check I5: no legal set of victims would make room for a pending workload in quota."""
    if facts.static:
        return
    for waiting in plan.pending:
        w = facts.live[waiting.id]
        patient = facts.snapshot.now - w.submitted_at < facts.profile(w).reclaim_after
        if waiting.nomination or patient or not facts.request(w) or not facts.may_start(w):
            continue
        for pool in facts.pools_of(w):
            if in_quota(facts, plan, after, w, pool):
                found = next(_legal_sets(facts, plan, after, w, pool), None)
                assert found is None, f"I5: {[v.id for v in found or ()]} would make room for {waiting}"


def in_quota(facts: Facts, plan: Plan, after: State, w: Workload, pool: str) -> bool:
    """Whether a workload is in quota, what still terminates counted."""
    name = after.guarantor(w.policy, pool)
    if name is None:
        return False
    every = State(facts, after.held | {o.id: (o, o.placement) for o in facts.live.values() if o.placement})
    lines = [line for line in facts.policies[name].quotas if line.reserved and line.covers(pool)]
    return all(every.usage(name, ln, w.non_preemptible) + facts.request(w) <= ln.reserved for ln in lines)


def _legal_sets(facts: Facts, plan: Plan, after: State, w: Workload, pool: str) -> Iterator[tuple[Workload, ...]]:
    able = [
        (o, place)
        for o, place in after.held.values()
        if not o.non_preemptible
        and o.state != "pending"
        and o.state != "checkpointing"
        and o.id not in {m.id for m in plan.move}
        and facts.pool(place) == pool
        and not (w.kind == "job" and is_protected(facts, o))
    ]
    if prod(len(place) - facts.least(o) + 2 for o, place in able) > MOST_COMBINATIONS:
        return  # beyond the number of sets that the engines examine
    able = [each for each in able if amount(facts, *each)][:MOST_CANDIDATES]
    for size in range(len(able) + 1):
        for group in combinations(able, size):
            victims = [o for o, _ in group]
            left = State(facts, {n: each for n, each in after.held.items() if n not in {v.id for v in victims}})
            room = facts.workers(left.rooms(), w, pool) >= facts.least(w)
            if room and left.admits(w, pool, facts.request(w)) and is_legal(facts, after, w, pool, group):
                yield tuple(victims)


def is_protected(facts: Facts, o: Workload) -> bool:
    """Whether a job runs for less than its profile's `min_runtime`."""
    least = facts.profile(o).min_runtime
    return bool(least) and (o.started_at is None or facts.snapshot.now - o.started_at < least)


def is_legal(facts: Facts, after: State, w: Workload, pool: str, group: Sequence[tuple[Workload, Placement]]) -> bool:
    """Whether a set can be evicted in some order by rule 5.1."""
    return any(_legal(facts, after, w, pool, order) for order in permutations(group))


def _legal(facts: Facts, after: State, w: Workload, pool: str, order: Sequence[tuple[Workload, Placement]]) -> bool:
    gone: list[str] = []
    for victim, place in order:
        left = State(facts, {n: each for n, each in after.held.items() if n not in gone})
        if len(place) > facts.least(victim):
            return False  # an elastic gang is divisible, and not covered here
        if not (w.non_preemptible and victim.policy == w.policy) and not above(facts, left, w, pool, victim):
            return False
        gone.append(victim.id)
    return True


def above(facts: Facts, state: State, w: Workload, pool: str, victim: Workload) -> bool:
    """Whether a victim's policy is above its reservation, the request counted (rule 5.1)."""
    mine = [policy.name for policy in facts.family(w.policy)]
    reserves = state.guarantor(w.policy, pool) or w.policy
    for policy in facts.family(victim.policy):
        if policy.name in mine[mine.index(reserves) + 1 :]:
            return True
        lines = [line for line in policy.quotas if line.reserved and line.covers(pool)]
        own = facts.request(w) if policy.name in mine else 0
        if lines and not any(state.usage(policy.name, line) + own > line.reserved for line in lines):
            return False
    return True


def nothing_idles(world: World, plan: Plan, after: State) -> None:
    """Check I6: no workload waits that is admissible and fits into free GPUs without a nomination or hold."""
    facts = after.facts
    placed = {w.id: (w, w.placement) for w in world.workloads.values() if w.id in facts.live and w.placement}
    now = State(facts, placed, now=True)
    for waiting in plan.pending:
        w = facts.live[waiting.id]
        grows = waiting.rule == "scale_up"  # a static quota or a hold may be why it waits for a node
        if waiting.code in HELD or grows or waiting.nomination or not facts.may_start(w):
            continue
        for pool in facts.pools_of(w):
            rooms = _both(now, after)
            fits = facts.workers(rooms, w, pool) >= facts.least(w)
            if fits and now.admits(w, pool, facts.request(w)) and after.admits(w, pool, facts.request(w)):
                assert not _may_run(facts, plan, after, w, pool), f"I6: {waiting} fits in {pool}"


def _both(now: State, after: State) -> dict[str, object]:
    first, then = now.rooms(), after.rooms()
    for name, room in first.items():
        room.devices = [min(pair) for pair in zip(room.devices, then[name].devices, strict=True)]
        room.cpu, room.memory = min(room.cpu, then[name].cpu), min(room.memory, then[name].memory)
    return first  # type: ignore[return-value]


def _may_run(facts: Facts, plan: Plan, after: State, w: Workload, pool: str) -> bool:
    return _may_borrow(facts, w) or in_quota(facts, plan, after, w, pool)


def _may_borrow(facts: Facts, w: Workload) -> bool:
    """Whether a workload may run over quota (rule 3); without GPUs any may."""
    return not facts.request(w) or (facts.policies[w.policy].weight != "None" and not w.non_preemptible)


__all__ = ["GPU", "check"]
