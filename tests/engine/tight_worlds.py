"""Generate small worlds in which what several workloads get depends on where each of them is placed.

Machines of different sizes, in one or two pools, with little CPU, most of them shared by both pools; gangs, shares of
GPUs, and work on CPUs alone; and several workloads that wait at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from engine.host_worlds import FIRSTS, exceeded
from engine.pooled_worlds import quota_lines
from makeway_quota.engine import GPU, Placed, Profile
from worlds import World

PROFILES = (
    ("half", 0.5, 1),
    ("one", 1, 1),
    ("fat", 1, 1),
    ("two", 2, 1),
    ("pair", 1, 2),
    ("halves", 0.5, 3),
    ("elastic", 1, 3),
    ("light", 0, 1),
)
"""Name, GPUs and workers."""
CPU = {"fat": (2000, 3000, 4000), "light": (500, 1000, 2000)}
"""The milli-cores of a worker; of the others, any of `OTHER_CPU`."""
OTHER_CPU = (0, 500, 1000, 1000, 1500, 2000)
PLACES = (("p",), ("q",), ("p", "q"), ("q", "p"), ("p", "q"))


def tight_world(random: Random) -> World:
    """Return a nearly full world where two to six workloads wait."""
    world = World(
        consolidation=random.random() < 0.3,
        in_team_preemption=random.random() < 0.5,
        fair_share=random.choice(["order", "order", "reclaim"]),
    )
    pools = "pq" if random.random() < 0.6 else "p"
    _machines(world, random, pools)
    for name in "abc":
        world.team(name, weight=random.choice(["Medium", "Medium", "High", "None"]))
        if random.random() < 0.5 or pools == "p":
            world.team(name, random.randint(0, 6), random.choice([None, None, 8]))
        else:
            world.policies[name] = replace(world.policies[name], quotas=quota_lines(random))
    least = random.choice([1, 2])
    for name, gpus, workers in PROFILES:
        where = random.choice(PLACES) if pools == "pq" else ()
        minimum = least if name == "elastic" else None
        cpu = random.choice(CPU.get(name, OTHER_CPU))
        world.profile(name, gpus, workers=workers, min_workers=minimum, pools=where, cpu=cpu)
    _fill(world, random)
    for at in range(random.randint(2, 6)):
        kind, preemptible = random.choice(["job", "job", "session"]), random.choice([None, None, False])
        profile, priority = random.choice(list(world.profiles)), random.choice([0, 0, 1])
        world.submit(f"n{at}", random.choice("abc"), profile, kind=kind, priority=priority, preemptible=preemptible)
    return world


def _machines(world: World, random: Random, pools: str) -> None:
    shared = random.random() < 0.6
    for pool in pools:
        world.pool(pool, random.randint(2, 4), gpus=4)
    for name, node in list(world.nodes.items()):
        world.nodes[name] = replace(node, gpus=random.choice([1, 2, 2, 3, 4]))
        if shared and random.random() < 0.9:
            host = f"h{name.split('-')[-1]}"
            world.nodes[name] = replace(world.nodes[name], host=host, first_device=FIRSTS[node.pool])
    cpus: dict[str, int] = {}
    for name, node in list(world.nodes.items()):
        cpu = cpus.setdefault(node.host or name, random.choice([3000, 4000, 5000, 6000, 8000]))
        world.nodes[name] = replace(node, cpu=cpu)


def _fill(world: World, random: Random) -> None:
    for at in range(16):
        profile, team = random.choice(list(world.profiles.values())), random.choice("aabc")
        places = _places(world, random, profile)
        if len(places) < (profile.min_workers or profile.workers):
            continue
        name, kind = f"w{at:02}", "session" if random.random() < 0.08 else "job"
        world.submit(name, team, profile.name, priority=random.choice([0, 0, 1]), kind=kind)
        world.change(name, state="running", started_at=world.now, placement=places)
        if exceeded(world):
            del world.workloads[name]


def _places(world: World, random: Random, profile: Profile) -> tuple[Placed, ...]:
    """Return places for as many workers as find one, each on any node of one pool."""
    able = [name for name, node in world.nodes.items() if not profile.pools or node.pool in profile.pools]
    pool = world.nodes[random.choice(able)].pool
    able = [name for name in able if world.nodes[name].pool == pool]
    held: Counter[tuple[str, int]] = Counter()
    for placed in [placed for w in world.workloads.values() for placed in w.placement]:
        held.update({(placed.node, device): placed.milli_per_device for device in placed.devices})
    share, many = min(GPU, profile.gpus), -(-profile.gpus // GPU)
    result = []
    for worker in range(random.randint(profile.min_workers or profile.workers, profile.workers)):
        for name in random.sample(able, len(able)):
            node = world.nodes[name]
            shown = range(node.first_device, node.first_device + node.gpus)
            free = [device for device in shown if held[name, device] + share <= GPU]
            if len(free) >= many:
                devices = tuple(random.sample(free, many))
                result.append(Placed(worker, name, devices, share or GPU))
                held.update({(name, device): share for device in devices})
                break
    return tuple(result)
