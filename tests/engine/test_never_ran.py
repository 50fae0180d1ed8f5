"""What is admitted and has not run yet loses nothing, and is the first victim."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from engine.engines import ENGINES, differences
from engine.histories import happen
from engine.mixed_worlds import contended_world, mixed_world
from makeway_quota.engine import IncrementalEngine, reference, schedule
from worlds import World


@pytest.mark.covers("F16")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["newest", "cheapest"])
def test_what_has_not_run_yet_is_the_first_victim(engine: str, order: str) -> None:
    world = World(victim_order=order).pool("p", nodes=2, gpus=2).team("a", priority=1).team("b").team("c", reserved=4)
    world.profile("one", 1)
    world.jobs("old", "a", "one", priority=1).jobs("b1 b2 b3", "b", "one", priority=-1).reconcile()
    world.change("old", state="starting")
    world.engine = ENGINES[engine]
    assert [e.id for e in world.submit("c1", "c", "one").step().evict] == ["old"], "its pod is not placed"
    world.release().reconcile()
    assert [e.id for e in world.submit("c2", "c", "one").step().evict] == ["b3"], "all of the others run"


@pytest.mark.covers("F16")
@pytest.mark.parametrize("engine", ENGINES)
def test_more_gpus_of_what_has_not_run_go_before_fewer_of_what_runs(engine: str) -> None:
    world = World().pool("p", gpus=4).team("a").team("b", reserved=4).profile("one", 1).profile("three", 3)
    world.jobs("small", "a", "one").jobs("large", "a", "three").reconcile()
    world.change("large", state="starting", started_at=0.0)
    world.engine = ENGINES[engine]
    assert [e.id for e in world.submit("b1", "b", "one").step().evict] == ["large"]


@pytest.mark.covers("F18")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_guaranteed_notebook_that_starts_is_no_victim(engine: str) -> None:
    world = World().pool("p", gpus=2).team("a", reserved=1).team("b", reserved=1).profile("one", 1)
    world.session("s", "a", "one").jobs("a1", "a", "one").reconcile()
    world.change("s", state="starting")
    world.engine = ENGINES[engine]
    assert [e.id for e in world.submit("b1", "b", "one").step().evict] == ["a1"]


@pytest.mark.parametrize("made", [mixed_world, contended_world])
@pytest.mark.parametrize("seed", range(6))
def test_the_engines_agree_while_workloads_start_and_run(made: Callable[[Random], World], seed: int) -> None:
    random = Random(seed)
    world = made(random)
    kept, shown = IncrementalEngine(world.snapshot(), keeps_bounds=seed % 2 == 0), dict(world.workloads)
    for _ in range(8):
        for name in (*world.named("running"), *world.named("starting")):
            world.change(name, state=random.choice(["running", "starting"]))
        snapshot = world.snapshot()
        kept.show(snapshot)
        now = world.workloads
        kept.change([w for id, w in now.items() if shown.get(id) is not w], [id for id in shown if id not in now])
        shown = dict(now)
        plan = schedule(snapshot)
        assert differences(plan, reference.schedule(snapshot)) == {}
        assert differences(kept.plan(world.now), plan) == {}
        world.apply(plan)
        world.release(*world.named("checkpointing")[:2])
        happen(world, random)
        world.now += random.choice([1, 60])
