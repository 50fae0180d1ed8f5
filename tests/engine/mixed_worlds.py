"""Generate random worlds with CPU, memory, models, elastic gangs, jobs without GPUs and foreign pods."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from engine.histories import happen, random_world
from makeway_quota.engine import Placed
from worlds import World

MODELS = ("", "", "a100", "h100")


def mixed_world(random: Random) -> World:
    """Return a random world of `histories.py` with rarer features added."""
    world = random_world(random)
    if random.random() < 0.5:
        _limit_cpu_and_memory(world, random)
    pools = tuple(world.pools)
    if random.random() < 0.3:
        world.profile("none", 0, cpu=random.choice([1000, 3000]), pools=random.choice([(), pools[:1]]))
    if random.random() < 0.5:
        workers = random.randint(2, 4)
        minimum = random.randint(1, workers)
        gpus = random.choice([0.5, 1, 1, 2])
        world.profile("elastic", gpus, workers=workers, min_workers=minimum, pools=random.choice([(), pools[::-1]]))
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
    maximum = random.randint(2, 5)
    world.pools[name] = replace(world.pools[name], kind="autoscaled", max_nodes=maximum, node_gpus=gpus, booting=1)


def happen_mixed(world: World, random: Random) -> None:
    """Change one thing: mostly as `histories.py` does, at times on a node or a queue."""
    if random.random() < 0.9:
        happen(world, random)
        return
    name = random.choice(list(world.nodes))
    node = world.nodes[name]
    event = random.choice(["cordon", "foreign", "pause", "avoid"])
    if event == "cordon":
        world.nodes[name] = replace(node, cordoned=not node.cordoned)
    elif event == "foreign" and not any(p.node == name for w in world.workloads.values() for p in w.placement):
        world.nodes[name] = replace(node, foreign_gpus=random.choice([0, 500, 1000]))
    elif event == "avoid" and world.named("pending"):
        world.change(random.choice(world.named("pending")), avoid=(name,))
    elif event == "pause":
        queue = f"{random.choice(list(world.policies))}/{random.choice(list(world.profiles))}"
        world.paused = () if world.paused else (queue,)


def contended_world(random: Random) -> World:
    """Return a full cluster in which several workloads at once reclaim what others borrowed."""
    world = World(
        consolidation=random.random() < 0.5,
        victim_order=random.choice(["newest", "cheapest"]),
        fair_share=random.choice(["order", "order", "reclaim"]),
        in_team_preemption=random.random() < 0.8,
    )
    cpu = random.choice([0, 0, 6000])
    world.pool("p", nodes=random.randint(2, 4), gpus=random.choice([3, 4, 8]), cpu=cpu)
    if random.random() < 0.1:
        world.pools["p"] = replace(world.pools["p"], capacity=1000 * random.randint(4, 12))
    for name in ("a", "b", "c"):
        reserved = random.randint(0, 6)
        limit = random.choice([None, None, None, reserved + random.randint(0, 3)])
        weight = random.choice(["Medium", "Medium", "High", "Lowest"])
        world.team(name, reserved, limit, weight=weight, priority=random.choice([0, 0, 0, 1]))
    if random.random() < 0.25:
        world.team("top", reserved=random.choice([0, 6]), limit=random.choice([None, 10]))
        for name in ("a", "b"):
            world.policies[name] = replace(world.policies[name], parent="top")
    item = random.choice([0, 0, 1000]) if cpu else 0
    for gpus in (0.5, 1, 2, 3):
        world.profile(f"g{gpus}", gpus, cpu=item, min_runtime=random.choice([0, 0, 0, 5]))
    world.profile("none", 0, cpu=2000)
    world.profile("gang", random.choice([1, 2]), workers=random.randint(2, 3))
    workers = random.randint(2, 4)
    world.profile("elastic", random.choice([1, 1, 2]), workers=workers, min_workers=random.randint(1, workers))
    _fill(world, random)
    names = list(world.profiles)
    for at in range(random.randint(1, 4)):
        kind = random.choice(["job", "job", "session"])
        preemptible = random.choice([None, None, None, False])
        profile, priority = random.choice(names), random.choice([0, 0, 1, -1])
        world.submit(f"new{at}", random.choice("abc"), profile, kind=kind, priority=priority, preemptible=preemptible)
    return world


def _fill(world: World, random: Random) -> None:
    """Run workloads until most devices are taken: first gangs on several nodes, then whatever fits."""
    free = {name: [1000] * node.gpus for name, node in world.nodes.items()}
    cpu = {name: node.cpu or 10**9 for name, node in world.nodes.items()}
    names = list(world.profiles)
    for _ in range(random.choice([6, 12, 40])):
        profile = world.profiles[random.choice(names)]
        placement: list[Placed] = []
        trial = {name: list(devices) for name, devices in free.items()}
        for worker in range(random.randint(profile.min_workers or profile.workers, profile.workers)):
            node = random.choice(list(trial))
            able = [at for at, remaining in enumerate(trial[node]) if remaining >= min(profile.gpus, 1000)]
            wanted = max(1, profile.gpus // 1000) if profile.gpus else 0
            if len(able) < wanted or cpu[node] < profile.cpu:
                placement = []
                break
            for at in able[:wanted]:
                trial[node][at] -= min(profile.gpus, 1000)
            share = profile.gpus if 0 < profile.gpus < 1000 else 1000
            placement.append(Placed(worker, node, tuple(able[:wanted]), share))
        if placement:
            free = trial
            for placed in placement:
                cpu[placed.node] -= profile.cpu
            _run(world, random, profile.name, tuple(placement))


def _run(world: World, random: Random, profile: str, placement: tuple[Placed, ...]) -> None:
    kind = "session" if random.random() < 0.1 else "job"
    name, priority = f"w{len(world.workloads):02}", random.choice([-1, 0, 0, 0, 1])
    preemptible = random.choice([None, None, None, None, None, False])
    world.submit(name, random.choice("aabc"), profile, kind=kind, priority=priority, preemptible=preemptible)
    saved = random.choice([None, world.now])
    world.change(name, state="running", started_at=world.now, placement=placement, last_checkpoint_at=saved)
    world.now += random.choice([0, 1, 7])


def keep_more_back(world: World, random: Random) -> World:
    """Make about half of the quota lines of a world partly static (not lent); some are exceeded at once."""
    for name, team in list(world.policies.items()):
        quotas = tuple(replace(q, lend=random.choice([0, min(1000, q.reserved), q.lend])) for q in team.quotas)
        world.policies[name] = replace(team, quotas=quotas)
    return world


def with_lost_nodes(world: World, random: Random) -> World:
    """Return a world some of whose nodes are not ready, cordoned or no longer in the inventory."""
    for name in random.sample(list(world.nodes), random.randint(1, len(world.nodes) // 2)):
        node = world.nodes.pop(name)
        if kept := random.choice([replace(node, ready=False), replace(node, cordoned=True), None]):
            world.nodes[name] = kept
    return world


def with_a_department(world: World, random: Random) -> World:
    """Return a world with some teams below a department."""
    if "top" not in world.policies:
        world.team("top", reserved=random.choice([0, 2, 6]), limit=random.choice([None, 10]))
        for name in random.sample(["a", "b", "c"], random.randint(1, 3)):
            world.policies[name] = replace(world.policies[name], parent="top")
    return world


def in_two_pools(world: World, random: Random) -> World:
    """Return a contended world with half of its nodes in a second pool, where some teams reserve only as a department.

    Work on nodes of both pools is removed, and more is submitted.
    """
    world.pools["q"] = replace(world.pools["p"], name="q", capacity=None)
    moved = set(list(world.nodes)[len(world.nodes) // 2 :])
    for name in moved:
        world.nodes[name] = replace(world.nodes[name], pool="q")
    apart = {w.id for w in world.workloads.values() if len({placed.node in moved for placed in w.placement}) > 1}
    world.workloads = {name: w for name, w in world.workloads.items() if name not in apart}
    with_a_department(world, random)
    for name in ("a", "b", "c"):
        team, pools = world.policies[name], random.choice([(), ("p",), ("q",)])
        weight = random.choice(["None", team.weight, team.weight])
        world.policies[name] = replace(team, weight=weight, quotas=(replace(team.quotas[0], pools=pools),))
    for profile in list(world.profiles.values()):
        world.profiles[profile.name] = replace(profile, pools=random.choice([("p", "q"), ("q", "p")]))
    for at in range(random.randint(1, 4)):
        kind, preemptible = random.choice(["job", "job", "session"]), random.choice([None, False])
        name, priority = random.choice(list(world.profiles)), random.choice([0, 0, 1])
        world.submit(f"more{at}", random.choice("aab"), name, kind=kind, priority=priority, preemptible=preemptible)
    return world


def with_foreign_pods(world: World, random: Random) -> World:
    """Return a world on whose nodes foreign pods use CPU and memory: at times more than the workloads there leave.

    Elastic gangs request neither: whether a gang that shrinks can restart on an overbooked node is left open.
    """
    limited, maximum = random.random() < 0.7, random.choice([0, 4096])
    for name, node in world.nodes.items():
        cpu = node.cpu or (6000 if limited else 0)
        used = random.choice([0, 2000, 5000]) if cpu else 0
        foreign_memory = random.choice([0, 1024, 3072]) if maximum else 0
        world.nodes[name] = replace(node, cpu=cpu, memory=maximum, foreign_cpu=used, foreign_memory=foreign_memory)
    for name, profile in world.profiles.items():
        memory = random.choice([0, 1024]) if maximum else 0
        cpu = profile.cpu or (random.choice([0, 1000, 2000]) if limited else 0)
        elastic = (profile.min_workers or profile.workers) < profile.workers
        world.profiles[name] = replace(profile, cpu=0 if elastic else cpu, memory=0 if elastic else memory)
    return world


def with_few_pods(world: World, random: Random) -> World:
    """Return a world whose nodes run few pods, some of them foreign: at times more than the workloads there leave."""
    for name, node in world.nodes.items():
        pods = random.choice([0, 3, 5, 8, 110])
        world.nodes[name] = replace(node, pods=pods, foreign_pods=random.choice([0, 0, 1, 3]) if pods else 0)
    return world


def for_jobs_only(world: World, random: Random) -> World:
    """Return a world on some of whose nodes no session runs; other nodes than before, where it has such already."""
    for name in world.nodes:
        world.nodes[name] = replace(world.nodes[name], sessions=random.random() < 0.5)
    return world


def with_holds(world: World, random: Random) -> World:
    """Return a world where GPUs may be held: workloads that waited too long, others that did not, and free GPUs."""
    world.settings = replace(world.settings, starvation_after=random.choice([0, 3, 10]))
    if random.random() < 0.5:
        for name, profile in list(world.profiles.items()):
            world.profiles[name] = replace(profile, time_limit=random.choice([None, None, 60, 3600.0]))
    for prefix, maximum in (("late", 6), ("last", 3)):
        for at in range(random.randint(0, maximum)):
            profile_name, priority = random.choice(list(world.profiles)), random.choice([0, 0, 1, -1])
            world.submit(f"{prefix}{at}", random.choice("abc"), profile_name, priority=priority)
        world.now += random.choice([0, 5, 100]) if prefix == "late" else 0
    ended = {w.id for w in world.workloads.values() if w.state == "running" and random.random() < 0.15}
    world.workloads = {name: w for name, w in world.workloads.items() if name not in ended}
    return world


def with_relabelled_nodes(world: World, random: Random) -> World:
    """Return a world some of whose nodes have just moved to another pool, under the workloads that run there."""
    world.pools.setdefault("q", replace(world.pools["p"], name="q", capacity=None))
    pools = [*world.pools, *random.choice([(), (), ("unnamed",)])]
    for name in random.sample(list(world.nodes), random.randint(1, len(world.nodes))):
        world.nodes[name] = replace(world.nodes[name], pool=random.choice(pools))
    for profile in list(world.profiles.values()):
        served = random.choice([("p",), ("q",), ("p", "q"), ("q", "p"), ()])
        world.profiles[profile.name] = replace(profile, pools=served)
    return world


def with_vanished_devices(world: World, random: Random) -> World:
    """Return a world some of whose nodes show fewer devices than before, at times none, as while a plugin restarts."""
    for name in random.sample(list(world.nodes), random.randint(1, len(world.nodes))):
        node = world.nodes[name]
        if random.random() < 0.3:  # devices with names of their own
            remaining = tuple(at for at in range(node.gpus) if random.random() < 0.7)
            world.nodes[name] = replace(node, gpus=len(remaining), devices=remaining)
        else:
            world.nodes[name] = replace(node, gpus=random.choice([0, *range(node.gpus), node.gpus - 1]))
    return world


def with_another_policy(world: World, random: Random) -> World:
    """Return a world whose quotas were edited under the workloads that run."""
    for name, team in list(world.policies.items()):
        line = team.quotas[0]
        reserved = random.choice([0, line.reserved, 1000 * random.randint(0, 6)])
        limit = random.choice([None, line.limit, reserved, reserved + 1000])
        world.policies[name] = replace(team, quotas=(replace(line, reserved=reserved, limit=limit, lend=None),))
    return world


def with_a_clock_set_back(world: World, random: Random) -> World:
    """Return a world whose clock shows an earlier time than when some workloads were submitted and started."""
    world.now -= random.choice([1, 60, 10_000])
    return world
