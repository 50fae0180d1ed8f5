"""Limits, reservations and preemptors that reach over several pools: the invariants, and both engines alike."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.cascades import come_to_rest
from engine.engines import ENGINES
from engine.histories import HISTORIES
from engine.pooled_worlds import pooled_world
from engine.properties import check
from engine.test_reference import compare
from worlds import World

ROWS = ("F14", "F15", "F16", "F17")
WRONG_ONCE = (10, 50, 61, 123, 224, 282, 458, 475, 619, 834, 1000395, 8000285)
"""Worlds where work in quota once waited for ever, an eviction was needless or led to another, or a check said so."""


def hold_in_all_ways(seed: int) -> None:
    """Compare the engines, and check the invariants of one of them in one plan and until the world comes to rest."""
    engine = ENGINES["fast" if seed % 2 else "reference"]
    compare(pooled_world(Random(seed)))
    check(pooled_world(Random(seed)), engine, Random(7))
    come_to_rest(pooled_world(Random(seed)), engine)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("part", range(4))
def test_the_invariants_hold_over_several_pools(part: int) -> None:
    for seed in range(10 * part, 10 * part + 10):
        hold_in_all_ways(seed)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("seed", WRONG_ONCE)
def test_the_invariants_hold_over_several_pools_where_they_were_broken_once(seed: int) -> None:
    hold_in_all_ways(seed)


def static_world(engine: str, over_all: float) -> World:
    """Return a world whose team `b` keeps GPUs of both pools, and `c` four of pool p; both use none of them."""
    world = World().pool("p", gpus=4).pool("q", gpus=4)
    world.team("b", reserved=over_all, lend=0).team("c", reserved=4, lend=0, pools=("p",)).team("d")
    world.profile("two", 2, pools=("q", "p")).profile("two-q", 2, pools=("q",))
    world.engine = ENGINES[engine]
    return world


@pytest.mark.covers("F17")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("over_all", "starts"), [(2, True), (4, False)])
def test_a_static_quota_of_all_pools_is_kept_beside_that_of_one(engine: str, over_all: float, starts: bool) -> None:
    world = static_world(engine, over_all).submit("j", "d", "two-q")
    plan = world.step()
    assert bool(plan.start) == starts
    if not starts:
        assert [waiting.code for waiting in plan.pending] == ["static_quota"]


@pytest.mark.covers("F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_team_that_keeps_gpus_of_one_pool_takes_none_that_are_kept_for_others_in_another(engine: str) -> None:
    plan = static_world(engine, 4).submit("j", "c", "two").step()
    assert [(start.pool, start.in_quota) for start in plan.start] == [("p", True)]


@pytest.mark.covers("F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_static_quota_on_nodes_that_are_down_keeps_nothing_of_another_pool(engine: str) -> None:
    world = static_world(engine, 2)
    world.nodes["p-1"] = replace(world.nodes["p-1"], ready=False)
    assert [start.id for start in world.submit("j", "d", "two-q").step().start] == ["j"]


@pytest.mark.covers("F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_static_quotas_of_one_pool_keep_together_what_it_has_free(engine: str) -> None:
    world = static_world(engine, 2).team("e", reserved=4, lend=0, pools=("p",))
    assert [start.id for start in world.submit("j", "d", "two-q").step().start] == ["j"]


@pytest.mark.covers("F16", "F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_victim_is_spared_though_gpus_of_a_static_quota_stay_lent(engine: str) -> None:
    """w2 and w0 make room for both, so that w4 stays: nothing is evicted to keep GPUs free for b."""
    world = World().pool("p", nodes=2, gpus=4).team("top", reserved=4)
    world.engine = ENGINES[engine]
    world.team("a", reserved=1, limit=2, lend=0, parent="top").team("b", reserved=4, lend=0, parent="top")
    world.team("c", reserved=4, lend=1, pools=("p",))
    world.profile("one", 1).profile("gang", 1, workers=2).profile("elastic", 1, workers=3, min_workers=2)
    world.run("w0", "b", "gang", "p-1", "p-1", priority=1).run("w1", "a", "one", "p-2", priority=1)
    world.run("w2", "a", "gang", "p-2", "p-2", priority=1).run("w3", "c", "one", "p-1")
    world.run("w4", "a", "one", "p-1", priority=-1)
    at = {"w0": (0, 1), "w1": (0,), "w2": (1, 2), "w3": (2,), "w4": (3,)}
    for name, devices in at.items():
        placement = world.workloads[name].placement
        new = tuple(replace(part, devices=(device,)) for part, device in zip(placement, devices, strict=True))
        world.change(name, placement=new)
    world.submit("new0", "b", "elastic", preemptible=False).submit("new1", "b", "one", preemptible=False)
    plan = world.plan()
    assert {(eviction.id, eviction.preemptor) for eviction in plan.evict} == {("w2", "new0"), ("w0", "new1")}
    assert {waiting.code for waiting in plan.pending} == {"reclaiming"}


@pytest.mark.slow
@pytest.mark.covers(*ROWS)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", range(20))
def test_the_invariants_hold_over_several_pools_at_length(part: int) -> None:
    many = max(1, HISTORIES // 20)
    for seed in range(10**6 + part * many, 10**6 + (part + 1) * many):
        hold_in_all_ways(seed)
