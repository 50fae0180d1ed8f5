"""Work that may evict others only later says by which rule, and from when on it may (rules 5.3 and 5.8)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from engine.engines import ENGINES, differences
from engine.facts import Facts
from engine.mixed_worlds import contended_world, in_two_pools
from engine.properties import is_patient, nothing_makes_way_for_work_with_patience
from engine.test_reference import world_of
from makeway_quota.engine import Placed, Waiting, reference, schedule
from makeway_quota.engine.what_if import WhatIf
from makeway_quota.snapshot_file import read_snapshot
from worlds import World

CASE = Path(__file__).parent / "cases" / "22-min-runtime.yaml"


def borrowed(gpus: int = 2, **profile: float) -> World:
    """Return a node full of 1-GPU jobs of team a, one a second; b has reserved all of it."""
    world = World().pool("p", gpus=gpus).team("a").team("b", gpus)
    world.profile("one", 1, **profile).profile("two", 2, **profile)
    for at in range(gpus):
        world.run(f"a{at}", "a", "one", "p-1", owner="ana")
        world.change(f"a{at}", placement=(Placed(0, "p-1", (at,)),))
    return world


def waiting(world: World, name: str) -> Waiting:
    """Return why a workload waits."""
    return next(waiting for waiting in world.plan().pending if waiting.id == name)


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wait_for_min_runtime_has_a_code_of_its_own(engine: str) -> None:
    result = {waiting.id: waiting for waiting in ENGINES[engine](read_snapshot(CASE.read_text())).pending}
    assert (result["b1"].code, result["b1"].rule) == ("protected", "min_runtime")


@pytest.mark.covers("F82")
def test_a_wait_for_min_runtime_names_the_job_and_the_time() -> None:
    world = world_of(read_snapshot(CASE.read_text()))
    b1 = waiting(world, "b1")
    assert b1.not_before == (world.workloads["a1"].started_at or 0) + 600
    assert world.say(b1) == (
        "0 of the 1 GPU of pool p are free; this job needs 1. "
        "a's job a1 of ana (1 GPU) is protected from jobs for its first 10 min."
    )
    world.now = b1.not_before - 0.5
    assert not world.plan().evict
    world.now = b1.not_before
    assert [eviction.id for eviction in world.plan().evict] == ["a1"]


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_time_is_that_at_which_enough_jobs_are_protected_no_more(engine: str) -> None:
    """Of 4 jobs, b1 needs the GPUs of any 2: the second of them is old enough a second after the first."""
    world = borrowed(4, min_runtime=100)
    world.submit("b1", "b", "two")
    b1 = waiting(world, "b1")
    assert b1.not_before == (world.workloads["a1"].started_at or 0) + 100
    assert world.say(b1).endswith(
        "a's job a1 of ana (1 GPU) is protected from jobs for its first 1 min 40 s, and 1 other is, too."
    )
    world.engine = ENGINES[engine]
    assert b1.not_before is not None
    world.now = b1.not_before - 0.5
    assert waiting(world, "b1").code == "protected"
    world.now = b1.not_before
    assert {eviction.id for eviction in world.plan().evict} == {"a0", "a1"}


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_that_no_eviction_would_help_does_not_wait_for_one(engine: str) -> None:
    world = borrowed(min_runtime=100)
    world.policies["a"] = replace(world.policies["a"], quotas=world.policies["b"].quotas)
    world.engine = ENGINES[engine]
    world.submit("b1", "b", "two")
    assert waiting(world, "b1").code == "no_free_gpus", "a is within its reservation"
    world.submit("a9", "a", "one")
    assert waiting(world, "a9").code == "no_free_gpus", "over quota, without a right to evict"


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("preemptible", [True, False])
def test_a_wait_for_reclaim_after_ends_for_each_workload_at_its_own_time(preemptible: bool, engine: str) -> None:
    world = borrowed(3).profile("slow", 1, reclaim_after=60)
    world.engine = ENGINES[engine]
    world.submit("b1", "b", "slow", preemptible=preemptible)
    world.now += 10
    world.submit("b2", "b", "slow", preemptible=preemptible)
    plan = world.plan()
    assert {(w.code, w.rule) for w in plan.pending} == {("patience", "reclaim_after")}
    if engine == "fast":
        times = {w.id: w.not_before for w in plan.pending}
        assert times == {name: world.workloads[name].submitted_at + 60 for name in ("b1", "b2")}
    world.now = world.workloads["b1"].submitted_at + 60
    assert [eviction.preemptor for eviction in world.plan().evict] == ["b1"]


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", [*ENGINES, "offer"])
@pytest.mark.parametrize("preemptible", [None, True])
def test_a_notebook_evicts_at_once_where_a_job_of_its_profile_waits(engine: str, preemptible: bool | None) -> None:
    """`reclaim_after` is for jobs: a person waits for a notebook."""
    world = borrowed(3).profile("slow", 1, reclaim_after=60)
    if engine == "offer":
        what_if = WhatIf(world.snapshot())
        offers = [what_if.offer("b", "slow", kind, preemptible=preemptible) for kind in ("job", "session")]
        assert [(offer.code, offer.reason) for offer in offers] == [
            ("wait", "patience"),
            ("ready_after_reclaim", "reclaiming"),
        ]
        assert offers[0].numbers["reclaim_after"] == 60
        return
    world.engine = ENGINES[engine]
    world.submit("job", "b", "slow").session("s", "b", "slow", preemptible=preemptible)
    plan = world.plan()
    assert [eviction.preemptor for eviction in plan.evict] == ["s"]
    assert {waiting.id: waiting.code for waiting in plan.pending}["job"] == "patience"


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("runs", "code"), [(100, "protected"), (10, "patience")])
def test_of_both_waits_the_longer_one_is_told(runs: float, code: str, engine: str) -> None:
    world = borrowed(1, min_runtime=runs).profile("slow", 1, reclaim_after=60)
    world.submit("b1", "b", "slow")
    world.engine = ENGINES[engine]
    assert waiting(world, "b1").code == code
    world.engine = schedule
    until = max((world.workloads["a0"].started_at or 0) + runs, world.workloads["b1"].submitted_at + 60)
    assert waiting(world, "b1").not_before == until
    world.now = until
    assert world.plan().evict


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_higher_priority_of_the_team_waits_for_min_runtime_too(engine: str) -> None:
    """Whether nodes or the team's own limit are in the way."""
    for limit in (None, 2):
        world = World().pool("p", gpus=2 if limit is None else 4).team("a", 0, limit).profile("one", 1, min_runtime=100)
        world.engine = ENGINES[engine]
        world.run("a0", "a", "one", "p-1", priority=-1).run("a1", "a", "one", "p-1", priority=-1)
        world.submit("a9", "a", "one", priority=1)
        assert waiting(world, "a9").code == "protected"


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_that_others_would_move_for_waits_for_min_runtime_too(engine: str) -> None:
    world = World().pool("p", nodes=2, gpus=2).team("a", 2).team("b", 2)
    world.profile("one", 1, min_runtime=100).profile("two", 2)
    world.engine = ENGINES[engine]
    world.run("a0", "a", "one", "p-1").run("a1", "a", "one", "p-2")
    world.submit("b1", "b", "two")
    assert waiting(world, "b1").code == "protected"
    world.now += 200
    assert world.plan().move


def with_deferrals(world: World, random: Random) -> World:
    """Return a world in which every profile may protect, or wait."""
    for name, profile in world.profiles.items():
        spans = {"min_runtime": random.choice([0, 5, 20, 1000]), "reclaim_after": random.choice([0, 0, 5, 1000])}
        world.profiles[name] = replace(profile, **spans)  # type: ignore[arg-type]
    return world


@pytest.mark.covers("F82")
@pytest.mark.parametrize("part", range(2))
def test_both_engines_find_the_same_waits(part: int) -> None:
    codes = set()
    for seed in range(30 * part, 30 * part + 30):
        for world in (contended_world(Random(seed)), in_two_pools(contended_world(Random(seed)), Random(seed))):
            snapshot = with_deferrals(world, Random(seed + 1)).snapshot()
            plan = schedule(snapshot)
            differing = differences(plan, reference.schedule(snapshot))
            assert not differing, f"{seed}: fast and reference differ: {differing}"
            codes |= {waiting.code for waiting in plan.pending}
            for waiting in plan.pending:
                if waiting.code in ("protected", "patience"):
                    assert waiting.not_before is not None
                    assert waiting.not_before > snapshot.now, f"{seed}: the wait of {waiting} is over"
    assert {"protected", "patience"} <= codes


@pytest.mark.covers("F82")
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_makes_way_for_work_with_patience_in_random_worlds(engine: str) -> None:
    evicted = 0
    for seed in range(200, 230):
        for world in (contended_world(Random(seed)), in_two_pools(contended_world(Random(seed)), Random(seed))):
            with_deferrals(world, Random(seed + 1))
            facts, plan = Facts(world.snapshot()), ENGINES[engine](world.snapshot())
            nothing_makes_way_for_work_with_patience(facts, plan)
            evicted += bool(plan.evict or plan.move) and any(is_patient(facts, facts.live[w.id]) for w in plan.pending)
    assert evicted > 5
