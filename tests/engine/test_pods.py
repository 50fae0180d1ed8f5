"""Nodes run a number of pods at most, whatever else is free there: ours, foreign ones, and those that terminate."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.engines import ENGINES, differences
from engine.histories import happen
from engine.mixed_worlds import contended_world, in_two_pools, mixed_world, with_a_department, with_few_pods, with_holds
from engine.properties import check
from makeway_quota.engine import Plan, Snapshot, Terminating, reference, schedule
from makeway_quota.snapshot_file import read_snapshot, write_snapshot
from worlds import World


def node_of_pods(engine: str = "fast", pods: int = 110, gpus: int = 8, **more: int) -> World:
    """Return one node that runs so many pods, for teams a (reserves all GPUs) and b."""
    world = World().pool("p", gpus=gpus).team("a", gpus).team("b")
    world.nodes["p-1"] = replace(world.nodes["p-1"], pods=pods, **more)
    world.profile("one", 1).profile("none", 0).profile("two", 1, workers=2)
    world.engine = ENGINES[engine]
    return world


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gpus", [0, 8])
def test_work_without_gpus_waits_where_the_node_runs_all_pods_that_it_may(engine: str, gpus: int) -> None:
    world = node_of_pods(engine, gpus=gpus, foreign_pods=10)
    for at in range(150):
        world.submit(f"j{at:03}", "b", "none")
    plan = world.step()
    assert len(plan.start) == 100
    assert len(plan.pending) == 50
    plan = world.plan()
    assert not plan.acts
    if engine == "fast":
        assert world.say(plan.pending[0]) == (
            "p-1 of pool p runs as many pods as Kubernetes allows there; this job needs one more pod."
        )
    world.end("j000", "j001")
    assert [start.id for start in world.step().start] == ["j100", "j101"]


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gang_needs_a_pod_for_each_worker(engine: str) -> None:
    world = node_of_pods(engine, pods=2, foreign_pods=1).submit("g", "a", "two")
    plan = world.step()
    assert not plan.start
    assert [waiting.code for waiting in plan.pending] == ["fragmented"]
    world.nodes["p-1"] = replace(world.nodes["p-1"], foreign_pods=0)
    assert [start.id for start in world.step().start] == ["g"]


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_for_more_pods_than_any_node_runs_is_too_large(engine: str) -> None:
    world = node_of_pods(engine, pods=1).submit("g", "a", "two")
    assert [waiting.code for waiting in world.plan().pending] == ["too_large"]


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_without_gpus_makes_way_where_its_pod_is_all_that_keeps_guaranteed_gpus_idle(engine: str) -> None:
    world = node_of_pods(engine, pods=2)
    world.submit("b1", "b", "none").submit("b2", "b", "none").reconcile()
    plan = world.submit("a1", "a", "one").step()
    assert [eviction.id for eviction in plan.evict] == ["b2"]
    world.release().reconcile()
    assert "a1" in world.named()


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_pods_that_terminate_count_until_they_are_gone(engine: str) -> None:
    world = node_of_pods(engine, pods=2).submit("b1", "b", "none").submit("b2", "b", "none")
    ended = Terminating("old", deadline=world.now + 10, pods=1)
    world.nodes["p-1"] = replace(world.nodes["p-1"], terminating=(ended,))
    assert len(world.step().start) == 1
    world.nodes["p-1"] = replace(world.nodes["p-1"], terminating=())
    assert len(world.step().start) == 1


def test_a_snapshot_file_has_the_pods_of_nodes() -> None:
    world = node_of_pods(pods=20, foreign_pods=3)
    ended = Terminating("old", deadline=5.0, pods=1)
    world.nodes["p-1"] = replace(world.nodes["p-1"], terminating=(ended,))
    assert read_snapshot(write_snapshot(world.snapshot())).nodes == world.snapshot().nodes


def compared(snapshot: Snapshot, seed: object) -> Plan:
    plan = schedule(snapshot)
    differing = differences(plan, reference.schedule(snapshot))
    assert not differing, f"{seed}: fast and reference differ: {differing}"
    return plan


@pytest.mark.covers("F82")
@pytest.mark.parametrize("part", range(2))
def test_both_engines_decide_the_same_where_nodes_run_few_pods(part: int) -> None:
    for seed in range(30 * part, 30 * part + 30):
        random = Random(seed + 5)
        compared(with_few_pods(contended_world(Random(seed)), random).snapshot(), seed)
        nested = with_a_department(in_two_pools(contended_world(Random(seed)), Random(seed)), random)
        compared(with_few_pods(with_holds(nested, random), random).snapshot(), seed)


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_plan_keeps_the_invariants_where_nodes_run_few_pods(engine: str) -> None:
    for seed in range(30):
        check(with_few_pods(contended_world(Random(seed)), Random(seed + 5)), ENGINES[engine], Random(7))


@pytest.mark.covers("F82")
def test_both_engines_decide_the_same_along_histories_on_nodes_of_few_pods() -> None:
    for seed in range(3):
        random = Random(seed)
        world = with_few_pods(mixed_world(random), random)
        for _ in range(15):
            happen(world, random)
            world.apply(compared(world.snapshot(), seed))
            world.now += random.choice([1, 5, 600])
