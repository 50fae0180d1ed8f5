"""Large clusters for the engine's benchmarks: one that has to make way, and one where nothing fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from random import Random

from makeway_quota.engine import (
    GPU,
    Node,
    Placed,
    Plan,
    Pool,
    Profile,
    QuotaLine,
    Settings,
    Snapshot,
    TeamQuota,
    Workload,
)
from makeway_quota.engine.snapshot import Weight

NOW = 1_000_000.0
DAY = 86_400.0
GPUS_PER_NODE = 8
"""devices on a node"""
FIRST_SLICE = 4096
"""number of the first slice of a machine, behind its whole GPUs"""
TEAMS = 100
USERS = 10
"""in each team"""
SIZES = (1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8)
"""GPUs of the twelve profiles"""
LAYOUTS = ((8,), (4, 4), (4, 4), (2, 2, 4))
"""the jobs that run on a node, by GPUs: two on the average"""


def nodes(many: int) -> tuple[Node, ...]:
    """Return `many` equal nodes."""
    return tuple(Node(f"n{at:05}", "p", GPUS_PER_NODE) for at in range(many))


def borrowed(many: int, profile: str, suffix: str = "", first_device: int = 0) -> tuple[Workload, ...]:
    """Return a running job for every device of machines, whose nodes have this suffix in their names."""
    return tuple(
        Workload(
            f"a{at:06}",
            "borrower",
            profile,
            owner=f"user{at % USERS}",
            submitted_at=NOW - DAY / 2 + at,
            state="running",
            started_at=NOW - DAY / 2 + at,
            placement=(Placed(0, f"n{at // GPUS_PER_NODE:05}{suffix}", (first_device + at % GPUS_PER_NODE,)),),
        )
        for at in range(many * GPUS_PER_NODE)
    )


def lent_out(many: int) -> Snapshot:
    """Return a cluster full of one-GPU jobs of a team that reserves nothing; `owner` reserves all of it."""
    policies = (TeamQuota("borrower", (QuotaLine(),)), TeamQuota("owner", (QuotaLine((), many * GPUS_PER_NODE * GPU),)))
    open_to = (("borrower", "owner"),)
    profiles = (
        Profile("one", GPU, pools=("p",), policies=open_to),
        Profile("gang", GPUS_PER_NODE * GPU, workers=max(1, many // 2), pools=("p",), policies=open_to),
    )
    running = borrowed(many, "one")
    return Snapshot(NOW, Settings(), (Pool("p"),), nodes(many), profiles, policies, running)


def all_at_once(many: int) -> Snapshot:
    """R1: the owner submits a job for every GPU at once."""
    world = lent_out(many)
    asking = (
        Workload(f"b{at:06}", "owner", "one", owner=f"user{at % USERS}", submitted_at=NOW - 60 + at * 1e-3)
        for at in range(many * GPUS_PER_NODE)
    )
    return replace(world, workloads=(*world.workloads, *asking))


def one_gang(many: int) -> Snapshot:
    """R2: the owner submits one gang over half of the nodes."""
    world = lent_out(many)
    return replace(world, workloads=(*world.workloads, Workload("g", "owner", "gang", submitted_at=NOW - 60)))


def shared_machines(many: int) -> Snapshot:
    """R5: machines in two pools whose cores are lent out to slices; the owner submits a job for every whole GPU.

    A whole GPU needs the cores of two slices.
    """
    numbers = range(many)
    machines = tuple(
        Node(f"n{at:05}/{pool}", pool, gpus, cpu=GPUS_PER_NODE * 1000, host=f"n{at:05}", first_device=first)
        for at in numbers
        for pool, gpus, first in (("whole", GPUS_PER_NODE // 2, 0), ("slices", GPUS_PER_NODE, FIRST_SLICE))
    )
    owned = (QuotaLine(("whole",), many * GPUS_PER_NODE // 2 * GPU),)
    policies = (TeamQuota("borrower", (QuotaLine(),)), TeamQuota("owner", owned))
    open_to = (("borrower", "owner"),)
    profiles = (
        Profile("slice", GPU, cpu=1000, pools=("slices",), policies=open_to),
        Profile("one", GPU, cpu=2000, pools=("whole",), policies=open_to),
    )
    running = borrowed(many, "slice", "/slices", FIRST_SLICE)
    asking = tuple(
        Workload(f"b{at:06}", "owner", "one", owner=f"user{at % USERS}", submitted_at=NOW - 60 + at * 1e-3)
        for at in range(many * GPUS_PER_NODE // 2)
    )
    return Snapshot(NOW, Settings(), (Pool("slices"), Pool("whole")), machines, profiles, policies, (*running, *asking))


def gang_on_shared_machines(many: int) -> Snapshot:
    """R6: the same machines; the owner submits one gang with a worker for every whole GPU of half of them."""
    world = shared_machines(many)
    workers = max(1, many // 2) * GPUS_PER_NODE // 2
    one = next(profile for profile in world.profiles if profile.name == "one")
    gang = replace(one, name="gang", workers=workers)
    running = [w for w in world.workloads if w.state == "running"]
    asking = Workload("g", "owner", "gang", submitted_at=NOW - 60)
    return replace(world, profiles=(*world.profiles, gang), workloads=(*running, asking))


def nothing_fits(many: int) -> Snapshot:
    """R3, R4: every GPU runs, all teams are over their reservation, and five times as many jobs wait as run."""
    random = Random(20260101)
    names = tuple(f"team{at:03}" for at in range(TEAMS))
    total = many * GPUS_PER_NODE * GPU
    weights: list[Weight] = ["Low", "Medium", "High"]
    policies = tuple(
        TeamQuota(name, (QuotaLine((), total // TEAMS // 2, total // TEAMS if at % 4 == 0 else None),), weights[at % 3])
        for at, name in enumerate(names)
    )
    profiles = tuple(
        Profile(f"f{at:02}", size * GPU, pools=("p",), policies=(names,), time_limit=DAY * (1 + at % 3))
        for at, size in enumerate(SIZES)
    )
    pool = Pool("p", profiles=tuple(profile.name for profile in profiles[::-1]))
    work = _running(random, many, names)
    work += [
        Workload(
            f"w{at:06}",
            random.choice(names),
            random.choice(profiles).name,
            owner=f"user{random.randrange(USERS)}",
            priority=random.choice((-1, 0, 0, 0, 1)),
            submitted_at=NOW - 0.8 * DAY + at * 0.5,
        )
        for at in range(many * 10)
    ]
    return Snapshot(NOW, Settings(), (pool,), nodes(many), profiles, policies, tuple(work))


def _running(random: Random, many: int, names: tuple[str, ...]) -> list[Workload]:
    by_size = {size: [f"f{at:02}" for at, item in enumerate(SIZES) if item == size] for size in set(SIZES)}
    turn = cycle(names)
    running: list[Workload] = []
    for at in range(many):
        first = 0
        for size in LAYOUTS[at % len(LAYOUTS)]:
            began = NOW - 0.9 * DAY * random.random()
            place = (Placed(0, f"n{at:05}", tuple(range(first, first + size))),)
            first += size
            running.append(
                Workload(
                    f"r{len(running):06}",
                    next(turn),
                    random.choice(by_size[size]),
                    owner=f"user{random.randrange(USERS)}",
                    priority=1,  # so that no pending job may preempt within its team
                    submitted_at=began - 60,
                    state="running",
                    started_at=began,
                    placement=place,
                )
            )
    return running


def carried_out(world: Snapshot, plan: Plan) -> Snapshot:
    """Return the world after all evictions have ended and every preemptor has its nomination."""
    gone = {item.id for item in plan.evict}
    nominations = {item.id: item.nomination for item in plan.pending}

    def after(workload: Workload) -> Workload:
        if workload.id in gone:
            return replace(workload, state="pending", placement=(), attempt=workload.attempt + 1)
        return replace(workload, nomination=nominations.get(workload.id, ()))

    return replace(world, now=world.now + 30, workloads=tuple(map(after, world.workloads)))
