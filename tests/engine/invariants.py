"""The invariants I1 to I10, checked from the outside: with sums of their own, not with the engine's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from makeway_quota.engine import GPU, Plan, Profile, QuotaLine, Snapshot, Workload, schedule
from makeway_quota.engine.state import ADMITTED, LIVE, Placement
from worlds import World

HOLDS = {"held", "paused", "queue_closed"}


class Sums:
    """Who holds what in a snapshot, counted the plain way."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.nodes = {n.name: n for n in snapshot.nodes}
        self.profiles = {p.name: p for p in snapshot.profiles}
        self.policies = {p.name: p for p in snapshot.policies}
        self.live = {w.id: w for w in snapshot.workloads if w.state in LIVE}

    def gpus(self, w: Workload) -> int:
        return w.gpus if w.gpus is not None else self.profiles[w.profile].gpus

    def workers(self, w: Workload) -> int:
        profile = self.profiles[w.profile]
        return profile.min_workers or profile.workers

    def request(self, w: Workload) -> int:
        return self.gpus(w) * self.workers(w)

    def held(self, w: Workload) -> int:
        return held(w.placement)

    def pool(self, placement: Placement) -> str:
        return self.nodes[placement[0].node].pool

    def usage(self, policy: str, line: QuotaLine, firm: bool = False, leaving: bool = True) -> int:
        return sum(
            self.held(w)
            for w in self.live.values()
            if w.state in ADMITTED
            and w.placement
            and policy in self.family(w.policy)
            and line.covers(self.pool(w.placement))
            and (w.firm or not firm)
            and (leaving or w.state != "checkpointing" or w.claim)
        )

    def family(self, policy: str) -> list[str]:
        found: list[str] = []
        at: str | None = policy
        while at is not None and at in self.policies and at not in found:
            found.append(at)
            at = self.policies[at].parent
        return found or [policy]

    def left(self, gone: Iterable[str] = ()) -> dict[str, list[int]]:
        """Give what is free per node and device, had those in `gone` left."""
        gone = set(gone)
        free = {n.name: [GPU] * n.gpus for n in self.nodes.values()}
        for w in self.live.values():
            if w.state in ADMITTED and w.id not in gone:
                for placed in w.placement:
                    for device in placed.devices:
                        free[placed.node][device] -= placed.milli
        return free


def held(placement: Placement) -> int:
    return sum(p.milli * len(p.devices) for p in placement)


def take(free: dict[str, list[int]], placement: Placement) -> None:
    for placed in placement:
        for device in placed.devices:
            free[placed.node][device] -= placed.milli


def fits(profile: Profile, sums: Sums, free: dict[str, list[int]], pool: str) -> bool:
    """Say whether the least number of workers fits on usable nodes of a pool (GPUs only)."""
    count = 0
    for name, devices in free.items():
        node = sums.nodes[name]
        if node.pool != pool or not node.ready or node.cordoned:
            continue
        if profile.gpus >= GPU:
            count += devices.count(GPU) // (profile.gpus // GPU)
        else:
            count += sum(each // profile.gpus for each in devices if each > 0)
    return count >= (profile.min_workers or profile.workers)


def check(world: World, shuffle: Random) -> Plan:
    """Plan, check everything that must hold of the plan, carry it out, and plan again."""
    before = world.snapshot()
    plan = schedule(before)
    sums = Sums(before)
    everybody_has_a_place(sums, plan)
    every_wait_has_a_reason(plan)
    victims_are_legal(sums, plan)
    nobody_leaves_for_nothing(sums, plan)
    same_in_any_order(before, plan, shuffle)
    world.apply(plan)
    world.now = before.now
    after = Sums(world.snapshot())
    nothing_is_given_twice(sums, after, plan)
    nothing_idles_that_is_allowed(after, plan)
    again = world.plan()
    assert not again.acts, f"I7: planning again acts: {again}\nafter {plan}"
    return plan


def everybody_has_a_place(sums: Sums, plan: Plan) -> None:
    places = [
        *(s.id for s in plan.start),
        *(e.id for e in plan.evict),
        *(m.id for m in plan.move),
        *(p.id for p in plan.pending),
        *(r.id for r in plan.refused),
        *plan.keep,
        *plan.leaving,
    ]
    assert sorted(places) == sorted(sums.live), "I10"


def every_wait_has_a_reason(plan: Plan) -> None:
    for waiting in plan.pending:
        assert waiting.code, "I9"
        assert waiting.message.endswith((".", "!")), f"I9: {waiting.message}"
        assert not re.search(r"\b1 GPUs", waiting.message), f"I9: {waiting.message}"
        assert waiting.code != "reclaiming" or waiting.not_before is not None, "I9"


def victims_are_legal(sums: Sums, plan: Plan) -> None:
    gone: set[str] = set()
    started = {s.id: s for s in plan.start}
    for evict in plan.evict:
        victim, seeker = sums.live[evict.id], sums.live[evict.beneficiary]
        assert not victim.firm, "I2"
        assert victim.state in ("starting", "running"), "I2"
        assert evict.id not in started, "I7"
        if evict.rule == "reclaim":
            pool = sums.pool(victim.placement)
            assert above(sums, plan, victim, seeker, pool, gone), f"I3: {evict}"
        elif evict.rule == "preempt_in_team":
            assert victim.policy == seeker.policy, "I3"
            assert victim.priority < seeker.priority, "I3"
        elif evict.rule == "reclaim_fair_share":
            assert victim.policy != seeker.policy, "I3"
        else:
            assert set(sums.family(seeker.policy)) & set(sums.family(victim.policy)), "I3"
        gone.add(evict.id)
    for move in plan.move:
        assert not sums.live[move.id].firm, "I2"


def above(sums: Sums, plan: Plan, victim: Workload, seeker: Workload, pool: str, gone: set[str]) -> bool:
    """Say whether the victim's policy may have been above its reservation: at most what this plan gave it."""
    shared = set(sums.family(seeker.policy)[1:])
    for name in sums.family(victim.policy):
        if name in shared:
            break
        if name not in sums.policies:
            continue
        lines = [ln for ln in sums.policies[name].quotas if ln.reserved and ln.covers(pool)]
        if not lines:
            continue
        extra = sum(held(s.placement) for s in plan.start if name in sums.family(sums.live[s.id].policy))
        promised = {w.id: held(w.claim) for w in sums.live.values() if w.state == "pending"}
        promised |= {w.id: max(held(w.claim), promised[w.id]) for w in plan.pending}
        promised.pop(seeker.id)
        claimed = sum(milli for i, milli in promised.items() if name in sums.family(sums.live[i].policy))
        own = sums.request(seeker) if name in sums.family(seeker.policy) else 0
        left = [sums.live[i] for i in gone if name in sums.family(sums.live[i].policy)]
        out = [sum(sums.held(w) for w in left if ln.covers(sums.pool(w.placement))) for ln in lines]
        used = [sums.usage(name, ln, leaving=False) - gone for ln, gone in zip(lines, out, strict=True)]
        if not any(now + extra + claimed + own > ln.reserved for ln, now in zip(lines, used, strict=True)):
            return False
    return True


def nobody_leaves_for_nothing(sums: Sums, plan: Plan) -> None:
    claims = {w.id: w.claim for w in plan.pending if w.claim}
    for each in (*plan.evict, *plan.move):
        assert each.beneficiary in claims or each.beneficiary in {s.id for s in plan.start}, f"I4: {each}"
    done: set[str] = {w.id for w in sums.live.values() if w.state == "checkpointing"}
    done |= {m.id for m in plan.move}
    for beneficiary in dict.fromkeys(e.beneficiary for e in plan.evict):
        own = {e.id for e in plan.evict if e.beneficiary == beneficiary}
        done |= own
        if beneficiary not in claims:
            continue
        if any(e.rule == "reclaim_own_limit" for e in plan.evict if e.id in own):
            continue
        seeker = sums.live[beneficiary]
        pool = sums.pool(claims[beneficiary])
        if sums.snapshot.pools and any(p.name == pool and p.capacity is not None for p in sums.snapshot.pools):
            continue
        if any(ln.limit is not None or ln.lend is not None for p in sums.policies.values() for ln in p.quotas):
            continue
        for one in own:
            free = sums.left(done - {one})
            for start in plan.start:
                take(free, start.placement)
            for name, claim in claims.items():
                if name != beneficiary:
                    take(free, claim)
            for move in plan.move:
                take(free, move.to)
            assert not fits(sums.profiles[seeker.profile], sums, free, pool), f"I4: {one} need not leave"


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
        least = after.workers(w)
        assert least <= len(start.placement), "I1: gangs are all or nothing"
        for placed in start.placement:
            node = after.nodes[placed.node]
            assert node.ready, "I1"
            assert not node.cordoned, "I1"
            assert len(placed.devices) * placed.milli == after.gpus(w), "I1"
        pool = after.pool(start.placement)
        for name in after.family(w.policy):
            for line in after.policies[name].quotas:
                if line.limit is not None and line.covers(pool):
                    assert after.usage(name, line) <= line.limit, f"I1: limit of {name}"
        for each in after.snapshot.pools:
            if each.name == pool and each.capacity is not None:
                used = sum(
                    after.held(o)
                    for o in after.live.values()
                    if o.state in ADMITTED and o.placement and after.pool(o.placement) == pool
                )
                assert used <= each.capacity, "I1: capacity"


def nothing_idles_that_is_allowed(after: Sums, plan: Plan) -> None:
    """I6, seen after the plan: whoever still waits does not fit into what is free and not promised."""
    free = after.left()
    future = after.left(w.id for w in after.live.values() if w.state == "checkpointing")
    for w in after.live.values():
        if w.claim and w.state in ("pending", "checkpointing"):
            take(future, w.claim)
    effective = {n: [min(a, b) for a, b in zip(free[n], future[n], strict=True)] for n in free}
    for waiting in plan.pending:
        w = after.live.get(waiting.id)
        if w is None or waiting.code in HOLDS or waiting.code == "reclaiming":
            continue
        for pool in after.profiles[w.profile].pools or tuple(p.name for p in after.snapshot.pools):
            if fits(after.profiles[w.profile], after, effective, pool) and may_run(after, w, pool):
                raise AssertionError(f"I6: {waiting} fits in {pool}")


def may_run(after: Sums, w: Workload, pool: str) -> bool:
    """Say whether quotas, limits and caps (but no static quota of others) let it start."""
    request = after.request(w)
    for name in after.family(w.policy):
        for line in after.policies[name].quotas:
            if line.limit is None or not line.covers(pool):
                continue
            claimed = sum(
                held(o.claim)
                for o in after.live.values()
                if o.claim and o.state == "pending" and name in after.family(o.policy)
            )
            if after.usage(name, line) + claimed + request > line.limit:
                return False
    for each in after.snapshot.pools:
        if each.name == pool and each.capacity is not None:
            used = sum(
                max(after.held(o) if o.placement and after.pool(o.placement) == pool else 0, held(o.claim))
                for o in after.live.values()
            )
            if used + request > each.capacity:
                return False
    policy = after.policies[w.policy]
    if policy.weight != "None" and not w.firm:
        return True
    lines = [ln for ln in policy.quotas if ln.covers(pool) and ln.reserved]
    claimed = sum(
        held(o.claim) for o in after.live.values() if o.claim and o.state == "pending" and o.policy == w.policy
    )
    return bool(lines) and all(after.usage(w.policy, ln, w.firm) + claimed + request <= ln.reserved for ln in lines)
