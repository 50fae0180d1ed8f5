"""Forecasts of the earliest start of pending workloads."""

from __future__ import annotations

import pytest
from makeway_quota.engine import Node, Pool
from worlds import World


def full(limit: float | None = None) -> World:
    """Two jobs of two GPUs fill the node; `b` waits for two."""
    world = World().pool("p", gpus=4).team("a", limit=limit).team("b").profile("two", 2)
    world.jobs("a1 a2", "a", "two")
    world.step()
    for name in ("a1", "a2"):
        world.change(name, started_at=1000.0)
    world.now = 2000.0
    return world


def due(world: World, name: str) -> float | None:
    return next(w.not_before for w in world.plan().pending if w.id == name)


def test_past_durations_tell_when_room_appears() -> None:
    world = full().submit("b1", "b", "two")
    assert due(world, "b1") is None
    world.change("a1", expected=5000.0)
    assert due(world, "b1") == 6000
    world.change("a2", time_limit=3000.0)
    assert due(world, "b1") == 4000, "the limit of a2 is sooner"
    world.change("a1", expected=2500.0)
    assert due(world, "b1") == 3500
    world.now = 3600.0
    assert due(world, "b1") == 4000, "a1 should be over by now, so its end is unknown"


def test_a_duration_beyond_the_limit_ends_at_the_limit() -> None:
    world = full().submit("b1", "b", "two")
    world.change("a1", expected=9000.0, time_limit=4000.0)
    assert due(world, "b1") == 5000


def test_a_limit_falls_when_enough_of_the_team_has_ended() -> None:
    world = full(limit=4).submit("a3", "a", "two")
    assert world.reason("a3")[0] == "limit"
    assert due(world, "a3") is None
    world.change("a1", time_limit=3000.0)
    world.change("a2", time_limit=2000.0)
    assert due(world, "a3") == 3000


def test_room_for_a_gang_appears_node_by_node() -> None:
    world = World().pool("p", nodes=3, gpus=2).team("a").team("b").profile("two", 2).profile("gang", 2, workers=2)
    for at, name in enumerate(("a1", "a2", "a3")):
        world.run(name, "a", "two", f"p-{at + 1}", time_limit=1000.0 * (at + 1))
    world.submit("g", "b", "gang")
    assert due(world, "g") == world.workloads["a2"].started_at + 2000


@pytest.mark.covers("F72")
def test_only_autoscaled_pools_get_demand_for_nodes() -> None:
    world = World().pool("p", gpus=1).team("a", limit=2)
    world.pools["cloud"] = Pool("cloud", kind="autoscaled", max_nodes=4, node_gpus=1)
    world.profile("one", 1, pools=("p", "cloud")).jobs("a1 a2 a3", "a", "one")
    (scale,) = world.step().scale
    assert (scale.nodes, scale.workloads) == (1, ("a2",)), "a3 would be over the limit"


def test_work_that_never_borrows_requests_no_nodes() -> None:
    world = World().team("a", 1, weight="None").profile("one", 1, pools=("cloud",))
    world.pools["cloud"] = Pool("cloud", kind="autoscaled", max_nodes=4, node_gpus=1)
    world.nodes["c1"] = Node("c1", "cloud", 1)
    world.jobs("a1 a2", "a", "one")
    plan = world.step()
    assert [s.id for s in plan.start] == ["a1"]
    assert not plan.scale
