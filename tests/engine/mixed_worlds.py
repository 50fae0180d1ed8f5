"""Random worlds with everything in them: CPU, memory, models, elastic gangs, jobs without GPUs, foreign pods."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from engine.histories import happen, random_world
from worlds import World

MODELS = ("", "", "a100", "h100")


def mixed_world(random: Random) -> World:
    """Return a random world of `histories.py` with some of what is rarer added."""
    world = random_world(random)
    if random.random() < 0.5:
        _limit_cpu_and_memory(world, random)
    pools = tuple(world.pools)
    if random.random() < 0.3:
        world.profile("none", 0, cpu=random.choice([1000, 3000]), pools=random.choice([(), pools[:1]]))
    if random.random() < 0.5:
        workers = random.randint(2, 4)
        least = random.randint(1, workers)
        gpus = random.choice([0.5, 1, 1, 2])
        world.profile("elastic", gpus, workers=workers, min_workers=least, pools=random.choice([(), pools[::-1]]))
    if random.random() < 0.2:
        _mark_models(world, random)
    if random.random() < 0.15:
        _make_a_pool_grow(world, random)
    for name, profile in list(world.profiles.items()):
        patience = random.choice([0, 0, 0, 0, 0, 30])
        world.profiles[name] = replace(profile, reclaim_after=patience, grace=random.choice([None, None, 5]))
    world.settings = replace(
        world.settings,
        yields_after=random.choice([0, 0, 0, 900]),
        in_team_preemption=random.random() < 0.8,
    )
    return world


def _limit_cpu_and_memory(world: World, random: Random) -> None:
    for name, node in world.nodes.items():
        world.nodes[name] = replace(node, cpu=random.choice([3000, 6000]), memory=random.choice([0, 0, 4096]))
    for name, profile in world.profiles.items():
        cpu, memory = random.choice([0, 500, 1000, 2000]), random.choice([0, 0, 1024])
        world.profiles[name] = replace(profile, cpu=cpu, memory=memory)


def _mark_models(world: World, random: Random) -> None:
    for name, node in world.nodes.items():
        world.nodes[name] = replace(node, model=random.choice(MODELS))
    name = random.choice(list(world.profiles))
    world.profiles[name] = replace(world.profiles[name], models=("a100",))


def _make_a_pool_grow(world: World, random: Random) -> None:
    name = list(world.pools)[-1]
    gpus = max(node.gpus for node in world.nodes.values() if node.pool == name)
    most = random.randint(2, 5)
    world.pools[name] = replace(world.pools[name], kind="autoscaled", max_nodes=most, node_gpus=gpus, booting=1)


def happen_mixed(world: World, random: Random) -> None:
    """Let one thing happen: mostly what `histories.py` knows, at times to a node or a queue."""
    if random.random() < 0.9:
        happen(world, random)
        return
    name = random.choice(list(world.nodes))
    node = world.nodes[name]
    event = random.choice(["cordon", "foreign", "pause"])
    if event == "cordon":
        world.nodes[name] = replace(node, cordoned=not node.cordoned)
    elif event == "foreign" and not any(p.node == name for w in world.workloads.values() for p in w.placement):
        world.nodes[name] = replace(node, foreign_gpus=random.choice([0, 500, 1000]))
    elif event == "pause":
        queue = f"{random.choice(list(world.policies))}/{random.choice(list(world.profiles))}"
        world.paused = () if world.paused else (queue,)
