"""Check the invariants I1 to I11 of one plan of either engine by brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from math import prod
from random import Random

from engine.engines import Engine
from engine.facts import Facts, State, amount, future
from engine.guaranteed import (
    free_guaranteed_gpus_keep_cpu_and_memory,
    work_waits_for_free_guaranteed_gpus_only_where_it_must,
)
from engine.legal_sets import MAX_ORDERS, is_shown, legal_sets
from engine.overtaken import only_for_such_starts
from makeway_quota.engine import GPU, Placed, Plan, QuotaLine, Snapshot, Workload
from makeway_quota.engine.snapshot import Placement
from worlds import World

HELD = {"held", "static_quota", "nominated", "paused", "queue_closed"}
MAX_COMBINATIONS = 64
"""So many ways to share preemptors out over their pools are all tried, to spare one victim."""


def check(world: World, engine: Engine, shuffle: Random) -> Plan:
    """Plan, check the invariants, apply the plan and plan again."""
    before = world.snapshot()
    plan = engine(before)
    facts = Facts(before)
    every_workload_is_in_one_place(facts, plan)
    every_wait_has_a_code(plan)
    every_start_over_quota_may_borrow(facts, plan)
    victims_are_legal(facts, plan)
    nothing_makes_way_for_work_with_patience(facts, plan)
    the_order_of_the_input_does_not_matter(before, plan, engine, shuffle)
    after = future(before, plan)
    nothing_is_exceeded(facts, plan, after)
    no_victim_is_needless(facts, plan, after)
    in_quota_waits_only_without_legal_victims(facts, plan, after)
    world.apply(plan)
    world.now = before.now
    now = State(facts, {w.id: (w, w.placement) for w in world.workloads.values() if w.placement}, now=True)
    free_guaranteed_gpus_keep_cpu_and_memory(facts, plan, now, after)
    work_waits_for_free_guaranteed_gpus_only_where_it_must(facts, plan, now, after)
    nothing_idles(world, plan, after)
    no_stopped_victim_has_room(world, plan, after)
    applied = world.snapshot()
    again = plan if applied == before else engine(applied)  # the same snapshot has the same plan (I8)
    if again is not plan and again.acts:
        assert only_for_such_starts(before, plan, again), f"I7: planning again acts: {again}\nafter {plan}"
        second = Facts(applied)
        victims_are_legal(second, again)
        no_victim_is_needless(second, again, future(applied, again))
    return plan


def every_workload_is_in_one_place(facts: Facts, plan: Plan) -> None:
    kinds = (plan.start, plan.evict, plan.move, plan.pending, plan.refused)
    places = [item.id for kind in kinds for item in kind]
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
    for change in (*plan.evict, *plan.move):
        victim = facts.live[change.id]
        assert not victim.non_preemptible, "I2"
        assert victim.state in ("starting", "running"), "I2"
        assert change.id not in started, "I7"
        assert change.preemptor in started | nominated, f"I4: nothing starts for {change}"
    for move in plan.move:
        assert facts.pool(move.to) in facts.pools_of(facts.live[move.id]), "a job moves to a pool of its profile"
        if facts.live[move.id].kind == "session" and move.rule != "shrink":
            assert all(facts.nodes[placed.node].sessions for placed in move.to), "a session moves to where it may run"
        if move.rule == "shrink":
            kept, had = (Counter((p.node, p.devices) for p in place) for place in (move.to, move.source))
            assert kept < had, "a gang goes on with a part of its placement"
            assert len(move.to) >= facts.least(facts.live[move.id]), "a gang keeps its least number of workers"
        else:
            minimum = facts.least(facts.live[move.id])
            assert minimum <= len(move.to) <= len(move.source), "a gang that moves keeps its least number of workers"
    every_victim_was_above_its_reservation(facts, plan)


def nothing_makes_way_for_work_with_patience(facts: Facts, plan: Plan) -> None:
    """Check I5 for work that waits for free GPUs, or for a machine that boots, before others are evicted for it."""
    for change in (*plan.evict, *plan.move):
        assert not is_patient(facts, facts.live[change.preemptor]), f"I5: {change} before its `reclaim_after` is over"


def is_patient(facts: Facts, w: Workload) -> bool:
    """Whether a workload still waits for free GPUs before anything is evicted for it (rule 5.8)."""
    return facts.snapshot.now - w.submitted_at < facts.profile(w).reclaim_delay(w.kind)


def every_victim_was_above_its_reservation(facts: Facts, plan: Plan) -> None:
    """Check I3 by the plan alone: in some order, each victim's team was above a reservation there when it left."""
    freed = _freed(facts, plan)
    for preemptor in {b for b, _ in freed.values()}:
        mine = {name: shares for name, (b, shares) in freed.items() if b == preemptor and any(shares.values())}
        for team in {facts.live[name].team for name in mine} - {facts.live[preemptor].team}:
            theirs = [shares for name, shares in mine.items() if facts.live[name].team == team]
            assert _above_in_some_order(facts, plan, team, theirs), f"I3: {mine} of {team} for {preemptor}"


Shares = dict[str, int]
"""Each pool, and the milli-GPUs that count there."""


def _above_in_some_order(facts: Facts, plan: Plan, team: str, victims: list[Shares]) -> bool:
    lines = {line: _most_used(facts, plan, team, line.pools) for line in facts.policies[team].quotas}
    orders = permutations(victims) if len(victims) <= MAX_ORDERS else [sorted(victims, key=lambda v: sum(v.values()))]

    def above(line: QuotaLine, before: Sequence[Shares]) -> bool:
        return lines[line] - sum(n for v in before for pool, n in v.items() if line.covers(pool)) > line.reserved

    def legal(before: Sequence[Shares], pool: str) -> bool:
        reserving = [line for line in lines if line.reserved and line.covers(pool)]
        return not reserving or any(above(line, before) for line in reserving)

    return any(
        all(any(legal(order[:at], pool) for pool in victim) for at, victim in enumerate(order)) for order in orders
    )


def _freed(facts: Facts, plan: Plan) -> dict[str, tuple[str, Shares]]:
    """Return what each victim gives up, and for which workload; moves give up nothing."""
    held = {name: facts.shares(w, w.placement) for name, w in facts.live.items()}
    result = {e.id: (e.preemptor, held[e.id]) for e in plan.evict}
    for move in plan.move:
        if move.rule == "shrink":
            kept = facts.shares(facts.live[move.id], move.to)
            result[move.id] = move.preemptor, {pool: n - kept.get(pool, 0) for pool, n in held[move.id].items()}
    return result


def _most_used(facts: Facts, plan: Plan, team: str, pools: Sequence[str]) -> int:
    """Return the most that a team can have used at any moment of the plan."""
    places: dict[str, list[Placement]] = {w.id: [w.placement, w.nomination] for w in facts.live.values()}
    for start in plan.start:
        places[start.id].append(start.placement)
    for waiting in plan.pending:
        places[waiting.id].append(waiting.nomination or waiting.awaits)
    for move in plan.move:
        places[move.id].append(move.to)  # it counts there from now on, maybe in another pool
    members = {w.id: w for w in facts.live.values() if team in {level.name for level in facts.family(w.team)}}
    return sum(
        max(_covered(facts.shares(w, place), pools) if place else 0 for place in places[name])
        for name, w in members.items()
    )


def _covered(shares: Shares, pools: Sequence[str]) -> int:
    return sum(n for pool, n in shares.items() if not pools or pool in pools)


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
    new = {s.id: s.placement for s in plan.start}
    new |= {w.id: w.nomination or w.awaits for w in plan.pending if w.nomination or w.awaits}
    touched = {placed.node for placement in new.values() for placed in placement}
    for state in (now, after):
        before = state.unplanned().rooms()  # foreign pods may have overbooked a node
        for name, room in state.rooms().items():
            if name in touched:
                pairs = zip(room.devices, before[name].devices, strict=True)
                assert all(remaining >= min(0, was) for remaining, was in pairs), f"I1: {name} {room}"
                assert room.cpu >= min(0, before[name].cpu), f"I1: CPU of {name}"
                assert room.memory >= min(0, before[name].memory), f"I1: memory of {name}"
                assert room.pods >= min(0, before[name].pods), f"I1: pods of {name}"
    for name, placement in new.items():
        w, state = facts.live[name], now if name in now.held else after
        assert facts.least(w) <= len(placement) <= facts.profile(w).workers, "I1: gangs are all or nothing"
        pool = facts.pool(placement)
        for placed in placement:
            kept = name not in now.held and not facts.nodes[placed.node].ready  # a nomination, for a moment
            assert facts.usable(placed.node) or kept or facts.nodes[placed.node].boots, "I1"
            assert w.kind != "session" or facts.nodes[placed.node].sessions, "I1: sessions run where they may"
            assert len(placed.devices) * placed.milli_per_device == facts.profile(w).gpus, "I1"
        assert not amount(facts, w, placement) or state.admits(w, pool, 0) or _exceeded_before(facts, w, pool), "I1"


def _exceeded_before(facts: Facts, w: Workload, pool: str) -> bool:
    running = {o.id: (o, o.placement) for o in facts.live.values() if o.placement}
    return not State(facts, running).admits(w, pool, 1)


def no_victim_is_needless(facts: Facts, plan: Plan, after: State) -> None:
    """Check I4: with any single victim still running, some preemptor of the plan has no placement in any pool."""
    if facts.static:
        return
    ours = [facts.live[w.id] for w in plan.pending if w.nomination and w.nomination != facts.live[w.id].nomination]
    where = {w.id: pools_of_nomination(facts, plan, after, w) for w in ours}
    for change in (*plan.evict, *plan.move):
        victim = facts.live[change.id]
        pool = facts.pool(victim.placement)
        spared = State(facts, dict(after.held))
        spared.held[victim.id] = victim, victim.placement
        for w in ours:
            del spared.held[w.id]
        rooms, before = spared.rooms(), spared.unplanned().rooms()
        mine = [(rooms[placed.node], before[placed.node]) for placed in victim.placement]
        if any(
            min(room.devices, default=0) < 0
            or room.cpu < min(0, was.cpu)
            or room.memory < min(0, was.memory)
            or room.pods < min(0, was.pods)
            for room, was in mine
        ):
            continue  # a start, or a job that moves, uses its devices
        if prod(len(pools) for pools in where.values()) > MAX_COMBINATIONS:
            continue
        for choice in product(*(where[w.id] for w in ours)):
            asking = list(zip(ours, choice, strict=True))
            if all_within_caps(facts, spared, victim, pool, asking) and not _claimed(facts, plan, spared, asking):
                assert not facts.all_fit(spared.rooms(), asking), f"I4: {change} is needless in {plan}"


def _claimed(facts: Facts, plan: Plan, spared: State, asking: Sequence[tuple[Workload, str]]) -> bool:
    """Whether other work, in quota beside these, could evict one of them that is over quota where it would start."""
    state = State(facts, dict(spared.held))
    node = {facts.nodes[name].pool: name for name in facts.nodes}
    for w, pool in asking:
        state.held[w.id] = w, (Placed(0, node[pool], (0,), facts.request(w)),)
    over = {pool for w, pool in asking if not in_quota(facts, plan, _but(state, w), w, pool)}
    waiting = [facts.live[waiting.id] for waiting in plan.pending if waiting.id not in state.held]
    return any(
        pool in over and in_quota(facts, plan, state, w, pool)
        for w in waiting
        if facts.request(w) and facts.may_start(w)
        for pool in facts.pools_of(w)
    )


def _but(state: State, w: Workload) -> State:
    return State(state.facts, {name: item for name, item in state.held.items() if name != w.id})


def pools_of_nomination(facts: Facts, plan: Plan, after: State, w: Workload) -> list[str]:
    """Return the pools in which a nominated workload could be nominated as well: its own, or where it is in quota."""
    own = facts.pool(after.held[w.id][1])
    with_nodes = {node.pool for node in facts.nodes.values()}
    others = State(facts, {name: item for name, item in after.held.items() if name != w.id})
    quota = [pool for pool in facts.pools_of(w) if in_quota(facts, plan, others, w, pool)]
    able = quota if own in quota else facts.pools_of(w) if _may_borrow(facts, w) else ()
    return [own, *(pool for pool in able if pool != own and pool in with_nodes)]


def all_within_caps(
    facts: Facts, spared: State, victim: Workload, pool: str, asking: Sequence[tuple[Workload, str]]
) -> bool:
    """Whether limits and capacities have room for a victim that stays and all who would start in these pools."""
    node = {facts.nodes[name].pool: name for name in facts.nodes}
    state = State(facts, dict(spared.held))
    for w, where in asking:
        milli = facts.request(w)
        state.held[w.id] = w, (Placed(0, node[where], (0,), milli),)
    return all(_within_caps(facts, state, w, where) for w, where in (*asking, (victim, pool)))


def _within_caps(facts: Facts, state: State, victim: Workload, pool: str) -> bool:
    for team in facts.family(victim.team):
        for line in team.quotas:
            if line.limit is not None and line.covers(pool) and state.usage(team.name, line) > line.limit:
                return False
    capacity = facts.pools[pool].capacity
    return capacity is None or state.in_pool(pool) <= capacity


def in_quota_waits_only_without_legal_victims(facts: Facts, plan: Plan, after: State) -> None:
    """Check I5: no legal set of victims would make room for a pending workload in quota."""
    if facts.static:
        return
    gone = {move.id for move in plan.move if move.rule != "shrink"} | set(plan.terminating)
    fixed = {
        name: (replace(w, state="checkpointing"), place) for name, (w, place) in after.held.items() if name in gone
    }
    candidates = State(facts, after.held | fixed)
    for waiting in plan.pending:
        w = facts.live[waiting.id]
        if waiting.nomination or is_patient(facts, w) or not facts.request(w) or not facts.may_start(w):
            continue
        without = _but(after, w)  # it may wait for nodes that boot only where nothing else helps it
        for pool in facts.pools_of(w):
            if in_quota(facts, plan, without, w, pool):
                result = next(legal_sets(facts, _but(candidates, w), w, pool), None)
                assert result is None, f"I5: {[item.victim.id for item in result or ()]} would make room for {waiting}"


def in_quota(facts: Facts, plan: Plan, after: State, w: Workload, pool: str) -> bool:
    """Whether a workload is in quota, what still terminates counted; what moves counts before and after."""
    before = {o.id: (o, o.placement) for o in facts.live.values() if o.placement}
    every = State(facts, before | after.held, leaves={name: place for name, (_, place) in before.items()})
    return within_reservations(facts, every, w, pool)


def within_reservations(facts: Facts, state: State, w: Workload, pool: str) -> bool:
    """Whether a request stays within what every level reserves, and within what departments reserve beyond lines."""
    asked, below = False, False
    nearest = state.guarantor(w.team, pool)
    for team in facts.family(w.team):
        if not w.non_preemptible and team.name != nearest:
            continue
        lines = [line for line in team.quotas if line.reserved and line.covers(pool)]
        for line in lines:
            asked = True
            if state.usage(team.name, line, w.non_preemptible) + facts.request(w) > line.reserved:
                return False
            promised = 0 if below or not w.non_preemptible else facts.promised(team.name, line)
            rest = max(0, line.reserved - promised)
            if promised and state.usage_beyond(team.name, line, w.non_preemptible) + facts.request(w) > rest:
                return False
        below = below or bool(lines)
    return asked


def nothing_idles(world: World, plan: Plan, after: State) -> None:
    """Check I6: no workload waits that is admissible and fits into free GPUs without a nomination or hold."""
    facts = after.facts
    placed = {w.id: (w, w.placement) for w in world.workloads.values() if w.id in facts.live and w.placement}
    now = State(facts, placed, now=True)
    for waiting in plan.pending:
        w = facts.live[waiting.id]
        kept = facts.static or any(other.code == "held" for other in plan.pending)
        grows = waiting.rule == "scale_up" or (waiting.awaits and kept)  # these may be why it waits for a node
        if waiting.code in HELD or grows or waiting.nomination or not facts.may_start(w):
            continue
        then = _but(after, w)  # without its own nomination to nodes that boot
        for pool in facts.pools_of(w):
            rooms = _both(now, then)
            fits = facts.workers(rooms, w, pool) >= facts.least(w)
            if fits and now.admits(w, pool, facts.request(w)) and then.admits(w, pool, facts.request(w)):
                assert not _may_run(facts, plan, then, w, pool), f"I6: {waiting} fits in {pool}"


def no_stopped_victim_has_room(world: World, plan: Plan, after: State) -> None:
    """Check rule 5.6: a victim that may run over quota and fits into what a plan leaves free is moved, not stopped.

    A gang also beside workers that can stay.
    """
    facts = after.facts
    if facts.static or any(waiting.code == "held" for waiting in plan.pending):
        return
    placed = {w.id: (w, w.placement) for w in world.workloads.values() if w.id in facts.live and w.placement}
    now = State(facts, placed, now=True)
    for eviction in plan.evict:
        w = facts.live[eviction.id]
        for pool in facts.pools_of(w) if facts.request(w) and facts.may_start(w) and _may_borrow(facts, w) else ():
            beside = _with_workers_that_stay(facts, after, w, pool)
            missing = facts.least(w) - len(beside.held[w.id][1] if w.id in beside.held else ())
            fits = facts.workers(_both(now, beside), w, pool) >= missing
            assert not (fits and after.admits(w, pool, facts.request(w))), f"5.6: {w.id} has room in {pool}: {plan}"


def _with_workers_that_stay(facts: Facts, after: State, w: Workload, pool: str) -> State:
    """Return the state with the workers of a gang on devices that nothing else gets, all but one of those it needs."""
    if facts.is_fixed(w, w.placement) or facts.pool(w.placement) != pool:
        return after
    result = after
    for placed in sorted(w.placement, key=lambda each: each.worker):
        kept = result.held[w.id][1] if w.id in result.held else ()
        trial = State(facts, after.held | {w.id: (w, (*kept, placed))})
        if len(kept) < facts.least(w) - 1 and facts.usable(placed.node) and is_shown(facts, w, placed):
            room = trial.rooms()[placed.node]
            devices = facts.devices(w, placed)[0]
            if all(room.devices[at] >= 0 for at in devices) and min(room.cpu, room.memory, room.pods) >= 0:
                result = trial
    return result


def _both(now: State, after: State) -> dict[str, object]:
    first, then = now.rooms(), after.rooms()
    for name, room in first.items():
        room.devices = [min(pair) for pair in zip(room.devices, then[name].devices, strict=True)]
        room.cpu, room.memory = min(room.cpu, then[name].cpu), min(room.memory, then[name].memory)
        room.pods = min(room.pods, then[name].pods)
    return first  # type: ignore[return-value]


def _may_run(facts: Facts, plan: Plan, after: State, w: Workload, pool: str) -> bool:
    return _may_borrow(facts, w) or in_quota(facts, plan, after, w, pool)


def _may_borrow(facts: Facts, w: Workload) -> bool:
    """Whether a workload may run over quota (rule 3); without GPUs any may."""
    return not facts.request(w) or (facts.policies[w.team].weight != "None" and not w.non_preemptible)


__all__ = ["GPU", "check"]
