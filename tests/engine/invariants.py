"""Check the invariants I1 to I10 of a plan with independent sums."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random

from engine.overtaken import only_for_such_starts, starts_evicted_in_turn
from engine.sums import Sums, fits, held, take
from engine.witness import watched
from makeway_quota.engine import GPU, Plan, Snapshot, Workload, schedule
from makeway_quota.engine.snapshot import ADMITTED
from makeway_quota.wording import sentence
from worlds import World

HOLDS = {"held", "static_quota", "nominated", "paused", "queue_closed"}


def check(world: World, shuffle: Random) -> Plan:
    """Plan, check the invariants of the plan, apply it, and plan again."""
    before = world.snapshot()
    with watched(before):
        plan = schedule(before)
    sums = Sums(before)
    everybody_has_a_place(sums, plan)
    every_wait_has_a_reason(plan)
    victims_are_legal(sums, plan)
    same_in_any_order(before, plan, shuffle)
    world.apply(plan)
    world.now = before.now
    after = Sums(world.snapshot())
    nothing_is_given_twice(sums, after, plan)
    nothing_idles_that_is_allowed(after, plan)
    again = plan if world.snapshot() == before else world.plan()  # the same snapshot has the same plan (I8)
    assert not again.acts or only_for_such_starts(before, plan, again), (
        f"I7: planning again acts: {again}\nafter {plan}"
    )
    no_start_is_evicted_a_second_later(world, before, plan)
    return plan


def no_start_is_evicted_a_second_later(world: World, before: Snapshot, plan: Plan) -> None:
    """Check I7 a second later: time alone neither evicts nor moves a workload that was just started."""
    if not plan.start:
        return
    world.now += 1
    again = world.plan()
    world.now -= 1
    gone = {change.id for change in (*again.evict, *again.move)} & {start.id for start in plan.start}
    gone -= starts_evicted_in_turn(before, plan, again)
    assert not gone, f"I7: {gone} started and evicted: {again}\nafter {plan}"


def everybody_has_a_place(sums: Sums, plan: Plan) -> None:
    places = [
        *(s.id for s in plan.start),
        *(e.id for e in plan.evict),
        *(m.id for m in plan.move),
        *(p.id for p in plan.pending),
        *(r.id for r in plan.refused),
        *plan.keep,
        *plan.terminating,
    ]
    assert sorted(places) == sorted(sums.live), "I10"


def every_wait_has_a_reason(plan: Plan) -> None:
    for waiting in plan.pending:
        assert waiting.code, "I9"
        text = sentence(waiting.facts)
        assert text.endswith((".", "!")), f"I9: {text}"
        assert not re.search(r"\b1 GPUs", text), f"I9: {text}"
        assert waiting.code != "reclaiming" or waiting.not_before is not None, "I9"


def victims_are_legal(sums: Sums, plan: Plan) -> None:
    """Check the evictions by the plan alone; witness.py checks them at the moment of the choice."""
    started = {s.id for s in plan.start}
    nominated = {w.id for w in plan.pending if w.nomination}
    for change in (*plan.evict, *plan.move):
        victim = sums.live[change.id]
        assert not victim.non_preemptible, "I2"
        assert victim.state in ("starting", "running"), "I2"
        assert change.id not in started, "I7"
        assert change.preemptor in nominated | started, f"I4: {change}"
    for move in plan.move:
        profile = sums.profiles[sums.live[move.id].profile]
        assert not profile.pools or sums.pool(move.to) in profile.pools, "a job moves to a pool of its profile"
        if move.rule == "shrink":
            old, new = (Counter((p.node, p.devices) for p in place) for place in (move.source, move.to))
            assert new < old, "a gang goes on with a part of its placement"
            assert len(move.to) >= sums.workers(sums.live[move.id]), "a gang goes on with its least number of workers"


def same_in_any_order(snapshot: Snapshot, plan: Plan, shuffle: Random) -> None:
    def mixed(values: tuple[object, ...]) -> tuple[object, ...]:
        listed = list(values)
        shuffle.shuffle(listed)
        return tuple(listed)

    other = replace(
        snapshot,
        **{name: mixed(getattr(snapshot, name)) for name in ("pools", "nodes", "profiles", "policies", "workloads")},
    )
    assert schedule(other) == plan, "I8"


def nothing_is_given_twice(before: Sums, after: Sums, plan: Plan) -> None:
    for node, devices in after.left().items():
        assert all(0 <= milli <= GPU for milli in devices), f"I1: {node} {devices}"
    for start in plan.start:
        w = after.live[start.id]
        minimum = after.workers(w)
        assert minimum <= len(start.placement), "I1: gangs are all or nothing"
        for placed in start.placement:
            node = after.nodes[placed.node]
            assert node.ready, "I1"
            assert not node.cordoned, "I1"
            assert node.sessions or w.kind != "session", "I1"
            assert len(placed.devices) * placed.milli_per_device == after.gpus(w), "I1"
        pool = after.pool(start.placement)
        for name in after.family(w.team):
            for line in after.policies[name].quotas:
                if line.limit is not None and line.covers(pool):
                    assert after.usage(name, line) <= line.limit, f"I1: limit of {name}"
        for item in after.snapshot.pools:
            if item.name == pool and item.capacity is not None:
                used = sum(
                    after.held(o)
                    for o in after.live.values()
                    if o.state in ADMITTED and o.placement and after.pool(o.placement) == pool
                )
                assert used <= item.capacity, "I1: capacity"


def nothing_idles_that_is_allowed(after: Sums, plan: Plan) -> None:
    """Check I6 after the plan: no pending workload fits into what is free and not nominated."""
    free = after.left()
    ending = [w for w in after.live.values() if w.state == "checkpointing" and not after.is_stuck(w)]
    future = after.left(w.id for w in ending)
    for w in after.live.values():
        if w.nomination and (w.state == "pending" or w in ending):
            take(future, w.nomination)
    effective = {n: [min(a, b) for a, b in zip(free[n], future[n], strict=True)] for n in free}
    for waiting in plan.pending:
        w = after.live.get(waiting.id)
        if w is None or waiting.code in HOLDS or waiting.code == "reclaiming":
            continue
        for pool in after.profiles[w.profile].pools or tuple(p.name for p in after.snapshot.pools):
            able = {
                name: remaining
                for name, remaining in effective.items()
                if after.nodes[name].sessions or w.kind != "session"
            }
            if fits(after.profiles[w.profile], after, able, pool) and may_run(after, w, pool):
                raise AssertionError(f"I6: {waiting} fits in {pool}")


def may_run(after: Sums, w: Workload, pool: str) -> bool:
    """Whether quotas, limits and capacity (static quotas of others aside) admit a workload."""
    request = after.request(w)
    for name in after.family(w.team):
        for line in after.policies[name].quotas:
            if line.limit is None or not line.covers(pool):
                continue
            if after.usage(name, line) + after.nominated(name, line) + request > line.limit:
                return False
    for item in after.snapshot.pools:
        if item.name == pool and item.capacity is not None:
            used = sum(
                max(held(place) if place and after.pool(place) == pool else 0 for place in (o.placement, o.nomination))
                for o in after.live.values()
            )
            if used + request > item.capacity:
                return False
    team = after.policies[w.team]
    if team.weight != "None" and not w.non_preemptible:
        return True
    if not any(ln.covers(pool) and ln.reserved for ln in team.quotas):
        return False
    for name in after.family(w.team) if w.non_preemptible else (w.team,):
        for line in after.policies[name].quotas:
            used = after.usage(name, line, w.non_preemptible) + after.nominated(name, line, w.non_preemptible)
            if line.covers(pool) and line.reserved and used + request > line.reserved:
                return False
    return True
