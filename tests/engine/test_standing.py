"""The engine that stays between decisions gives, after every change, the plan that a fresh look gives."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.histories import happen, random_world
from makeway_quota.engine import Placed, Standing, Workload, schedule
from worlds import World


class Follower:
    """Tells a standing engine what changed in a world since the last time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.known = dict(world.workloads)
        self.standing = Standing(world.snapshot())

    def check(self) -> None:
        """Compare the plan of the standing engine with that of a fresh one."""
        world, known = self.world, self.known
        snapshot = world.snapshot()
        news = [w for name, w in world.workloads.items() if known.get(name) is not w]
        gone = [name for name in known if name not in world.workloads]
        self.standing.show(snapshot)
        self.standing.change(news, gone)
        self.known = dict(world.workloads)
        assert self.standing.plan(world.now) == schedule(snapshot)


@pytest.mark.covers("F13", "F14")
@pytest.mark.parametrize("start", range(40))
def test_it_plans_as_if_it_saw_everything_for_the_first_time(start: int) -> None:
    random = Random(start)
    world = random_world(random)
    follower = Follower(world)
    for _ in range(40):
        happen(world, random)
        if random.random() < 0.15:
            strange(world, random)
        follower.check()
        world.step()
        follower.check()
        world.now += random.choice([1, 5, 600, -20])


def strange(world: World, random: Random) -> None:
    """Let something happen that the books of a plain history do not know."""
    what = random.choice(["vague", "foreign", "cordon", "forget", "pause", "history", "rename"])
    live = world.named("running")
    if what == "vague" and live:
        name = random.choice(live)
        where = tuple(Placed(p.worker, p.node) for p in world.workloads[name].placement)
        world.change(name, placement=where)
    elif what in ("foreign", "cordon"):
        name = random.choice(list(world.nodes))
        change = {"foreign_gpus": random.choice([0, 500, 1000])} if what == "foreign" else {"cordoned": True}
        world.nodes[name] = replace(world.nodes[name], **change)
    elif what == "forget":
        for name in [w.id for w in world.workloads.values() if w.state in ("succeeded", "cancelled", "failed")]:
            del world.workloads[name]
    elif what == "pause":
        world.paused = random.choice([(), tuple(f"{p}/{f}" for p in list(world.policies)[:1] for f in world.profiles)])
    elif what == "history":
        name = random.choice(list(world.policies))
        world.policies[name] = replace(world.policies[name], history=random.choice([0, 1000, 4000]))
    elif what == "rename" and live:
        name = random.choice(live)
        world.change(name, priority=random.choice([-1, 1]))


@pytest.mark.covers("F13")
def test_finished_work_and_unknown_ids_change_nothing() -> None:
    world = World().pool("p", gpus=2).team("a", reserved=2).profile("one", 1)
    follower = Follower(world)
    world.workloads["old"] = Workload("old", "a", "one", state="succeeded")
    world.submit("j", "a", "one")
    follower.check()
    follower.standing.change((), ["nobody", "old"])
    assert [start.id for start in follower.standing.plan(world.now).start] == ["j"]
    assert [start.id for start in follower.standing.plan(world.now).start] == ["j"], "nothing was carried out"
