"""Nodes where no session runs, as those of a second backend: notebooks are planned on the others only."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.engines import ENGINES, differences
from engine.histories import happen, random_world
from engine.mixed_worlds import (
    contended_world,
    for_jobs_only,
    in_two_pools,
    mixed_world,
    with_a_department,
    with_few_pods,
    with_holds,
)
from engine.properties import check
from makeway_quota.engine import IncrementalEngine, Placed, Plan, Snapshot, WhatIf, reference, schedule
from makeway_quota.snapshot_file import read_snapshot, write_snapshot
from worlds import World


def two_backends(engine: str = "fast", **second: int) -> World:
    """Return one pool with a node for everything, `p-2`, and one for jobs only, `p-1`."""
    world = World().pool("p", nodes=2, gpus=2).team("a", 4).team("b")
    world.nodes["p-1"] = replace(world.nodes["p-1"], sessions=False)
    world.nodes["p-2"] = replace(world.nodes["p-2"], **second)
    world.profile("none", 0, cpu=1000).profile("one", 1).profile("half", 0.5).profile("two", 2)
    world.engine = ENGINES[engine]
    return world


@pytest.mark.covers("F13")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("profile", ["none", "half", "one", "two"])
@pytest.mark.parametrize("strategy", ["pack", "spread", "fill"])
@pytest.mark.parametrize("preemptible", [None, True])
def test_a_notebook_starts_where_sessions_run(
    engine: str, profile: str, strategy: str, preemptible: bool | None
) -> None:
    world = two_backends(engine)
    world.pools["p"] = replace(world.pools["p"], strategy=strategy)
    (start,) = world.session("s", "a", profile, preemptible=preemptible).plan().start
    assert [placed.node for placed in start.placement] == ["p-2"]


@pytest.mark.covers("F13")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_notebook_evicts_where_sessions_run_and_nowhere_else(engine: str) -> None:
    world = two_backends(engine)
    world.run("near", "b", "two", "p-2").run("far", "b", "two", "p-1").session("s", "a", "one")
    plan = world.step()
    assert [eviction.id for eviction in plan.evict] == ["near"]
    assert [placed.node for waiting in plan.pending for placed in waiting.nomination] == ["p-2"]
    (start,) = world.release("near").step().start
    assert (start.id, start.placement[0].node) == ("s", "p-2")


@pytest.mark.covers("F13")
@pytest.mark.parametrize("engine", ENGINES)
def test_no_job_is_evicted_for_a_notebook_that_could_not_start_there(engine: str) -> None:
    world = two_backends(engine).run("far", "b", "two", "p-1").session("mine", "a", "two")
    assert [start.id for start in world.step().start] == ["mine"]
    plan = world.session("s", "a", "one").plan()
    assert not plan.acts
    assert [(waiting.id, waiting.code) for waiting in plan.pending] == [("s", "no_free_gpus")]


@pytest.mark.covers("F13", "F40")
@pytest.mark.parametrize("engine", ENGINES)
def test_idle_gpus_for_jobs_are_not_counted_as_free_for_a_notebook(engine: str) -> None:
    world = two_backends(engine).session("mine", "a", "two")
    world.step()
    plan = world.session("s", "a", "one").plan()
    assert [(waiting.id, waiting.code) for waiting in plan.pending] == [("s", "no_free_gpus")]
    if engine == "fast":
        assert (plan.pending[0].numbers["free"], plan.pending[0].numbers["total"]) == (0, 2)
        assert world.say(plan.pending[0]).startswith("0 of the 2 GPUs of pool p are free")


@pytest.mark.covers("F13", "F40")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("profile", ["none", "one"])
def test_a_notebook_that_no_node_may_run_says_so(engine: str, profile: str) -> None:
    world = two_backends(engine, sessions=False).session("s", "a", profile)
    (waiting,) = world.plan().pending
    assert (waiting.code, waiting.rule) == ("too_large", "place")
    if engine == "fast":
        assert world.say(waiting) == "Only jobs run on the nodes of pool p, and this is a notebook."


@pytest.mark.covers("F13", "F40")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_largest_node_for_a_notebook_is_one_where_it_may_run(engine: str) -> None:
    world = two_backends(engine, gpus=1).session("s", "a", "two")
    (waiting,) = world.plan().pending
    assert waiting.code == "too_large"
    if engine == "fast":
        assert waiting.numbers["largest_node"] == 1


@pytest.mark.covers("F13", "N03")
def test_no_offer_for_a_notebook_counts_on_nodes_for_jobs() -> None:
    world = two_backends()
    for sessions, code in ((True, "ready_now"), (False, "refused"), (True, "ready_now")):
        world.nodes["p-2"] = replace(world.nodes["p-2"], sessions=sessions)
        for profile in ("none", "one"):
            assert WhatIf(world.snapshot()).offer("a", profile, owner="ana").code == code
            assert WhatIf(world.snapshot()).offer("a", profile, "job", owner="ana").code == "ready_now"
    asked = WhatIf(world.snapshot())
    for sessions, code in ((False, "refused"), (True, "ready_now")):  # the same questions to a standing engine
        world.nodes["p-2"] = replace(world.nodes["p-2"], sessions=sessions)
        asked.change(world.snapshot(), nodes=[world.nodes["p-2"]])
        assert [asked.offer("a", profile, owner="ana").code for profile in ("none", "half", "one", "two")] == [code] * 4


@pytest.mark.covers("F13", "N03")
def test_an_offer_for_a_notebook_names_victims_where_it_may_run() -> None:
    world = two_backends().run("near", "b", "two", "p-2").run("far", "b", "two", "p-1")
    offer = WhatIf(world.snapshot()).offer("a", "one", owner="ana")
    assert (offer.code, [victim.id for victim in offer.victims]) == ("ready_after_reclaim", ["near"])


@pytest.mark.covers("F13")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_nomination_is_dropped_where_its_node_is_for_jobs_by_now(engine: str) -> None:
    world = two_backends(engine).run("near", "b", "two", "p-2").run("far", "b", "two", "p-1").session("s", "a", "one")
    assert [eviction.id for eviction in world.step().evict] == ["near"]
    world.end("far")
    world.nodes["p-2"] = replace(world.nodes["p-2"], sessions=False)
    world.nodes["p-1"] = replace(world.nodes["p-1"], sessions=True)
    (start,) = world.step().start
    assert (start.id, start.placement[0].node) == ("s", "p-1")


@pytest.mark.covers("F13")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_session_stays_on_its_node_when_that_becomes_one_for_jobs(engine: str) -> None:
    world = two_backends(engine).session("s", "a", "one")
    world.step()
    world.nodes["p-2"] = replace(world.nodes["p-2"], sessions=False)
    plan = world.plan()
    assert (plan.keep, plan.acts) == (("s",), False)


@pytest.mark.covers("F13")
def test_the_incremental_engine_follows_nodes_that_are_opened_to_sessions_and_closed() -> None:
    for seed in range(30):
        random = Random(seed)
        world = random_world(random)
        incremental = IncrementalEngine(world.snapshot())
        for _ in range(8):
            for_jobs_only(world, random)
            happen(world, random)
            incremental.show(world.snapshot())
            known = incremental.cluster.workloads
            incremental.change(world.workloads.values(), known.keys() - world.workloads.keys())
            plan = incremental.plan(world.now)
            assert plan == schedule(world.snapshot())
            world.apply(plan)
            world.now += 1


def _same(snapshot: Snapshot) -> Plan:
    plan = schedule(snapshot)
    differing = differences(plan, reference.schedule(snapshot))
    assert not differing, f"fast and reference differ: {differing}"
    return plan


@pytest.mark.covers("F13", "F14", "F15", "F16")
@pytest.mark.parametrize("part", range(4))
def test_both_engines_decide_the_same_where_some_nodes_are_for_jobs(part: int) -> None:
    sessions = 0
    for seed in range(40 * part, 40 * part + 40):
        random = Random(seed)
        world = with_few_pods(mixed_world(random), random) if seed % 3 == 0 else contended_world(random)
        if seed % 3 == 1:
            world = with_holds(in_two_pools(world, random), random)
        elif seed % 3 == 2:
            with_a_department(world, random)
        for _ in range(4 if seed % 3 == 0 else 1):
            for_jobs_only(world, random)
            if seed % 3 == 0:
                happen(world, random)
            plan = _same(world.snapshot())
            world.apply(plan)
            world.now += 1
            sessions += sum(world.workloads[start.id].kind == "session" for start in plan.start)
    assert sessions > 10


@pytest.mark.covers("F13", "F14", "F15", "F16")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_plan_keeps_the_invariants_where_some_nodes_are_for_jobs(engine: str) -> None:
    for seed in range(30):
        random = Random(seed)
        world = contended_world(random)
        check(for_jobs_only(world, random), ENGINES[engine], Random(7))


@pytest.mark.covers("F13")
def test_a_snapshot_file_has_the_nodes_for_jobs_and_older_ones_have_none() -> None:
    world = two_backends()
    text = write_snapshot(world.snapshot())
    assert text.count("sessions: false") == 1
    assert read_snapshot(text) == world.snapshot()
    older = read_snapshot(text.replace("sessions: false", "ready: true"))
    assert [node.sessions for node in older.nodes] == [True, True]


@pytest.mark.covers("F13")
def test_a_placement_of_a_session_counts_where_it_was_planned_before() -> None:
    """What an older plan has put on a node for jobs is counted there, and nothing else gets its GPU."""
    world = two_backends().session("s", "a", "two")
    world.change("s", state="running", placement=(Placed(0, "p-1", (0, 1)),))
    (start,) = world.submit("j", "a", "two").plan().start
    assert start.placement[0].node == "p-2"
