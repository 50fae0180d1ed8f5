"""Demand for nodes: the linear procedure finds what the reference finds by trying every imagined node."""

from __future__ import annotations

from random import Random

import pytest
from engine.engines import differences
from makeway_quota.engine import Pool, reference, schedule
from worlds import World


def growing(random: Random) -> World:
    """Return a world with pools that may grow, and more pending work than fits."""
    world = World(user_fairness=random.random() < 0.5, starvation_after=random.choice([600, 86_400]))
    world.pool("p", random.randint(0, 2), 4)
    for name in ("grow", "more")[: random.randint(1, 2)]:
        world.pool(name, random.randint(0, 1), 4, cpu=random.choice([0, 16]))
        world.pools[name] = Pool(
            name,
            kind="autoscaled",
            max_nodes=random.randint(0, 12),
            booting=random.randint(0, 2),
            node_gpus=random.choice([2, 4, 8]),
            node_cpu=random.choice([0, 8000]),
        )
    pools = tuple(world.pools)
    for name in "abc":
        reserved = random.randint(0, 12)
        limit = random.choice([None, reserved + random.randint(0, 8)])
        world.team(name, reserved, limit=limit, weight=random.choice(["None", "Low", "Medium", "High"]))
    for at in range(4):
        gang = random.random() < 0.4
        world.profile(
            f"f{at}",
            random.choice([0, 0.5, 1, 2, 3]),
            cpu=random.choice([0, 1000, 3000]),
            pools=random.sample(pools, random.randint(1, len(pools))),
            workers=random.randint(2, 6) if gang else 1,
        )
    for at in range(random.randint(5, 80)):
        kind = random.choice(["job", "job", "job", "session"])
        team, profile = random.choice("abc"), random.choice(list(world.profiles))
        priority = random.choice([-1, 0, 1])
        preemptible = random.choice([None, None, True, False])
        world.submit(
            f"w{at:03}",
            team,
            profile,
            kind=kind,
            owner=random.choice("xyz"),
            priority=priority,
            preemptible=preemptible,
        )
        world.now += random.choice([0, 1, 60])
    return world


@pytest.mark.covers("F33")
def test_the_demand_is_that_of_the_reference() -> None:
    grown = codes = 0
    for seed in range(150):
        world = growing(Random(seed))
        if seed % 2:
            world.step()
        plan, plain = schedule(world.snapshot()), reference.schedule(world.snapshot())
        assert not differences(plan, plain), f"seed {seed}"
        grown += bool(plan.scale)
        codes += any(waiting.code == "over_budget" for waiting in plan.pending)
    assert grown > 30, "most worlds want nodes"
    assert codes > 30, "many reach the budget"


@pytest.mark.covers("F33")
def test_a_gang_that_exceeds_the_budget_leaves_room_for_smaller_work() -> None:
    world = World().pool("cloud", nodes=0, kind="autoscaled", max_nodes=2, node_gpus=4).team("a", 12)
    world.profile("gang", 4, workers=3).profile("one", 1)
    world.jobs("g", "a", "gang").jobs("j k", "a", "one")
    (scale,) = world.plan().scale
    assert (scale.nodes, scale.workloads) == (1, ("j", "k"))
    assert world.reason("g")[0] == "over_budget"
