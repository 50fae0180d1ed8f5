"""Generate random worlds and random histories of events in them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from random import Random

from engine.invariants import check
from makeway_quota.engine import QuotaLine
from makeway_quota.engine.snapshot import LIVE
from worlds import World, milli

WEIGHTS = ("None", "Lowest", "Low", "Medium", "High")
EVENTS = (
    "job",
    "job",
    "job",
    "session",
    "end",
    "end",
    "cancel",
    "fail",
    "release",
    "release",
    "lose",
    "heal",
    "policy",
)


HISTORIES = int(os.environ.get("HISTORIES", "30"))
"""The number of long histories of the slow tests; `make invariants` sets 3,000."""
MAX_WAITING = 20
"""With more pending work than this, work is cancelled instead of submitted: long queues test nothing new."""


def random_world(random: Random) -> World:
    """Return a random small cluster with a few teams and profiles; some with departments, some with gangs."""
    departments, gangs = random.random() < 0.4, random.random() < 0.5
    world = World(
        consolidation=random.random() < 0.7,
        victim_order=random.choice(["newest", "cheapest"]),
        fair_share=random.choice(["order", "order", "reclaim"]),
        user_fairness=random.random() < 0.5,
        starvation_after=random.choice([0, 600, 86_400]),
    )
    for name in ("p", "q")[: random.randint(1, 2)]:
        world.pool(
            name,
            random.randint(1, 3),
            random.choice([2, 4, 8]),
            strategy=random.choice(["pack", "pack", "spread", "fill"]),
        )
        if random.random() < 0.15:
            world.pools[name] = replace(world.pools[name], capacity=milli(random.randint(2, 12)))
    pools = tuple(world.pools)
    for name in ("a", "b", "c")[: random.randint(2, 3)]:
        reserved = random.randint(0, 6)
        world.team(
            name,
            reserved,
            limit=random.choice([None, None, reserved + random.randint(0, 4)]),
            lend=random.choice([None, None, None, None, 0, reserved // 2]),
            weight=random.choice(WEIGHTS[random.choice([0, 2, 2, 2]) :]),
            priority=random.choice([0, 0, 1]),
            pools=random.choice([(), (), pools[:1]]),
        )
    if departments:
        world.team("top", reserved=random.choice([0, 6]), limit=random.choice([None, 8]))
        for name in list(world.policies)[: random.randint(1, 2)]:
            world.policies[name] = replace(world.policies[name], parent="top")
    for at in range(random.randint(1, 3)):
        gang = gangs and random.random() < 0.4
        world.profile(
            f"f{at}",
            random.choice([0.5, 1, 1, 2, 3, 4]),
            pools=random.choice([pools, pools[::-1], pools[:1]]),
            min_runtime=random.choice([0, 0, 0, 500]),
            time_limit=random.choice([None, None, 300, 3000]),
            workers=random.randint(2, 3) if gang else 1,
            min_workers=random.choice([None, 1]) if gang else None,
        )
    for name in pools:
        ranked = list(world.profiles)
        random.shuffle(ranked)
        world.pools[name] = replace(world.pools[name], profiles=tuple(ranked[: random.randint(0, 3)]))
    return world


def happen(world: World, random: Random) -> None:
    """Apply one random event."""
    event = random.choice(EVENTS)
    running, terminating, waiting = world.named("running"), world.named("checkpointing"), world.named("pending")
    if event in ("job", "session") and len(waiting) > MAX_WAITING:
        world.end(*random.sample(waiting, 3), state="cancelled")
    elif event in ("job", "session"):
        many = random.randint(1, 4) if event == "job" else 1
        for _ in range(many):
            world.submit(
                f"w{int(world.now)}",
                random.choice([n for n in world.policies if n != "top"]),
                random.choice(list(world.profiles)),
                kind=event,
                owner=random.choice(["x", "y"]),
                priority=random.choice([-1, 0, 0, 0, 1]),
                preemptible=random.choice([None, None, None, None, True, False]),
            )
    elif event in ("end", "fail") and running:
        world.end(random.choice(running), state="succeeded" if event == "end" else "failed")
    elif event == "cancel":
        live = running + terminating + waiting
        if live:
            world.end(random.choice(live), state="cancelled")
    elif event == "release" and terminating:
        world.release(*random.sample(terminating, random.randint(1, len(terminating))))
    elif event == "lose":
        world.lose(random.choice(list(world.nodes)))
    elif event == "heal":
        for name, node in world.nodes.items():
            world.nodes[name] = replace(node, ready=True)
    elif event == "policy":
        name = random.choice([n for n in world.policies if n != "top"])
        line = world.policies[name].quotas[0]
        reserved = random.randint(0, 6)
        limit = random.choice([None, reserved + random.randint(0, 4)])
        changed = QuotaLine(line.pools, milli(reserved) or 0, milli(limit), line.lend and milli(reserved))
        world.policies[name] = replace(world.policies[name], quotas=(changed,))


def live_through(random: Random, events: int) -> World:
    """Run a random history and check every plan of it; now and then, and at its end, without an event."""
    world = random_world(random)
    for _ in range(events):
        happen(world, random)
        check(world, Random(7))
        world.now += random.choice([1, 5, 600])
        if random.random() < 0.02:
            come_to_rest(world)
        world.workloads = {i: w for i, w in world.workloads.items() if w.state in LIVE}
    come_to_rest(world)
    return world


def come_to_rest(world: World) -> None:
    """Plan until nothing changes, which must be soon without events, and without evicting a workload twice.

    What is stuck ends first: nothing was planned on its GPUs, so its end is an event.
    """
    late = world.now - world.settings.stuck_after
    stuck = [w.id for w in world.workloads.values() if w.state == "checkpointing" and (w.deadline or late + 1) <= late]
    if stuck:
        world.release(*stuck)
    plans = world.reconcile()
    told = Counter(change.id for plan in plans for change in (*plan.evict, *plan.move))
    assert all(times == 1 for times in told.values()), f"ping-pong: {told.most_common(3)}"
