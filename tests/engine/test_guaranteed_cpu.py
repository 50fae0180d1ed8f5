"""Sessions and jobs that never make way leave free guaranteed GPUs the CPU and memory that they need (rule 2)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.cpu_worlds import cpu_world, happen_on_cpus
from engine.engines import ENGINES
from engine.histories import HISTORIES
from engine.properties import check
from engine.test_reference import compare
from makeway_quota.engine import Plan, QuotaLine
from makeway_quota.engine.snapshot import LIVE
from worlds import World

ROWS = ("F09", "F24", "F26", "F34")


def small_pool(reserved: float = 4, **node: int) -> World:
    """Return a world with a node of 4 GPUs and 8 cores, where a GPU needs 2 cores and a session without GPUs 4."""
    world = World().pool("p", gpus=4, **(node or {"cpu": 8000})).team("a", reserved, title="Alpha").team("b")
    world.profile("gpu", 1, cpu=2000, memory=0).profile("cpu", 0, cpu=4000)
    return world


def plan_of(world: World, engine: str) -> Plan:
    world.engine = ENGINES[engine]
    return check(world, world.engine, Random(7))


def starts(plan: Plan) -> set[str]:
    return {start.id for start in plan.start}


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("work", [{"kind": "session"}, {"kind": "job", "preemptible": False}])
def test_work_that_never_makes_way_leaves_free_guaranteed_gpus_their_cpu(engine: str, work: dict[str, object]) -> None:
    world = small_pool().submit("s", "b", "cpu", **work)
    plan = plan_of(world, engine)
    assert not plan.start
    assert [(w.id, w.code, w.rule) for w in plan.pending] == [("s", "held", "guaranteed_gpus")]


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("work", [{"kind": "session", "preemptible": True}, {"kind": "job"}])
def test_work_that_makes_way_starts_beside_free_guaranteed_gpus(engine: str, work: dict[str, object]) -> None:
    assert starts(plan_of(small_pool().submit("s", "b", "cpu", **work), engine)) == {"s"}


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_session_without_gpus_takes_what_no_guaranteed_gpu_needs(engine: str) -> None:
    world = small_pool(reserved=2).session("s1", "b", "cpu").session("s2", "b", "cpu")
    assert starts(plan_of(world, engine)) == {"s1"}
    world.session("t1", "a", "gpu").session("t2", "a", "gpu")
    plan = plan_of(world, engine)
    assert starts(plan) == {"t1", "t2"}
    assert [(w.id, w.code) for w in plan.pending] == [("s2", "outranked")]


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_and_pods_are_left_like_cpu(engine: str) -> None:
    world = small_pool(memory=8192)
    world.profile("gpu", 1, memory=2048).profile("cpu", 0, memory=1024).session("s", "b", "cpu")
    assert not plan_of(world, engine).start
    world = small_pool().profile("gpu", 1).profile("cpu", 0).session("s", "b", "cpu")
    world.nodes["p-1"] = replace(world.nodes["p-1"], pods=4)
    assert not plan_of(world, engine).start


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_session_without_gpus_goes_to_a_node_whose_gpus_need_nothing_of_it(engine: str) -> None:
    world = small_pool()
    world.pool("p", nodes=3, gpus=4, cpu=8000)
    world.nodes["p-2"] = replace(world.nodes["p-2"], cpu=12000)
    world.nodes["p-3"] = replace(world.nodes["p-3"], gpus=0)
    world.team("a", 8).session("s1", "b", "cpu").session("s2", "b", "cpu").session("s3", "b", "cpu")
    world.session("s4", "b", "cpu")
    plan = plan_of(world, engine)
    assert {s.placement[0].node for s in plan.start} == {"p-2", "p-3"}
    assert len(plan.start) == 3
    assert [w.id for w in plan.pending] == ["s4"]


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", ["pack", "spread"])
def test_free_gpus_that_nothing_guarantees_keep_no_cpu(engine: str, strategy: str) -> None:
    world = small_pool(reserved=0).session("s1", "b", "cpu").session("s2", "b", "cpu")
    world.pools["p"] = replace(world.pools["p"], strategy=strategy)
    assert starts(plan_of(world, engine)) == {"s1", "s2"}


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_gpus_that_a_department_guarantees_count_once(engine: str) -> None:
    world = small_pool(reserved=2, cpu=12000).team("top", 2)
    for name in ("a", "b"):
        world.policies[name] = replace(world.policies[name], parent="top")
    assert starts(plan_of(world.session("s1", "b", "cpu").session("s2", "b", "cpu"), engine)) == {"s1", "s2"}
    world.policies["top"] = replace(world.policies["top"], quotas=(QuotaLine((), 4000),))
    world.end("s2", state="cancelled")
    assert not plan_of(world.session("s3", "b", "cpu"), engine).start


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gang_without_gpus_leaves_each_node_what_its_gpus_need(engine: str) -> None:
    world = small_pool()
    world.pool("p", nodes=2, gpus=4, cpu=12000).team("a", 8)
    world.profile("cpus", 0, cpu=4000, workers=2).submit("g", "b", "cpus", preemptible=False)
    plan = plan_of(world, engine)
    assert [[placed.node for placed in start.placement] for start in plan.start] == [["p-1", "p-2"]]


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_gpus_that_are_about_to_be_free_keep_their_cpu(engine: str) -> None:
    world = small_pool().profile("bare", 4).run("j", "b", "bare", "p-1")
    world.change("j", state="checkpointing", deadline=world.now + 30)
    assert not plan_of(world.session("s", "b", "cpu"), engine).start


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_node_is_requested_for_work_that_its_own_gpus_would_keep_out(engine: str) -> None:
    world = small_pool(reserved=8).session("s", "b", "cpu")
    world.pools["p"] = replace(world.pools["p"], kind="autoscaled", max_nodes=3, node_gpus=4, node_cpu=8000)
    plan = plan_of(world, engine)
    assert (plan.scale, plan.pending[0].code) == ((), "held")
    world.pools["p"] = replace(world.pools["p"], node_cpu=12000)
    plan = plan_of(world, engine)
    assert [(scale.nodes, scale.workloads) for scale in plan.scale] == [(1, ("s",))]


@pytest.mark.covers("F40")
def test_the_reason_names_the_gpus_their_teams_and_the_profile() -> None:
    assert small_pool().session("s", "b", "cpu").reason("s") == (
        "held",
        "The free CPU and memory of pool p are kept for 4 free GPUs guaranteed to Alpha (2 cores for each); "
        "this notebook needs 4 cores.",
    )


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_session_in_quota_finds_cpu_whatever_sessions_without_gpus_came_before(engine: str) -> None:
    world = small_pool()
    for at in range(6):
        plan_of(world.session(f"s{at}", "b", "cpu"), engine)
    for at in range(4):
        assert starts(plan_of(world.session(f"t{at}", "a", "gpu"), engine)) == {f"t{at}"}


def live_through(seed: int, events: int) -> None:
    """Compare both engines along a random history, and check the invariants of one of them."""
    random = Random(seed)
    world = cpu_world(random)
    for _ in range(events):
        happen_on_cpus(world, random)
        compare(world)
        check(world, ENGINES["fast" if seed % 2 else "reference"], Random(7))
        world.now += random.choice([1, 5, 600])
        world.workloads = {i: w for i, w in world.workloads.items() if w.state in LIVE}


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("part", range(4))
def test_free_guaranteed_gpus_keep_their_cpu_over_random_histories(part: int) -> None:
    for seed in range(2 * part, 2 * part + 2):
        live_through(seed, 25)


@pytest.mark.covers(*ROWS)
def test_gpus_that_are_held_for_other_work_keep_their_cpu() -> None:
    live_through(28, 25)


@pytest.mark.slow
@pytest.mark.covers(*ROWS)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", range(20))
def test_free_guaranteed_gpus_keep_their_cpu_at_length(part: int) -> None:
    many = max(1, HISTORIES // 20)
    for seed in range(10**6 + part * many, 10**6 + (part + 1) * many):
        live_through(seed, 40)
