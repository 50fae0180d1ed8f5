"""What the engine keeps about the room in a pool is bounded, whatever work asks for."""

from __future__ import annotations

import pytest
from makeway_quota.engine import IncrementalEngine
from makeway_quota.engine.index import capacity
from worlds import World


@pytest.mark.covers("F13")
def test_forecasts_are_dropped_that_nothing_asks_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World().pool("p", gpus=2).team("a", reserved=2).profile("one", 1, time_limit=600)
    world.jobs("j k", "a", "one").step()
    engine = IncrementalEngine(world.snapshot())
    kept = engine.cluster.capacities
    for cpu in range(1, 150):
        world.submit("w", "a", "one", cpu=cpu)
        engine.change([world.workloads["w"]])
        engine.plan(world.now)
        world.end("w", state="cancelled")
        engine.change((), ["w"])
        del world.workloads["w"]
    assert 1 < len(kept._forecasts) <= capacity._KEEP + 1
    for _ in range(capacity._KEEP + 1):
        engine.plan(world.now)
    assert not kept._forecasts
    monkeypatch.setattr(capacity, "_MAX_ROWS", 0)
    world.jobs(" ".join(f"q{at}" for at in range(40)), "a", "one")
    for at in range(40):
        world.change(f"q{at}", cpu=at + 1)
    engine.change(world.workloads.values())
    plan = engine.plan(world.now)
    assert len(kept._forecasts) <= capacity._MIN_KEPT
    assert plan == world.plan(), "what was dropped is worked out again"
