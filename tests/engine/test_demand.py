"""The demand of autoscaled pools: pending work that new machines could run, under limits, independent of reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from engine.booting_worlds import boot, booting_world, end_boot
from engine.demand_worlds import DemandFacts, world_that_grows
from engine.engines import ENGINES, differences
from engine.test_scaling import growing
from makeway_quota.engine import GPU, IncrementalEngine, Placed, Plan, QuotaLine, Terminating, reference, schedule
from makeway_quota.engine.plan import Demand
from worlds import World


def cloud(engine: str = "fast", **pool: Any) -> World:
    """Return a pool that grows and has no node yet, for teams a and b."""
    world = World().pool("cloud", nodes=0, kind="autoscaled", **pool).team("a").team("b")
    world.profile("one", 1).profile("two", 2)
    world.engine = ENGINES[engine]
    return world


def without_reasons(world: World) -> Plan:
    return IncrementalEngine(world.snapshot()).plan(world.now, why=False)


def ids(plan: Plan) -> list[str]:
    return [demand.id for demand in plan.demand]


@pytest.mark.covers("F49")
@pytest.mark.parametrize("max_nodes", [0, 4])
def test_the_demand_is_the_same_with_and_without_reasons(max_nodes: int) -> None:
    world = cloud(max_nodes=max_nodes, node_gpus=8).submit("j", "a", "two")
    plan, other = world.plan(), without_reasons(world)
    assert plan.demand == other.demand == (Demand("j", ("cloud",), 1, 2 * GPU, 0, 0),)
    assert plan.scale == other.scale
    assert [scale.nodes for scale in other.scale] == [1] * bool(max_nodes)
    assert not other.pending, "no reasons were asked for"


@pytest.mark.covers("F49")
@pytest.mark.parametrize("kind", [world_that_grows, growing])
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)], ids=["few", "many"])
def test_both_engines_find_the_same_demand_with_and_without_reasons(
    kind: Callable[[Random], World], seeds: range
) -> None:
    entries = 0
    for seed in seeds:
        world = kind(Random(seed))
        for _ in range(2):
            plan = schedule(world.snapshot())
            differing = differences(plan, reference.schedule(world.snapshot()))
            assert not differing, f"seed {seed}: fast and reference differ: {differing}"
            other = without_reasons(world)
            assert (plan.demand, plan.scale) == (other.demand, other.scale), f"seed {seed}"
            entries += len(plan.demand)
            world.apply(plan)
            world.now += 1
    assert entries > len(seeds)


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [world_that_grows, growing])
@pytest.mark.parametrize(
    "seeds", [range(100, 106), pytest.param(range(106, 130), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_demand_is_more_than_limits_allow_and_none_has_room(
    kind: Callable[[Random], World], seeds: range, engine: str
) -> None:
    entries = 0
    for seed in seeds:
        world = kind(Random(seed))
        plan = ENGINES[engine](world.snapshot())
        DemandFacts(world, plan).check()
        entries += len(plan.demand)
    assert entries > len(seeds)


@pytest.mark.covers("F49")
def test_a_standing_engine_finds_the_demand_of_a_new_one_and_is_left_as_it_was() -> None:
    for seed in range(10):
        world = world_that_grows(Random(seed))
        incremental = IncrementalEngine(world.snapshot())
        for _ in range(3):
            assert incremental.plan(world.now) == schedule(world.snapshot()), f"seed {seed}"
            assert incremental.plan(world.now, why=False).demand == schedule(world.snapshot()).demand, f"seed {seed}"


@pytest.mark.parametrize("seed", range(12))
def test_an_engine_that_keeps_the_order_finds_the_demand_of_a_new_one_as_work_comes_and_goes(seed: int) -> None:
    """Also where the work of a group is gone and comes back, and where some of it waits for nodes that boot."""
    random = Random(seed)
    world = booting_world("growing" if seed % 2 else "contended", 60_000 + seed)
    world.pools = {name: replace(pool, kind="autoscaled") for name, pool in world.pools.items()}
    engine, known, found = IncrementalEngine(world.snapshot()), dict(world.workloads), 0
    for at in range(25):
        if random.random() < 0.5:
            world.submit(f"more{at}", "a", random.choice(list(world.profiles)), owner=random.choice("xy"))
        elif waiting := world.named("pending"):
            world.workloads.pop(random.choice(waiting))
        boot(world, random) if random.random() < 0.2 else end_boot(world, random)
        snapshot = world.snapshot()
        now = {one.id: one for one in snapshot.workloads}
        engine.show(snapshot)
        engine.change([one for id, one in now.items() if known.get(id) != one], known.keys() - now.keys())
        known = now
        plan = schedule(snapshot)
        assert engine.plan(snapshot.now).demand == plan.demand
        found += len(plan.demand)
        world.apply(plan)
        world.now += random.choice([1, 40])
    assert found > 0


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pools", [("cloud", "spot"), ("spot", "cloud")])
def test_a_limit_counts_once_over_all_pools(engine: str, pools: tuple[str, ...]) -> None:
    world = cloud(engine).pool("spot", nodes=0, kind="autoscaled").team("a", limit=3)
    world.profile("one", 1, pools=pools).jobs("j1 j2 j3 j4 j5", "a", "one")
    assert [(demand.id, demand.pools) for demand in world.plan().demand] == [(f"j{at}", pools) for at in (1, 2, 3)]


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_limit_of_one_pool_holds_wherever_each_workload_runs(engine: str) -> None:
    """Two may run in the first pool, and four in the second: the third and fourth are asked for there only."""
    world = cloud(engine).pool("spot", nodes=0, kind="autoscaled")
    lines = QuotaLine(("cloud",), limit=2 * GPU), QuotaLine(("spot",), limit=4 * GPU)
    world.policies["a"] = replace(world.policies["a"], quotas=lines)
    world.profile("one", 1, pools=("cloud", "spot")).jobs("j1 j2 j3 j4 j5", "a", "one")
    both, second = ("cloud", "spot"), ("spot",)
    assert [(demand.id, demand.pools) for demand in world.plan().demand] == [
        ("j1", both),
        ("j2", both),
        ("j3", second),
        ("j4", second),
    ]


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_runs_and_what_the_departments_teams_ask_for_counts_on_its_limit(engine: str) -> None:
    world = cloud(engine).pool("p", gpus=2).team("top", limit=4)
    for name in ("a", "b"):
        world.policies[name] = replace(world.policies[name], parent="top")
    world.run("r", "a", "two", "p-1").jobs("a1 a2", "a", "one").jobs("b1 b2", "b", "one")
    assert len(world.plan().demand) == 2


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("never_borrows", ["weight", "preemptible"])
def test_work_that_never_borrows_asks_for_no_more_than_is_reserved(engine: str, never_borrows: str) -> None:
    world = cloud(engine).team("a", 3, weight="None" if never_borrows == "weight" else "Medium")
    preemptible = None if never_borrows == "weight" else False
    world.jobs("j1 j2 j3 j4 j5", "a", "one", preemptible=preemptible).jobs("b1 b2", "b", "one")
    assert sorted(ids(world.plan())) == ["b1", "b2", "j1", "j2", "j3"]


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_capacity_of_a_pool_is_not_exceeded(engine: str) -> None:
    world = cloud(engine, capacity=5 * GPU).jobs("j1 j2 j3", "a", "two")
    assert ids(world.plan()) == ["j1", "j2"]


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_demand_is_in_the_order_of_rights(engine: str) -> None:
    world = cloud(engine).team("b", 2)
    world.submit("later", "a", "one").submit("first", "a", "one", priority=1)
    world.jobs("b1 b2 b3", "b", "one")
    result = ids(world.plan())
    assert result[:2] == ["b1", "b2"] or result[:3] == ["b1", "b2", "b3"], "work in quota comes first"
    assert result.index("first") < result.index("later")


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_starts_or_is_nominated_is_no_demand(engine: str) -> None:
    world = cloud(engine).pool("p", gpus=4).team("b", 2)
    world.profile("here", 2, pools=("p", "cloud"))
    world.run("a1", "a", "here", "p-1").submit("starts", "a", "here").run("a2", "a", "here", "p-1")
    world.submit("evicts", "b", "here").submit("waits", "a", "here")
    plan = world.step()
    assert {eviction.preemptor for eviction in plan.evict} == {"evicts"}
    assert ids(plan) == ["starts", "waits"]
    world.end("a1", "a2")
    plan = world.plan()
    assert {start.id for start in plan.start} >= {"evicts"}
    assert not set(ids(plan)) & {start.id for start in plan.start}


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("late", [False, True])
def test_work_that_gets_the_gpus_of_terminating_work_is_no_demand(engine: str, late: bool) -> None:
    """One GPU is about to be free: the job with the best right to it asks for no machine, the others do."""
    world = cloud(engine).pool("p", gpus=1).profile("here", 1, pools=("p", "cloud"))
    ended = Terminating("old", (0,), deadline=world.now + (-100 if late else 30))
    world.nodes["p-1"] = replace(world.nodes["p-1"], terminating=(ended,))
    world.jobs("j1 j2", "a", "here").submit("first", "b", "here", priority=1)
    assert set(ids(world.plan())) == ({"j1", "j2", "first"} if late else {"j1", "j2"}), "what is stuck frees nothing"
    world.submit("other", "b", "here", priority=1).profile("local", 1, pools=("p",))
    world.submit("local", "b", "local", priority=2)
    assert set(ids(world.plan())) == {"j1", "j2", "first", "other"}, "one that needs no machine comes first"


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_work_that_a_hold_keeps_off_free_gpus_is_demand(engine: str) -> None:
    world = World(starvation_after=60).pool("p", gpus=4).pool("cloud", nodes=0, kind="autoscaled").team("a").team("b")
    world.engine = ENGINES[engine]
    world.profile("here", 1, pools=("p", "cloud"), time_limit=99999).profile("all", 4, pools=("p",))
    world.run("r", "b", "here", "p-1").submit("starves", "a", "all")
    world.now += 100
    world.submit("kept", "b", "here")
    plan = world.plan()
    assert not plan.start
    assert ids(plan) == ["kept"]
    assert without_reasons(world).demand == plan.demand


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_no_machine_is_asked_for_that_a_static_quota_would_keep_from_the_work(engine: str) -> None:
    world = cloud(engine).team("b", 2, lend=0).submit("j", "a", "one")
    assert not world.plan().demand, "two GPUs of the pool have to be there for team b first"
    world.submit("mine", "b", "two")
    assert ids(world.plan()) == ["mine"]
    world.pool("cloud", nodes=1, gpus=2, kind="autoscaled").end("mine")
    plan = world.plan()
    assert not plan.start
    assert ids(plan) == ["j"]


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sessions", [True, False])
def test_a_notebook_asks_only_for_machines_that_run_sessions(engine: str, sessions: bool) -> None:
    world = cloud(engine, sessions=sessions).team("a", 1).session("s", "a", "one").session("t", "a", "one")
    plan = world.plan()
    assert ids(plan) == (["s"] if sessions else []), "the second one is beyond the reservation"


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gang_asks_for_its_least_number_of_workers_with_their_shape(engine: str) -> None:
    world = cloud(engine).profile("gang", 2, workers=4, min_workers=3, cpu=4000, memory=512, models=("H100",))
    plan = world.submit("g", "a", "gang").plan()
    assert plan.demand == (Demand("g", ("cloud",), 3, 2 * GPU, 4000, 512, ("H100",)),)


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_may_not_start_is_no_demand(engine: str) -> None:
    world = cloud(engine).profile("closed", 1, policies=["b"]).submit("closed", "a", "closed")
    world.submit("paused", "a", "one", paused=True).submit("queue", "a", "two")
    world.paused = ("a/two",)
    world.profile("static", 1, pools=("p",)).pool("p", nodes=0).submit("elsewhere", "a", "static")
    assert not world.plan().demand


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_work_without_gpus_that_is_never_evicted_asks_where_no_guaranteed_gpu_needs_its_cpu(engine: str) -> None:
    world = cloud(engine).profile("cpu", 0, cpu=1000).submit("c", "a", "cpu", preemptible=False)
    assert ids(world.plan()) == ["c"]
    world.team("b", 2)
    assert not world.plan().demand, "guaranteed GPUs are not there yet, and may need the cores of the next machine"
    assert ids(world.submit("d", "a", "cpu").plan()) == ["d"], "a job that makes way may use them"


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_work_whose_first_pool_is_at_its_limit_asks_for_nodes_of_the_next(engine: str) -> None:
    """Its reason is the limit, in the first pool; the second one grows for it all the same."""
    world = World().pool("p", gpus=2).pool("cloud", nodes=0, kind="autoscaled", max_nodes=2, node_gpus=2)
    world.team("a", limit=2, pools=("p",)).profile("one", 1, pools=("p", "cloud"))
    world.engine = ENGINES[engine]
    world.run("r1", "a", "one", "p-1").run("r2", "a", "one", "p-1").submit("j", "a", "one")
    plan = world.plan()
    assert ids(plan) == ["j"]
    assert [(scale.pool, scale.nodes) for scale in plan.scale] == [("cloud", 1)]
    assert [(scale.pool, scale.nodes) for scale in without_reasons(world).scale] == [("cloud", 1)]


@pytest.mark.covers("F49")
def test_no_pool_that_grows_means_no_demand() -> None:
    world = World().pool("p", gpus=1).team("a").profile("one", 1).jobs("j1 j2", "a", "one")
    assert world.plan().demand == ()


@pytest.mark.covers("F49")
def test_finding_the_demand_changes_nothing_of_the_plan() -> None:
    """A pool that grows and serves no profile makes both plans but for the demand the same."""
    for seed in range(30):
        world = world_that_grows(Random(seed))
        world.pools = {name: replace(pool, kind="static") for name, pool in world.pools.items()}
        plain = world.plan()
        world.pools["unused"] = replace(world.pools["p"], name="unused", kind="autoscaled", capacity=None)
        assert world.plan() == plain


@pytest.mark.covers("F49")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_machine_that_has_become_a_node_ends_the_demand(engine: str) -> None:
    world = cloud(engine).jobs("j1 j2", "a", "one")
    assert ids(world.plan()) == ["j1", "j2"]
    world.pool("cloud", nodes=1, gpus=1, kind="autoscaled")
    plan = world.step()
    assert ([start.id for start in plan.start], ids(plan)) == (["j1"], ["j2"])
    assert [placed.node for placed in world.workloads["j1"].placement] == ["cloud-1"]
    assert world.workloads["j1"].placement == (Placed(0, "cloud-1", (0,)),)


@pytest.mark.parametrize("gpus", [1, 16])
def test_without_machines_to_launch_a_pool_that_may_not_grow_says_so(gpus: int) -> None:
    """An installation without deployments: nothing that no node can run waits for free GPUs."""
    world = World().pool("cloud", nodes=1, gpus=1, kind="autoscaled").team("a").profile("p", gpus)
    world.jobs("j1 j2", "a", "p")
    plain = IncrementalEngine(world.snapshot())
    plain.demand = False
    waiting = {waiting.id: waiting.code for waiting in plain.plan(world.now).pending}
    assert waiting["j2"] == "over_budget"
    assert "over_budget" not in {waiting.code for waiting in world.plan().pending}
