"""Check by brute force that work that never makes way leaves free guaranteed GPUs their CPU and memory (rule 2)."""

from __future__ import annotations

from collections.abc import Iterable

from engine.facts import Facts, Remaining, RemainingByNode, State
from makeway_quota.engine import GPU, Placed, Plan, Profile, Workload
from makeway_quota.engine.snapshot import Placement

RULE = "guaranteed_gpus"


def may_take_only_spare(facts: Facts, w: Workload) -> bool:
    """Whether a workload holds no GPUs and is never a victim."""
    return w.non_preemptible and not facts.profile(w).gpus


def free_guaranteed_gpus_keep_cpu_and_memory(facts: Facts, plan: Plan, now: State, after: State) -> None:
    """Check the starts of a plan that starts and nominates nothing else in their pool, for which the order is known."""
    placed = {s.id: s.placement for s in plan.start} | {w.id: w.nomination for w in plan.pending if w.nomination}
    mine = [facts.live[name] for name in placed if may_take_only_spare(facts, facts.live[name])]
    others = [placement for name, placement in placed.items() if facts.live[name] not in mine]
    others += [facts.live[change.id].placement for change in (*plan.evict, *plan.move)]
    others += [move.to for move in plan.move]
    others += [waiting.awaits for waiting in plan.pending]
    touched = {pool for placement in others for pool in _pools_around(facts, placement)}
    around = {w.id: _pools_around(facts, placed[w.id]) for w in mine}
    for pool in {pool for w in mine if not w.nomination for pool in around[w.id]} - touched:
        here = {name for name, pools in around.items() if pool in pools}
        for state in (now, after):
            usable, before = (sum(useful(facts, state.rooms(gone), pool).values()) for gone in ((), here))
            kept = min(before, guaranteed(facts, now, after, pool))
            assert usable >= kept, f"2: {here} leave {usable} of {kept} in {pool}: {plan}"


def _pools_around(facts: Facts, placement: Placement) -> set[str]:
    """Return the pools of the nodes of a placement, and of the others of their hosts."""
    nodes = [facts.nodes[placed.node] for placed in placement]
    hosts = {node.host for node in nodes if node.host}
    return {n.pool for n in facts.nodes.values() if n.host in hosts} | {n.pool for n in nodes}


def work_waits_for_free_guaranteed_gpus_only_where_it_must(facts: Facts, plan: Plan, now: State, after: State) -> None:
    """Check that no node has room for such work that waits by this rule, beside what free guaranteed GPUs need."""
    for waiting in plan.pending:
        w = facts.live[waiting.id]
        if waiting.rule == RULE:
            assert may_take_only_spare(facts, w)
            assert waiting.code == "held"
            if facts.least(w) == 1:
                for pool in facts.pools_of(w):
                    assert not _has_room(facts, now, after, w, pool), f"I6: {waiting} has room in {pool}"


def _has_room(facts: Facts, now: State, after: State, w: Workload, pool: str) -> bool:
    states = [state.rooms() for state in (now, after)]
    able = [name for name in facts.able(states[0], w, pool) if all(r[name].fits(facts.profile(w)) for r in states)]
    return any(_leaves_enough(facts, now, after, w, name) for name in able)


def _leaves_enough(facts: Facts, now: State, after: State, w: Workload, node: str) -> bool:
    pools = _pools_around(facts, (Placed(0, node),))
    for state, pool in ((state, pool) for state in (now, after) for pool in pools):
        before = sum(useful(facts, state.rooms(), pool).values())
        rooms = state.rooms()
        rooms[node].take(facts.profile(w), ())
        if sum(useful(facts, rooms, pool).values()) < min(before, guaranteed(facts, now, after, pool)):
            return False
    return True


def useful(facts: Facts, rooms: RemainingByNode, pool: str) -> dict[str, int]:
    """Return the free milli-GPUs of each node that the pool's smallest profile could use."""
    up = [name for name in rooms if facts.nodes[name].pool == pool and facts.usable(name)]
    return {name: _useful(rooms[name], _smallest(facts, pool, facts.nodes[name].model)) for name in up}


def _useful(room: Remaining, profile: Profile | None) -> int:
    room = Remaining(list(room.devices), room.cpu, room.memory, room.pods)
    count = 0
    while profile is not None and count < 100 and room.fits(profile):
        best = sorted(
            (remaining, at) for at, remaining in enumerate(room.devices) if remaining >= min(profile.gpus, GPU)
        )
        whole = [at for remaining, at in best if remaining == GPU] if profile.gpus >= GPU else [best[0][1]]
        room.take(profile, whole[: max(1, profile.gpus // GPU)])
        count += 1
    return count * profile.gpus if profile else 0


def _smallest(facts: Facts, pool: str, model: str) -> Profile | None:
    def serves(profile: Profile) -> bool:
        return bool(profile.gpus) and (not profile.pools or pool in profile.pools)

    able: Iterable[Profile] = (p for p in facts.profiles.values() if serves(p) and (not p.models or model in p.models))
    return min(
        able, key=lambda p: (p.gpus * (p.min_workers or p.workers), p.gpus, p.cpu, p.memory, p.name), default=None
    )


def guaranteed(facts: Facts, now: State, after: State, pool: str) -> int:
    """Return the milli-GPUs of a pool that reservations guarantee beyond what is used of them."""
    roots = [name for name, team in facts.policies.items() if team.parent not in facts.policies]
    return sum(_guaranteed(facts, now, after, name, pool) for name in roots)


def _guaranteed(facts: Facts, now: State, after: State, team: str, pool: str) -> int:
    """Return the larger of what a team and what the teams below it may still use of their reservations."""
    lines = [line for line in facts.policies[team].quotas if line.reserved and line.covers(pool)]
    rest = [line.reserved - max(now.usage(team, line), after.usage(team, line)) for line in lines]
    below = [item.name for item in facts.policies.values() if item.parent == team]
    return max(0, min(rest, default=0), sum(_guaranteed(facts, now, after, name, pool) for name in below))
