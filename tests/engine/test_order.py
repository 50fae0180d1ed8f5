"""The order of starts and the order of evictions, one key of each at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import World


def teams(*names: str, reserved: float = 0, gpus: int = 1, **settings: object) -> World:
    """One node, teams that are alike, a profile of one GPU."""
    world = World(**settings).pool("p", gpus=gpus)
    for name in names:
        world.team(name, reserved=reserved)
    return world.profile("one", 1)


@pytest.mark.covers("F31")
@pytest.mark.parametrize("reserved", [0, 1])
def test_the_policy_with_the_higher_priority_goes_first(reserved: float) -> None:
    world = teams("a", "b", reserved=reserved)
    world.policies["b"] = replace(world.policies["b"], priority=1)
    plan = world.submit("a1", "a", "one").submit("b1", "b", "one").step()
    assert [s.id for s in plan.start] == ["b1"]


def test_the_workload_with_the_higher_priority_goes_first() -> None:
    world = teams("a", in_team_preemption=False)
    world.submit("low", "a", "one", priority=-1).submit("high", "a", "one", priority=1)
    assert [s.id for s in world.step().start] == ["high"]


def test_of_equals_the_oldest_goes_first() -> None:
    world = teams("a").submit("z", "a", "one").submit("y", "a", "one")
    assert [s.id for s in world.step().start] == ["z"]


def test_rank_in_the_profile_goes_before_share_and_age() -> None:
    world = teams("a", "b").profile("one", 1, policies=["b", "a"])
    plan = world.submit("a1", "a", "one").submit("b1", "b", "one").step()
    assert [s.id for s in plan.start] == ["b1"]


@pytest.mark.covers("F31")
def test_lowest_comes_last_whatever_its_rank() -> None:
    world = teams("a", "z")
    world.policies["z"] = replace(world.policies["z"], weight="Lowest")
    world.pools["p"] = replace(world.pools["p"], profiles=("first",))
    world.profile("first", 1, policies=["z", "a"])
    plan = world.submit("z1", "z", "first").submit("a1", "a", "one").step()
    assert [s.id for s in plan.start] == ["a1"]


def test_the_team_that_is_most_over_its_share_is_evicted_first() -> None:
    world = teams("a", "c", gpus=8).team("b", reserved=4).profile("one", 1)
    world.jobs("a1 a2 a3 a4 a5", "a", "one").reconcile()
    world.jobs("c1 c2 c3", "c", "one").reconcile()
    assert [e.id for e in world.submit("b1", "b", "one").step().evict] == ["a5"], "c3 started last, but a borrows more"


def test_the_weight_divides_what_is_over() -> None:
    world = teams("a", "c", gpus=8).team("b", reserved=4).profile("one", 1)
    world.policies["a"] = replace(world.policies["a"], weight="High")
    world.policies["c"] = replace(world.policies["c"], weight="Low")
    world.jobs("a1 a2 a3 a4 a5", "a", "one").jobs("c1 c2 c3", "c", "one").reconcile()
    assert [e.id for e in world.submit("b1", "b", "one").step().evict] == ["c3"]


@pytest.mark.covers("F09", "F41")
def test_sessions_are_not_moved() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=4).team("b", reserved=4)
    world.profile("two", 2).profile("four", 4)
    world.run("s1", "a", "two", "p-1", kind="session").run("s2", "a", "two", "p-2", kind="session")
    plan = world.submit("b1", "b", "four").step()
    assert not plan.move
    assert [(w.id, w.code) for w in plan.pending] == [("b1", "fragmented")]


def test_an_elastic_gang_does_not_grow_where_work_in_quota_waits() -> None:
    world = World().pool("p", nodes=3, gpus=4).team("a").team("b", reserved=13)
    world.profile("one", 1).profile("wide", 4, workers=3).profile("elastic", 4, workers=2, min_workers=1)
    world.session("s", "b", "one").step()
    world.submit("b1", "b", "wide").submit("g", "a", "elastic")
    plan = world.step()
    assert [(s.id, len(s.placement)) for s in plan.start] == [("g", 1)]
    world.end("b1", "g").submit("g2", "a", "elastic")
    assert [(s.id, len(s.placement)) for s in world.step().start] == [("g2", 2)]
