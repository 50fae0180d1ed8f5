"""Generate random worlds in which nodes of two pools are parts of one machine, and share its CPU, memory and pods."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from engine.cpu_worlds import happen_on_cpus
from engine.mixed_worlds import happen_mixed
from engine.pooled_worlds import pooled_world
from worlds import World

FIRSTS = {"p": 3 * 4096, "q": 4096}
"""Pool to the index of the first device of its nodes that are on a host with one of the other pool."""


def hosted_world(random: Random) -> World:
    """Return a contended world in pools `p` and `q`, most of whose nodes are on a host with one of the other pool.

    What does not fit on the hosts together does not run.
    """
    world = pooled_world(random)
    cpu, memory = random.choice([4000, 6000, 9000]), random.choice([0, 0, 6144])
    pods = random.choice([0, 0, 0, 7])
    pairs = zip(*([n for n in world.nodes.values() if n.pool == pool] for pool in "pq"), strict=False)
    for at, pair in enumerate(pairs):
        for node in pair if random.random() < 0.85 else ():
            world.nodes[node.name] = replace(node, host=f"h{at}", cpu=cpu, memory=memory, pods=pods)
    for name, profile in list(world.profiles.items()):
        each = {"cpu": random.choice([0, 500, 1000, 2000]), "memory": random.choice([0, 0, 1024])}
        world.profiles[name] = replace(profile, **each)
    world.profile("light", 0, cpu=1000).profile("heavy", 0, cpu=2500)
    if random.random() < 0.8:
        _run_only_what_fits(world)
    if len(world.workloads) % 3:  # no random number, so that what happens later is the same for both numberings
        for name, node in world.nodes.items():
            number_from(world, name, FIRSTS[node.pool] if node.host else 0)
    return world


def number_from(world: World, name: str, first: int) -> None:
    """Number the devices of a node from an index on, with what runs, ended or is foreign there."""
    node = world.nodes[name]
    by = first - node.first_device

    def moved(devices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(device + by for device in devices)

    world.nodes[name] = replace(
        node,
        first_device=first,
        devices=moved(node.devices),
        foreign_devices=moved(node.foreign_devices),
        terminating=tuple(replace(each, devices=moved(each.devices)) for each in node.terminating),
    )
    for w in list(world.workloads.values()):
        if any(placed.node == name for placed in w.placement):
            places = [replace(p, devices=moved(p.devices)) if p.node == name else p for p in w.placement]
            world.workloads[w.id] = replace(w, placement=tuple(places))


def happen_on_hosts(world: World, random: Random) -> None:
    """Change one thing."""
    (happen_on_cpus if random.random() < 0.4 else happen_mixed)(world, random)


def host_of(world: World, node: str) -> str:
    """Return the host of a node, else its own name."""
    return world.nodes[node].host or node


def exceeded(world: World) -> dict[tuple[str, str], int]:
    """Return what workers request of each machine's CPU, memory and pods, where that is more than there is."""
    used: dict[str, Counter[str]] = {}
    for w in world.workloads.values():
        for placed in w.placement:
            profile = world.profiles[w.profile]
            here = used.setdefault(host_of(world, placed.node), Counter())
            here.update(cpu=profile.cpu, memory=profile.memory, pods=1)
    found = {}
    for node in world.nodes.values():
        for name, mine in used.get(host_of(world, node.name), Counter()).items():
            most = getattr(node, name)
            if most and mine > most - getattr(node, f"foreign_{name}"):
                found[host_of(world, node.name), name] = mine
    return found


def _run_only_what_fits(world: World) -> None:
    running = {name: w for name, w in world.workloads.items() if w.placement}
    for name in running:
        del world.workloads[name]
    for name, w in running.items():
        world.workloads[name] = w
        if exceeded(world):
            del world.workloads[name]
