"""Generate random worlds of two pools in which limits, reservations and profiles cover one of them, or both."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from engine.mixed_worlds import contended_world
from makeway_quota.engine import QuotaLine
from worlds import World, milli

PLACES = (("p",), ("q",), ("p", "q"), ("q", "p"))


def pooled_world(random: Random) -> World:
    """Return a contended world in two pools: teams with limits over both, departments, elastic gangs, and both modes.

    Gangs over nodes of both pools are removed.
    """
    world = contended_world(random)
    world.pools["q"] = replace(world.pools["p"], name="q", capacity=random.choice([None, None, 4000]))
    apart = set(list(world.nodes)[len(world.nodes) // 2 :])
    for name in apart:
        world.nodes[name] = replace(world.nodes[name], pool="q")
    both = {w.id for w in world.workloads.values() if len({placed.node in apart for placed in w.placement}) > 1}
    world.workloads = {name: w for name, w in world.workloads.items() if name not in both}
    if random.random() < 0.4 and "top" not in world.policies:
        world.team("top", reserved=random.choice([0, 3]), limit=random.choice([None, 6, 8]))
        for name in random.sample("abc", 2):
            world.policies[name] = replace(world.policies[name], parent="top")
    for name in "abc":
        world.policies[name] = replace(world.policies[name], quotas=quota_lines(random))
    for profile in list(world.profiles.values()):
        world.profiles[profile.name] = replace(profile, pools=random.choice(PLACES))
    _submit_more(world, random)
    return world


def quota_lines(random: Random) -> tuple[QuotaLine, ...]:
    """Return a line over both pools, or one of each."""
    reserved = random.randint(0, 5)
    limit = random.choice([None, reserved, reserved + 1, reserved + 3])
    if random.random() < 0.7:
        return (QuotaLine(random.choice([(), ("p", "q")]), milli(reserved) or 0, milli(limit)),)
    first = random.randint(0, reserved)
    return (
        QuotaLine(("p",), milli(first) or 0, milli(random.choice([None, first + 1]))),
        QuotaLine(("q",), milli(reserved - first) or 0),
    )


def _submit_more(world: World, random: Random) -> None:
    for at in range(random.randint(0, 3)):
        kind, preemptible = random.choice(["job", "job", "session"]), random.choice([None, None, False])
        name, priority = random.choice(list(world.profiles)), random.choice([0, 0, 1])
        world.submit(f"more{at}", random.choice("abc"), name, kind=kind, priority=priority, preemptible=preemptible)
