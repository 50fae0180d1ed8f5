"""Generate random worlds in which sessions and jobs without GPUs compete with free GPUs for CPU and memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from engine.histories import random_world
from engine.mixed_worlds import happen_mixed
from worlds import World


def cpu_world(random: Random) -> World:
    """Return a random world whose nodes have little CPU or memory, with profiles without GPUs and fractions."""
    world = random_world(random)
    few = random.random() < 0.3
    for name, node in world.nodes.items():
        cpu, memory, pods = random.choice([4000, 8000]), random.choice([0, 0, 8192]), random.choice([0, 4, 8])
        world.nodes[name] = replace(node, cpu=cpu, memory=memory, pods=pods if few else 0)
    for name, profile in world.profiles.items():
        cpu, memory = random.choice([0, 500, 1000, 2000]), random.choice([0, 1024, 2048])
        world.profiles[name] = replace(profile, cpu=cpu, memory=memory)
    pools = tuple(world.pools)
    for name in ("light", "heavy"):
        cpu, memory = random.choice([500, 1000, 3000]), random.choice([0, 0, 2048])
        workers = random.choice([1, 1, 1, 2])
        minimum = random.choice([None, 1]) if workers > 1 else None
        served = random.choice([(), pools[:1], pools[::-1]])
        world.profile(name, 0, cpu=cpu, memory=memory, workers=workers, min_workers=minimum, pools=served)
    return world


def happen_on_cpus(world: World, random: Random) -> None:
    """Change one thing, every second time by a session or a job that requests no GPUs."""
    if random.random() < 0.5:
        happen_mixed(world, random)
        return
    kind, preemptible = random.choice([("session", None), ("session", None), ("session", True), ("job", False)])
    name, team = random.choice(["light", "heavy"]), random.choice([n for n in world.policies if n != "top"])
    world.submit(f"w{int(world.now)}", team, name, kind=kind, preemptible=preemptible)
