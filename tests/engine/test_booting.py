"""Work in quota is nominated to nodes that boot, and keeps its places on ready ones for them; by both engines."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.booting_worlds import BOOTING, BootingHistory, boot, booting_world, check_awaiting, end_boot
from engine.engines import ENGINES, Engine, differences
from engine.histories import HISTORIES, happen, random_world
from engine.properties import check
from engine.test_node_changes import NodeFollower
from makeway_quota.engine import Node, Plan, reference, schedule
from worlds import World

CHECKED = sorted(set(BOOTING) - {"lost nodes", "holds"})
"""Those whose plans keep all invariants where nothing boots, too; the others are compared only."""


ONCE_BROKEN = [
    ("two pools", 10_024),
    ("static quotas", 10_154),
    ("two pools", 10_575),
    ("contended", 10_927),
    ("foreign pods", 11_012),
    ("two pools", 11_205),
    ("static quotas", 12_946),
]
"""Worlds of which the plans broke an invariant or differed, or the check was wrong."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


def cloud(ready: int = 1, booting: int = 1, gpus: int = 2, **team: int) -> World:
    """Return a pool that grows, with nodes that are ready and others that will be in 60 s, one after the other."""
    world = World().pool("cloud", ready, gpus, kind="autoscaled", strategy="fill")
    for at in range(booting):
        boots_at = world.now + 60 + 10 * at
        world.nodes[f"boots-{at}"] = Node(f"boots-{at}", "cloud", gpus, ready=False, ready_at=boots_at)
    world.team("own", **{"reserved": 4} | team).team("rnd", reserved=0)
    return world.profile("one", 1).profile("two", 2).profile("gang", 2, workers=2)


def waits(plan: Plan) -> dict[str, list[str]]:
    """Return the nodes of the work that waits for some which boot."""
    return {w.id: [placed.node for placed in w.awaits] for w in plan.pending if w.awaits}


def starts(plan: Plan) -> list[str]:
    return sorted(start.id for start in plan.start)


@pytest.mark.covers("N23")
def test_a_gang_keeps_a_ready_node_for_one_that_boots(engine: Engine) -> None:
    """Neither work over quota nor later work in quota, which is smaller, takes the node that is ready."""
    world = cloud().submit("g", "own", "gang")
    world.now += 1
    world.submit("later", "own", "two").jobs("over1 over2", "rnd", "one")
    plan = engine(world.snapshot())
    assert waits(plan) == {"g": ["boots-0", "cloud-1"]}
    assert starts(plan) == []
    [waiting] = [w for w in plan.pending if w.awaits]
    assert (waiting.code, waiting.rule, waiting.nomination) == ("waiting_for_node", "boot", ())
    assert waiting.not_before == world.nodes["boots-0"].ready_at


@pytest.mark.covers("N23")
def test_a_gang_starts_in_the_plan_in_which_its_last_node_is_ready(engine: Engine) -> None:
    world = cloud().submit("g", "own", "gang")
    world.now += 1
    world.submit("later", "own", "two").jobs("over1 over2", "rnd", "one")
    world.nodes["boots-0"] = replace(world.nodes["boots-0"], ready=True, ready_at=None)
    assert starts(engine(world.snapshot())) == ["g"]


@pytest.mark.covers("N23")
@pytest.mark.parametrize("end", ["gone", "down", "cordoned"])
def test_nothing_is_held_for_a_node_that_does_not_boot_any_more(end: str, engine: Engine) -> None:
    world = cloud().submit("g", "own", "gang")
    world.now += 1
    world.jobs("over1 over2", "rnd", "one")
    assert waits(engine(world.snapshot()))
    node = world.nodes.pop("boots-0")
    if end != "gone":
        world.nodes["boots-0"] = replace(node, ready_at=None) if end == "down" else replace(node, cordoned=True)
    plan = engine(world.snapshot())
    assert (starts(plan), waits(plan)) == (["over1", "over2"], {})


@pytest.mark.covers("N23")
def test_work_with_earlier_rights_goes_before(engine: Engine) -> None:
    """A session is served before jobs, as if the gang were not nominated: it holds its places against later work."""
    world = cloud(reserved=6).submit("g", "own", "gang")
    world.now += 1
    world.submit("s", "own", "one", kind="session")
    plan = engine(world.snapshot())
    assert (starts(plan), waits(plan)) == (["s"], {})


@pytest.mark.covers("N23")
def test_the_needs_of_work_that_waits_for_nodes_count_once(engine: Engine) -> None:
    world = cloud().submit("g", "own", "gang").submit("over", "rnd", "two")
    demand = [(one.id, one.pools, one.workers, one.awaits) for one in engine(world.snapshot()).demand]
    assert demand == [("g", ("cloud",), 1, ("boots-0", "cloud-1")), ("over", ("cloud",), 1, ())], (
        "the other has its node"
    )


@pytest.mark.covers("N23")
def test_work_over_quota_is_not_nominated_to_nodes_that_boot(engine: Engine) -> None:
    world = cloud(ready=0).submit("over", "rnd", "two")
    plan = engine(world.snapshot())
    assert waits(plan) == {}
    assert [one.id for one in plan.demand] == ["over"]


@pytest.mark.covers("N23")
def test_an_eviction_comes_before_a_node_that_boots(engine: Engine) -> None:
    world = cloud(ready=2).run("v1", "rnd", "two", "cloud-1").run("v2", "rnd", "two", "cloud-2")
    plan = engine(world.submit("g", "own", "gang").snapshot())
    assert sorted(eviction.id for eviction in plan.evict) == ["v1", "v2"]
    assert waits(plan) == {}


@pytest.mark.covers("N23")
def test_work_with_patience_is_nominated_to_nodes_that_boot_and_evicts_when_it_is_over(engine: Engine) -> None:
    world = cloud(ready=2).run("v", "rnd", "two", "cloud-1")
    world.profiles["gang"] = replace(world.profiles["gang"], reclaim_after=30.0)
    world.submit("g", "own", "gang")
    plan = engine(world.snapshot())
    assert waits(plan) == {"g": ["boots-0", "cloud-2"]}
    assert [(w.code, w.awaits != ()) for w in plan.pending] == [("patience", True)], "others make way for it before"
    world.now += 31
    plan = engine(world.snapshot())
    assert [eviction.id for eviction in plan.evict] == ["v"]


@pytest.mark.covers("N23")
def test_a_gang_keeps_as_little_of_ready_nodes_as_it_can(engine: Engine) -> None:
    """One node that boots has room for both workers: the ready GPU stays for others."""
    world = cloud(gpus=1).profile("pair", 1, workers=2).submit("g", "own", "pair").submit("over", "rnd", "one")
    world.nodes["boots-0"] = replace(world.nodes["boots-0"], gpus=2)
    plan = engine(world.snapshot())
    assert waits(plan) == {"g": ["boots-0", "boots-0"]}
    assert starts(plan) == ["over"]


@pytest.mark.covers("N23")
def test_the_first_node_that_is_ready_is_waited_for(engine: Engine) -> None:
    plan = engine(cloud(ready=0, booting=3).submit("j", "own", "two").snapshot())
    assert waits(plan) == {"j": ["boots-0"]}


@pytest.mark.covers("N23", "F06")
def test_nothing_of_a_static_quota_is_lent_for_a_node_that_boots(engine: Engine) -> None:
    """The gang has two GPUs where a node boots, and `own` uses half of one: of 4 it keeps the third that is ready."""
    world = cloud(gpus=3, reserved=4, lend=0, priority=1).team("rnd", reserved=2).profile("half", 0.5)
    world.nodes["boots-0"] = replace(world.nodes["boots-0"], gpus=2)
    world.run("old", "own", "half", "cloud-1").submit("g", "own", "gang", preemptible=False)
    world.submit("asks", "rnd", "one", preemptible=False).submit("over", "own", "half")
    plan = check(world, engine, Random(7))
    assert waits(plan) == {"g": ["boots-0", "cloud-1"]}
    assert (starts(plan), [eviction.id for eviction in plan.evict]) == (["over"], [])
    world.nodes["boots-0"] = replace(world.nodes["boots-0"], ready=True, ready_at=None)
    plan = engine(world.snapshot())
    assert starts(plan) == ["g"]
    assert sorted(eviction.id for eviction in plan.evict) == ["old", "over"], "`own` is above its reservation by now"


@pytest.mark.covers("N23", "F06")
@pytest.mark.parametrize("idle", [2, 1, 0])
def test_work_waits_for_a_node_that_boots_beside_a_static_quota_that_is_idle(idle: int, engine: Engine) -> None:
    """It uses none of the GPUs that are kept, so whether these are in use makes no difference to it."""
    world = cloud(reserved=2).team("rnd", reserved=2, lend=0).submit("asks", "own", "one")
    for at in range(2 - idle):
        world.submit(f"kept{at}", "rnd", "one")
    plan = check(world, engine, Random(7))
    assert (starts(plan), waits(plan)) == ([f"kept{at}" for at in range(2 - idle)], {"asks": ["boots-0"]})
    world.reconcile()
    assert waits(engine(world.snapshot())) == {"asks": ["boots-0"]}


@pytest.mark.covers("N23", "F06")
def test_no_work_waits_for_a_node_that_a_static_quota_will_keep(engine: Engine) -> None:
    """The quota keeps three GPUs, of which two are there: it keeps one of the two that boot."""
    world = cloud(reserved=2).team("rnd", reserved=3, lend=0).submit("asks", "own", "one")
    assert waits(check(world, engine, Random(7))) == {}


@pytest.mark.covers("N23", "F06")
@pytest.mark.parametrize(("kept", "nodes"), [(2, ["boots-0", "boots-1"]), (1, ["boots-0", "cloud-1"])])
def test_a_gang_waits_for_more_nodes_rather_than_on_gpus_of_a_static_quota(
    kept: int, nodes: list[str], engine: Engine
) -> None:
    world = cloud(gpus=2, booting=3, reserved=2).team("rnd", reserved=kept, lend=0)
    for at in range(3):
        world.nodes[f"boots-{at}"] = replace(world.nodes[f"boots-{at}"], gpus=1)
    world.profile("pair", 1, workers=2).submit("g", "own", "pair", preemptible=False)
    assert waits(check(world, engine, Random(7))) == {"g": nodes}


@pytest.mark.covers("N23", "F09")
def test_nothing_is_evicted_for_a_node_that_boots(engine: Engine) -> None:
    """With `g`, `own` will use 3 of the 2 GPUs that it reserved: `old` makes way once `g` starts, not before."""
    world = cloud(gpus=1, reserved=2).team("rnd", reserved=1).run("old", "own", "one", "cloud-1")
    world.nodes["boots-0"] = replace(world.nodes["boots-0"], gpus=2)
    world.submit("g", "own", "two", preemptible=False).submit("asks", "rnd", "one")
    plan = check(world, engine, Random(7))
    assert (waits(plan), plan.evict) == ({"g": ["boots-0"]}, ())
    world.nodes["boots-0"] = replace(world.nodes["boots-0"], ready=True, ready_at=None)
    plan = check(world, engine, Random(7))
    assert (starts(plan), [(e.id, e.preemptor) for e in plan.evict]) == (["g"], [("old", "asks")])


@pytest.mark.covers("N23", "F09")
@pytest.mark.parametrize("boots", [True, False])
def test_gpus_kept_for_a_node_that_boots_need_no_cpu_beside_that_of_their_gang(boots: bool, engine: Engine) -> None:
    """With the gang's 1 core, the session leaves none: too little for two of `one`, if the GPUs were free for these."""
    world = cloud().profile("one", 1, cpu=2000).profile("gang", 2, workers=2, cpu=1000).profile("light", 0, cpu=3000)
    world.nodes = {name: replace(node, cpu=4000) for name, node in world.nodes.items()}
    if not boots:
        del world.nodes["boots-0"]
    world.submit("g", "own", "gang").session("s", "rnd", "light")
    plan = check(world, engine, Random(7))
    assert (starts(plan), waits(plan)) == ((["s"], {"g": ["boots-0", "cloud-1"]}) if boots else ([], {}))


@pytest.mark.covers("N23")
@pytest.mark.parametrize("kind", BOOTING)
def test_both_engines_decide_the_same_where_nodes_boot(kind: str) -> None:
    waiting = 0
    for seed in range(40):
        world = booting_world(kind, seed)
        snapshot = world.snapshot()
        plan = schedule(snapshot)
        differing = differences(plan, reference.schedule(snapshot))
        assert not differing, f"fast and reference differ in {kind} {seed}: {differing}"
        waiting += check_awaiting(world, plan)
    assert waiting


@pytest.mark.covers("N23")
@pytest.mark.parametrize("kind", CHECKED)
def test_plans_keep_the_invariants_where_nodes_boot(kind: str) -> None:
    for seed in range(12):
        check(booting_world(kind, seed), ENGINES["fast" if seed % 2 else "reference"], Random(7))


@pytest.mark.covers("N23")
def test_histories_in_which_nodes_boot_keep_the_invariants() -> None:
    awaited = 0
    for seed in range(6):
        history = BootingHistory(seed)
        history.live(15)
        awaited += history.awaited
    assert awaited


@pytest.mark.covers("N23")
def test_the_incremental_engine_plans_as_a_new_one_while_nodes_boot() -> None:
    waiting = 0
    for seed in range(20):
        random = Random(seed)
        world = random_world(random)
        follower = NodeFollower(world)
        for _ in range(15):
            random.choice([happen, happen, boot, end_boot])(world, random)
            follower.check(random)
            waiting += len(waits(schedule(world.snapshot())))
            world.now += random.choice([1, 5, 40])
    assert waiting


@pytest.mark.slow
@pytest.mark.covers("N23")
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", BOOTING)
def test_both_engines_decide_the_same_where_nodes_boot_at_length(kind: str) -> None:
    for seed in range(10_000, 10_000 + HISTORIES):
        world = booting_world(kind, seed)
        snapshot = world.snapshot()
        plan = schedule(snapshot)
        differing = differences(plan, reference.schedule(snapshot))
        assert not differing, f"fast and reference differ in {kind} {seed}: {differing}"
        check_awaiting(world, plan)
        if kind in CHECKED:
            check(booting_world(kind, seed), ENGINES["fast" if seed % 2 else "reference"], Random(7))


@pytest.mark.covers("N23")
@pytest.mark.parametrize(("kind", "seed"), ONCE_BROKEN)
def test_worlds_that_once_broke_an_invariant_keep_all(kind: str, seed: int, engine: Engine) -> None:
    plan = check(booting_world(kind, seed), engine, Random(7))
    assert not differences(plan, schedule(booting_world(kind, seed).snapshot()))
