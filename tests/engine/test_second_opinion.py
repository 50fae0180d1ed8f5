"""Compare the engine's victims with an exhaustive search over all victim sets in small worlds (I4, I5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, permutations
from random import Random

import pytest
from engine.histories import HISTORIES
from engine.sums import Sums
from makeway_quota.engine import GPU, Plan, Workload
from worlds import World

SIZES = (1, 1, 2, 3)


def crowded(random: Random, workers: int = 1) -> World:
    """Return a small full cluster with one pending job or session, `preemptor`."""
    world = World(consolidation=False)
    world.pool("p", nodes=random.randint(2, 3), gpus=random.choice([3, 4]))
    for name in ("a", "b", "c"):
        world.team(name, reserved=random.randint(1, 5))
    for size in (1, 2, 3):
        world.profile(f"g{size}", size)
    world.profile("ask", random.choice([1, 2, 3]) if workers == 1 else random.choice([1, 2]), workers=workers)
    for node in list(world.nodes):
        free = world.nodes[node].gpus
        while free > 0 and random.random() < 0.95:
            size = min(free, random.choice(SIZES))
            free -= size
            kind = "session" if random.random() < 0.15 else "job"
            name = f"w{len(world.workloads):02}"
            world.run(name, random.choice("abc"), f"g{size}", node, kind=kind)
            devices = tuple(range(world.nodes[node].gpus - free - size, world.nodes[node].gpus - free))
            placed = world.workloads[name].placement[0]
            world.change(name, placement=(type(placed)(0, node, devices),))
    return world.submit("preemptor", random.choice("abc"), "ask", kind=random.choice(["job", "session"]))


def in_quota(sums: Sums, preemptor: Workload) -> bool:
    line = sums.policies[preemptor.team].quotas[0]
    return (
        sums.usage(preemptor.team, line, non_preemptible=preemptor.non_preemptible) + sums.request(preemptor)
        <= line.reserved
    )


def fits(sums: Sums, preemptor: Workload, gone: Iterable[str]) -> bool:
    item = sums.gpus(preemptor) // GPU
    free = sums.left(gone).values()
    return sum(devices.count(GPU) // item for devices in free) >= sums.workers(preemptor)


def legal(sums: Sums, preemptor: Workload, group: tuple[Workload, ...], own: bool) -> bool:
    """Whether rule 5.1 allows the preemptor these victims in some order."""
    use = usage(sums, preemptor)
    return any(legal_in_order(sums, preemptor, order, own, use) for order in permutations(group))


def usage(sums: Sums, preemptor: Workload) -> dict[str, int]:
    """Return the usage of every team, the request of the preemptor counted."""
    use = {name: sums.usage(name, team.quotas[0]) for name, team in sums.policies.items()}
    use[preemptor.team] += sums.request(preemptor)
    return use


def legal_in_order(
    sums: Sums, preemptor: Workload, order: tuple[Workload, ...], own: bool, before: dict[str, int]
) -> bool:
    """Whether rule 5.1 allows the preemptor these victims; `own`: non-preemptible work may evict jobs of its team."""
    use = dict(before)
    for victim in order:
        above = use[victim.team] > sums.policies[victim.team].quotas[0].reserved
        if not above and not (own and preemptor.non_preemptible and victim.team == preemptor.team):
            return False
        use[victim.team] -= sums.held(victim)
    return True


def solutions(sums: Sums, preemptor: Workload, own: bool) -> Iterator[tuple[Workload, ...]]:
    able = [w for w in sums.live.values() if w.state == "running" and not w.non_preemptible]
    for size in range(1, min(4, len(able)) + 1):
        for group in combinations(able, size):
            if fits(sums, preemptor, [w.id for w in group]) and legal(sums, preemptor, group, own):
                yield group


def may_return_by_eviction(sums: Sums, preemptor: Workload, group: tuple[Workload, ...]) -> bool:
    """Whether a victim is in quota after the plan while a team is above its reservation (rule 4 avoids such sets)."""
    use = usage(sums, preemptor)
    for victim in group:
        use[victim.team] -= sums.held(victim)
    reserved = {name: team.quotas[0].reserved for name, team in sums.policies.items()}
    if not any(use[name] > reserved[name] for name in use):
        return False
    return any(use[victim.team] + sums.held(victim) <= reserved[victim.team] for victim in group)


def orders(plan: Plan, sums: Sums) -> Iterator[tuple[Workload, ...]]:
    """Iterate over the orders in which a plan may have chosen its victims: it lists those that move apart."""
    evicted = [eviction.id for eviction in plan.evict]
    for order in permutations(change.id for change in (*plan.evict, *plan.move)):
        if [name for name in order if name in evicted] == evicted:
            yield tuple(sums.live[name] for name in order)


def judge(world: World, exact: bool) -> bool:
    """Compare the engine's victims with every possible set; return whether there was a set to compare."""
    sums = Sums(world.snapshot())
    preemptor = sums.live["preemptor"]
    if not in_quota(sums, preemptor) or fits(sums, preemptor, []):
        return False
    plan = world.plan()
    chosen = tuple(sums.live[change.id] for change in (*plan.evict, *plan.move))  # a victim that gets room is moved
    own = False
    result = list(solutions(sums, preemptor, own))
    if not result and preemptor.non_preemptible:
        own = True
        result = list(solutions(sums, preemptor, own))
    if chosen:
        assert any(legal_in_order(sums, preemptor, order, own, usage(sums, preemptor)) for order in orders(plan, sums))
        assert fits(sums, preemptor, [w.id for w in chosen]), "I4"
        for one in chosen:
            assert not fits(sums, preemptor, [w.id for w in chosen if w is not one]), f"I4: {one.id} is needless"
    elif result:
        raise AssertionError(f"I5: {[w.id for w in result[0]]} would have made room")
    if exact and result:
        lasting = [group for group in result if not may_return_by_eviction(sums, preemptor, group)]
        minimum = min(sum(map(sums.held, group)) for group in lasting or result)
        assert sum(map(sums.held, chosen)) <= minimum, "rule 4: the fewest GPUs"
    return bool(result)


@pytest.mark.covers("F09", "F16", "F17", "F20", "F36", "F42")
def test_the_engine_finds_the_fewest_victims_whenever_there_are_any() -> None:
    assert sum(judge(crowded(Random(start)), exact=True) for start in (*range(600), 4798, 60104)) > 100


@pytest.mark.covers("F16", "F17")
def test_the_engine_finds_victims_for_gangs_whenever_there_are_any() -> None:
    assert sum(judge(crowded(Random(start), workers=2), exact=False) for start in (*range(400), 3015, 3593)) > 40


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_the_engine_agrees_with_brute_force_at_length(part: int) -> None:
    for start in range(1000 + part * HISTORIES, 1000 + (part + 1) * HISTORIES):
        judge(crowded(Random(start), workers=1 + start % 2), exact=start % 2 == 0)
