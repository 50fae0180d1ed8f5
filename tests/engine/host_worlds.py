"""Generate random worlds in which nodes of two pools are parts of one machine, and share its CPU, memory and pods."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from engine.cpu_worlds import happen_on_cpus
from engine.mixed_worlds import happen_mixed
from engine.pooled_worlds import pooled_world, quota_lines
from makeway_quota.engine import Placed
from worlds import World

SHAPES = (
    ("one", 1, 1, None),
    ("two", 2, 1, None),
    ("gang", 1, 2, None),
    ("elastic", 1, 3, 1),
    ("light", 0, 1, None),
)
"""Name, GPUs, workers and least workers of the profiles of `crowded_world`."""
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
        item = {"cpu": random.choice([0, 500, 1000, 2000]), "memory": random.choice([0, 0, 1024])}
        world.profiles[name] = replace(profile, **item)
    world.profile("light", 0, cpu=1000).profile("heavy", 0, cpu=2500)
    if random.random() < 0.8:
        _run_only_what_fits(world)
    if len(world.workloads) % 3:  # no random number, so that what happens later is the same for both numberings
        for name, node in world.nodes.items():
            number_from(world, name, FIRSTS[node.pool] if node.host else 0)
    return world


def crowded_world(random: Random) -> World:
    """Return a small world of machines in both pools whose CPU, memory or pods end before their GPUs do."""
    world = World(
        consolidation=random.random() < 0.5,
        in_team_preemption=random.random() < 0.7,
        fair_share=random.choice(["order", "order", "reclaim"]),
    )
    many, kind = random.randint(1, 3), random.choice(["cpu", "cpu", "memory", "pods"])
    shared = {"cpu": 4000, "memory": 4096, "pods": 4}[kind]
    for pool in "pq":
        world.pool(pool, many, gpus=random.choice([2, 3, 4]))
    for name, node in world.nodes.items():
        if random.random() < 0.9:
            item = {"host": f"h{name.split('-')[-1]}", "first_device": FIRSTS[node.pool], kind: shared}
            world.nodes[name] = replace(node, **item)
    for name in "abc":
        world.team(name, weight=random.choice(["Medium", "Medium", "High", "None"]))
        world.policies[name] = replace(world.policies[name], quotas=quota_lines(random))
    if random.random() < 0.3:
        world.team("top", reserved=random.choice([0, 3]), limit=random.choice([None, 8]))
        world.policies["a"] = replace(world.policies["a"], parent="top")
        world.policies["b"] = replace(world.policies["b"], parent="top")
    for name, gpus, workers, minimum in SHAPES:
        item = {kind: random.choice([1000, 1000, 2000, 3000] if gpus else [500, 1500])} if kind != "pods" else {}
        if random.random() < 0.2:
            item["min_runtime"] = random.choice([2, 300])
        pools = random.choice([("p",), ("q",), ("p",), ("q",), ("p", "q")])
        world.profile(name, gpus, workers=workers, min_workers=minimum, pools=pools, **item)
    _fill(world, random)
    for at in range(random.randint(1, 4)):
        happen_crowded(world, random, f"new{at}")
    return world


def share_gpus(world: World, random: Random) -> None:
    """Have profiles of half a GPU and jobs of them in a world of `crowded_world`."""
    item = {name: maximum for name in ("cpu", "memory") if (maximum := getattr(world.profiles["one"], name))}
    for name, workers in (("half", 1), ("halves", 2)):
        world.profile(name, 0.5, workers=workers, pools=random.choice([("p",), ("q",), ("p", "q")]), **item)
    for at in range(3):
        team, profile = random.choice("abc"), random.choice(["half", "halves"])
        world.submit(f"half{at}", team, profile, priority=random.choice([0, 1]))


def happen_crowded(world: World, random: Random, name: str) -> None:
    """Have a workload submitted; or, later on, one ended, a node down or up again, or quotas changed."""
    what, teams = random.random(), [team for team in world.policies if team != "top"]
    running = [w.id for w in world.workloads.values() if w.state == "running"]
    if what < 0.7 or not running:
        kind, preemptible = random.choice(["job", "job", "session"]), random.choice([None, None, False])
        profile, priority = random.choice(list(world.profiles)), random.choice([0, 0, 1])
        world.submit(name, random.choice(teams), profile, kind=kind, priority=priority, preemptible=preemptible)
    elif what < 0.85:
        world.end(random.choice(running))
    elif what < 0.93:
        node = world.nodes[random.choice(list(world.nodes))]
        world.nodes[node.name] = replace(node, ready=not node.ready)
    else:
        team = random.choice(teams)
        world.policies[team] = replace(world.policies[team], quotas=quota_lines(random))


def _fill(world: World, random: Random) -> None:
    """Run workloads until nearly all that the machines share is taken."""
    for at in range(16):
        profile, team = random.choice(list(world.profiles.values())), random.choice("aabc")
        node = world.nodes[random.choice([n for n, item in world.nodes.items() if item.pool in profile.pools])]
        name = f"w{at:02}"
        held = {d for w in world.workloads.values() for p in w.placement if p.node == node.name for d in p.devices}
        free = [d for d in range(node.first_device, node.first_device + node.gpus) if d not in held]
        workers, whole = random.randint(profile.min_workers or profile.workers, profile.workers), profile.gpus // 1000
        if len(free) < workers * whole:
            continue
        places = tuple(Placed(w, node.name, tuple(free[w * whole : (w + 1) * whole]), 1000) for w in range(workers))
        world.submit(name, team, profile.name, kind="job", priority=random.choice([-1, 0, 0, 1]))
        world.change(name, state="running", started_at=world.now, placement=places)
        if exceeded(world):
            del world.workloads[name]
        world.now += random.choice([0, 1, 7])


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
        terminating=tuple(replace(pod, devices=moved(pod.devices)) for pod in node.terminating),
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
    result = {}
    for node in world.nodes.values():
        for name, mine in used.get(host_of(world, node.name), Counter()).items():
            maximum = getattr(node, name)
            if maximum and mine > maximum - getattr(node, f"foreign_{name}"):
                result[host_of(world, node.name), name] = mine
    return result


def _run_only_what_fits(world: World) -> None:
    running = {name: w for name, w in world.workloads.items() if w.placement}
    for name in running:
        del world.workloads[name]
    for name, w in running.items():
        world.workloads[name] = w
        if exceeded(world):
            del world.workloads[name]
