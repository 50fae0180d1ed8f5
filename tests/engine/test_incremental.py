"""The incremental engine returns, after every change, the plan of a new engine."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.histories import happen, random_world
from makeway_quota.engine import IncrementalEngine, Placed, Workload, schedule
from makeway_quota.engine.index import cluster_state, groups
from worlds import World


class Follower:
    """Applies the changes of a world to an incremental engine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.known = dict(world.workloads)
        self.incremental = IncrementalEngine(world.snapshot())

    def check(self) -> None:
        """Compare the plan of the incremental engine with that of a fresh one."""
        world, known = self.world, self.known
        snapshot = world.snapshot()
        changed = [w for name, w in world.workloads.items() if known.get(name) is not w]
        gone = [name for name in known if name not in world.workloads]
        self.incremental.show(snapshot)
        self.incremental.change(changed, gone)
        self.known = dict(world.workloads)
        whole = schedule(snapshot)
        bare = self.incremental.plan(world.now, why=False)
        assert replace(bare, pending=()) == replace(whole, pending=()), "sentences change no decision"
        assert self.incremental.plan(world.now) == whole


@pytest.mark.covers("F13", "F14")
@pytest.mark.parametrize("start", range(40))
def test_the_incremental_engine_plans_as_a_new_one(start: int) -> None:
    random = Random(start)
    world = random_world(random)
    follower = Follower(world)
    for _ in range(40):
        happen(world, random)
        if random.random() < 0.15:
            strange(world, random)
        follower.check()
        carry_out(world, random)
        follower.check()
        world.now += random.choice([1, 5, 600, -20])


@pytest.mark.covers("F11", "F13")
@pytest.mark.parametrize("start", range(100, 115))
def test_pending_work_that_changes_its_group_is_planned_as_by_a_new_engine(start: int) -> None:
    random = Random(start)
    world = random_world(random)
    follower = Follower(world)
    for _ in range(25):
        happen(world, random)
        jobs = [w.id for w in world.workloads.values() if w.kind == "job" and w.state == "pending"]
        for name in random.sample(jobs, min(len(jobs), random.choice([0, 1, 3]))):
            team, profile = random.choice(list(world.policies)), random.choice(list(world.profiles))
            world.change(name, team=team, profile=profile, nomination=())
        follower.check()
        carry_out(world, random)
        follower.check()
        world.now += random.choice([1, 5, 600])


def carry_out(world: World, random: Random) -> None:
    """Plan and apply the plan; at times a start fails, or a workload ends at the same moment."""
    plan = world.plan()
    if random.random() < 0.25:
        plan = replace(plan, start=tuple(start for start in plan.start if random.random() < 0.5))
    world.apply(plan)
    if plan.start and random.random() < 0.1:
        world.end(random.choice(plan.start).id, state=random.choice(["succeeded", "pending"]))


def strange(world: World, random: Random) -> None:
    """Apply an event that plain histories lack."""
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
    follower.incremental.change((), ["unknown", "old"])
    assert [start.id for start in follower.incremental.plan(world.now).start] == ["j"]
    assert [start.id for start in follower.incremental.plan(world.now).start] == ["j"], "no plan was applied"


@pytest.mark.covers("F13")
def test_a_start_stays_where_it_is_once_the_snapshot_confirms_it() -> None:
    world = World().pool("p", nodes=2, gpus=2).team("a", reserved=4).profile("one", 1)
    follower = Follower(world)
    world.submit("j", "a", "one")
    follower.check()
    cluster = follower.incremental.cluster
    seat = cluster.allocations["j"]
    assert seat.started_in_plan
    world.step()
    follower.check()
    assert cluster.allocations["j"] is seat
    assert not seat.started_in_plan
    assert seat.workload.state == world.workloads["j"].state


@pytest.mark.covers("F13")
@pytest.mark.parametrize("what", ["not at all", "elsewhere", "in another team", "and is evicted"])
def test_a_start_with_another_outcome_is_applied_as_observed(what: str) -> None:
    world = World().pool("p", nodes=2, gpus=2).team("a", reserved=2).team("b", reserved=2).profile("one", 1)
    follower = Follower(world)
    world.submit("j", "a", "one")
    follower.check()
    if what != "not at all":
        world.step()
    if what == "elsewhere":
        world.change("j", placement=(Placed(0, "p-2", (1,), 1000),))
    elif what == "in another team":
        world.change("j", team="b")
    elif what == "and is evicted":
        world.change("j", state="checkpointing", deadline=world.now + 5)
    world.jobs("k l m n o", "b", "one")
    follower.check()
    follower.incremental.change((), list(world.workloads))
    remaining = follower.incremental.cluster
    assert all(node.free == [1000, 1000] and not node.allocations for node in remaining.nodes.values()), (
        "nothing is left behind"
    )
    assert not any(account.used_in_pool.get("p") for account in remaining.ledger.accounts.values())


@pytest.mark.covers("N25")
def test_requests_that_are_gone_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_state, "_MAX_NEEDS", 40)
    monkeypatch.setattr(groups, "_MAX_CLASSES", 30)
    monkeypatch.setattr(groups, "_MAX_EMPTY", 10)
    world = World().pool("p", nodes=3, gpus=8).team("a", reserved=8).team("b", reserved=8).profile("one", 1)
    follower = Follower(world)
    sizes = []
    for day in range(40):
        waiting = world.named("pending")
        for number in range(10):
            shape = {"workers": 2 + number, "min_workers": 1, "cpu": day, "avoid": (f"lost-{day}",)}
            world.submit(f"j{day}-{number}", "ab"[number % 2], "one", **shape)
        follower.check()
        carry_out(world, Random(day))
        follower.check()
        world.end(*world.named("running"), *waiting)
        follower.check()
        world.workloads = {id: w for id, w in world.workloads.items() if w.state != "succeeded"}
        follower.check()
        known = follower.incremental
        sizes.append((len(known.cluster._needs), len(known.groups._classes), len(known.groups._empty)))
    assert max(item for item, _, _ in sizes) <= 40
    assert max(classes for _, classes, _ in sizes) <= 30 + 3 * 30, "at most 30 groups are open at a time"
    assert max(empty for _, _, empty in sizes) == 10
