"""Check I11: without other events, no evicted workload evicts another one where that is avoidable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

from engine.engines import Engine
from engine.facts import Facts, future
from engine.legal_sets import legal_sets
from engine.properties import in_quota
from makeway_quota.engine import Plan, Workload
from worlds import World

ROUNDS = 40
OVER_QUOTA = ("preempt_in_team", "reclaim_fair_share")
"""The rules by which work over quota evicts; and by the first one, jobs in quota where no borrower can leave."""


def come_to_rest(world: World, engine: Engine) -> int:
    """Plan, apply and release until nothing changes; check I4 and I11 and return the number of cascades."""
    world.engine = engine
    evicted: dict[str, tuple[World, Plan, str]] = {}
    cascades = 0
    started: set[str] = set()
    for _ in range(ROUNDS):
        before, plan = _copy(world), world.plan()
        started |= {start.id for start in plan.start}
        for eviction in plan.evict:
            if eviction.preemptor in evicted:
                cascades += 1
                then, earlier, preemptor = evicted[eviction.preemptor]
                nominated = {w.id for w in then.workloads.values() if w.nomination}
                undone = {start.id for start in earlier.start} - nominated  # which no plan withdraws (rule 5.8)
                assert eviction.id not in undone, (
                    f"I11: {eviction.id} starts where {eviction.preemptor} returns: {earlier}"
                )
                avoidable(then, earlier, preemptor, eviction.preemptor, engine)
        evicted |= {eviction.id: (before, plan, eviction.preemptor) for eviction in plan.evict}
        world.apply(plan)
        world.now += 1
        if not plan.acts and not world.named("checkpointing"):
            never = {preemptor for _, _, preemptor in evicted.values()} - started
            assert not never, f"I4: {never} never started, though others were evicted for them"
            return cascades
        world.release()
    raise AssertionError("the world does not come to rest")


def avoidable(world: World, plan: Plan, preemptor: str, victim: str, engine: Engine) -> None:
    """Fail if there was a minimal legal set for the only preemptor of a plan without a member that would return."""
    mine = [change for change in (*plan.evict, *plan.move) if change.preemptor == preemptor]
    if len(mine) < len(plan.evict) + len(plan.move) or plan.start or any(e.rule in OVER_QUOTA for e in mine):
        return  # another decision, or a right over quota, may have been in the way of it
    if any(waiting.nomination and waiting.id != preemptor for waiting in plan.pending):
        return  # another workload needed room, too
    facts = Facts(world.snapshot())
    gone = [
        facts.live[change.id] for change in mine if change.rule != "shrink"
    ]  # also victims that found room after all
    if not returns(world, preemptor, gone, facts.live[victim], engine):
        return  # alone it would start without an eviction
    for group in minimal_sets(facts, facts.live[preemptor]):
        if {w.id for w in group} == {item.id for item in mine}:
            continue  # its members were in each other's way
        back = [w.id for w in group if returns(world, preemptor, group, w, engine)]
        assert back, f"I11: {[w.id for w in group]} would have led to no cascade, after {plan}"


def returns(world: World, preemptor: str, group: Sequence[Workload], victim: Workload, engine: Engine) -> bool:
    """Whether a victim, as the only pending workload once the preemptor has started, evicts another one."""
    other = _copy(world)
    waiting = [w.id for w in world.workloads.values() if w.state == "pending" and w.id != preemptor]
    other.end(*waiting, *(w.id for w in group), state="cancelled")
    _rest(other, engine)  # the preemptor starts: its GPUs were nominated, and the victim cannot take them
    other.change(victim.id, state="pending", attempt=victim.attempt + 1, last_checkpoint_at=other.now)
    return any(eviction.preemptor == victim.id for plan in _rest(other, engine) for eviction in plan.evict)


def _rest(world: World, engine: Engine) -> list[Plan]:
    """Plan, apply and release until nothing changes; return the plans."""
    plans = []
    for _ in range(ROUNDS):
        plans.append(engine(world.snapshot()))
        world.apply(plans[-1])
        world.now += 1
        if not plans[-1].acts and not world.named("checkpointing"):
            break
        world.release()
    return plans


def minimal_sets(facts: Facts, asking: Workload) -> Iterator[list[Workload]]:
    """Iterate over the sets of whole workloads that make room for one in a pool where it is in quota"""
    now = future(facts.snapshot, Plan())
    pools = [pool for pool in facts.pools_of(asking) if in_quota(facts, Plan(), now, asking, pool)]
    others = any(any(legal_sets(facts, now, asking, pool, False)) for pool in pools)
    for pool in pools:
        result: list[set[str]] = []
        for group in sorted(legal_sets(facts, now, asking, pool, not others), key=len):
            names = {leaving.victim.id for leaving in group}
            if any(leaving.kept for leaving in group) or any(smaller <= names for smaller in result):
                continue
            result.append(names)
            yield [leaving.victim for leaving in group]


def _copy(world: World) -> World:
    other = copy(world)
    other.nodes, other.workloads, other.plans = dict(world.nodes), dict(world.workloads), []
    return other
