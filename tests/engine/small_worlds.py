"""Generate random worlds that are small enough for an exhaustive search over everything that could leave."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from makeway_quota.engine import Placed
from worlds import World

POOLS = (("p",), ("q",), ("p", "q"), ("q", "p"))


def small_world(random: Random) -> World:
    """Return a nearly full cluster of a few GPUs, in one or two pools, where one to three workloads wait."""
    world = World(consolidation=random.random() < 0.5, in_team_preemption=random.random() < 0.7)
    pools = ("p", "q")[: random.choice([1, 1, 2])]
    for name in pools:
        world.pool(name, nodes=random.randint(1, 2), gpus=random.choice([2, 3, 4]))
    _teams(world, random, pools)
    for gpus in (0.5, 1, 2, 3):
        world.profile(f"g{gpus}", gpus, pools=_places(random, pools))
    world.profile("gang", 1, workers=2, pools=_places(random, pools))
    world.profile("elastic", 1, workers=3, min_workers=random.randint(1, 2), pools=_places(random, pools))
    _fill(world, random)
    for at in range(random.randint(1, 3)):
        kind, preemptible = random.choice(["job", "job", "session"]), random.choice([None, None, False])
        profile, priority = random.choice(list(world.profiles)), random.choice([0, 0, 1])
        world.submit(f"new{at}", random.choice("abc"), profile, kind=kind, priority=priority, preemptible=preemptible)
    return world


def _teams(world: World, random: Random, pools: tuple[str, ...]) -> None:
    for name in ("a", "b", "c"):
        reserved = random.randint(0, 4)
        limit = random.choice([None, None, None, reserved + random.randint(0, 2)])
        covered = random.choice([(), (), pools[:1], pools[-1:]])
        world.team(name, reserved, limit, weight=random.choice(["Medium", "Medium", "High"]), pools=covered)
    if random.random() < 0.2:
        world.team("top", reserved=random.choice([0, 4]), limit=random.choice([None, 8]))
        for name in ("a", "b"):
            world.policies[name] = replace(world.policies[name], parent="top")


def _places(random: Random, pools: tuple[str, ...]) -> tuple[str, ...]:
    return random.choice(POOLS) if len(pools) > 1 else ()


def _fill(world: World, random: Random) -> None:
    """Run workloads where their profiles allow it until nearly all devices are taken."""
    free = {name: [1000] * node.gpus for name, node in world.nodes.items()}
    for _ in range(12):
        profile = random.choice(list(world.profiles.values()))
        pools = profile.pools or tuple(world.pools)
        node = random.choice([name for name, item in world.nodes.items() if item.pool in pools])
        able = [at for at, remaining in enumerate(free[node]) if remaining >= min(profile.gpus, 1000)]
        workers = random.randint(profile.min_workers or profile.workers, profile.workers)
        wanted = max(1, profile.gpus // 1000)
        if len(able) < wanted * workers:
            continue
        placement = []
        for worker in range(workers):
            devices = tuple(able[worker * wanted : (worker + 1) * wanted])
            placement.append(Placed(worker, node, devices, min(profile.gpus, 1000)))
            for at in devices:
                free[node][at] -= min(profile.gpus, 1000)
        _run(world, random, profile.name, tuple(placement))


def _run(world: World, random: Random, profile: str, placement: tuple[Placed, ...]) -> None:
    name, kind = f"w{len(world.workloads):02}", "session" if random.random() < 0.1 else "job"
    world.submit(name, random.choice("aabc"), profile, kind=kind, priority=random.choice([-1, 0, 0, 1]))
    world.change(name, state="running", started_at=world.now, placement=placement)
    world.now += random.choice([0, 1, 7])
