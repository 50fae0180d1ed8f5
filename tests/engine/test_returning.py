"""What returns once it was evicted: beside what a plan starts meanwhile, and by evicting others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from engine.cascades import come_to_rest
from engine.engines import ENGINES
from engine.properties import check
from makeway_quota.engine import GPU, Placed, QuotaLine
from worlds import World


def in_quota_in_one_pool() -> World:
    """Return a world where team a reserves 4 GPUs in p, none in q, and reaches its limit of 4 over both pools.

    low runs in quota in p, high over quota in q.
    """
    world = World().pool("p", gpus=4).pool("q", gpus=6).team("a")
    lines = (QuotaLine(("p",), 4 * GPU), QuotaLine((), 0, 4 * GPU))
    world.policies["a"] = replace(world.policies["a"], quotas=lines)
    world.profile("here", 2, pools=("p",)).profile("there", 2, pools=("q",))
    return world.run("low", "a", "here", "p-1").run("high", "a", "there", "q-1", priority=1)


@pytest.mark.covers("F16", "F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_over_quota_does_not_preempt_one_that_would_return_in_quota(engine: str) -> None:
    world = in_quota_in_one_pool()
    world.engine = ENGINES[engine]
    world.submit("higher", "a", "there", priority=1)
    plan = world.plan()
    assert not plan.acts, "low would reclaim its GPUs from high, which would preempt it again"
    assert [(waiting.id, waiting.code) for waiting in plan.pending] == [("higher", "limit")]


@pytest.mark.covers("F16", "F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_over_quota_preempts_one_that_could_not_return(engine: str) -> None:
    world = in_quota_in_one_pool()
    world.engine = ENGINES[engine]
    world.change("high", priority=0)
    world.submit("higher", "a", "there", priority=1)
    assert [(eviction.id, eviction.preemptor) for eviction in world.step().evict] == [("high", "higher")]
    world.release().reconcile()
    assert world.named() == ["higher", "low"]


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_that_moves_to_another_pool_counts_once_on_a_line_over_both(engine: str) -> None:
    """A job of 3 GPUs is on its way from p to q; the request for 1 GPU there is in quota: 3 + 1 of 4."""
    world = World().pool("p", gpus=4).pool("q", gpus=4, capacity=4 * GPU)
    world.team("a", 4).team("b").team("c", 4, pools=("p",))
    world.profile("three", 3).profile("one", 1, pools=("q",)).profile("four", 4, pools=("p",))
    world.run("moves", "a", "three", "p-1").run("borrows", "b", "one", "q-1").submit("owner", "c", "four")
    world.change("borrows", placement=(Placed(0, "q-1", (0,)),))
    place = (Placed(0, "q-1", (1, 2, 3)),)
    world.change("moves", state="checkpointing", evicted_for="owner", deadline=world.now + 30, nomination=place)
    world.engine = ENGINES[engine]
    world.submit("other", "a", "one")
    assert [(eviction.id, eviction.preemptor) for eviction in world.step().evict] == [("borrows", "other")]
    world.release().reconcile()
    assert world.named() == ["moves", "other", "owner"]


def gang_beside_free_gpus() -> World:
    """Return a world where a gang makes way on p-1, and would go on with its worker on p-2 and the free GPUs there."""
    world = World(consolidation=False).pool("p", nodes=2, gpus=3).team("a")
    world.profile("two", 2).profile("three", 3).profile("gang", 1, workers=3).run("gang", "a", "gang")
    parts = Placed(0, "p-1", (0,)), Placed(1, "p-1", (1,)), Placed(2, "p-2", (0,))
    world.change("gang", state="running", placement=parts)
    return world.submit("high", "a", "three", priority=1).submit("low", "a", "two", priority=-1)


def jobs_that_leave_room_for_each_other() -> World:
    """Return a world where v1 leaves one GPU of its three, which v2 or its preemptor can use beside the free one."""
    world = World(consolidation=False).pool("p", nodes=2, gpus=4).team("a")
    world.nodes["p-2"] = replace(world.nodes["p-2"], gpus=2)
    world.profile("one", 1).profile("two", 2).profile("three", 3)
    world.run("v1", "a", "three", "p-1").run("v2", "a", "two", "p-2")
    for name, devices in (("v1", (0, 1, 2)), ("v2", (0, 1))):
        node = world.workloads[name].placement[0].node
        world.change(name, placement=(Placed(0, node, devices),))
    return world.jobs("h1 h2", "a", "two", priority=1).submit("low", "a", "one", priority=-1)


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gang_that_makes_way_moves_beside_its_workers_that_can_stay(engine: str) -> None:
    """Else low started on the free GPUs, which the gang took back from it at once."""
    plan = check(gang_beside_free_gpus(), ENGINES[engine], Random(7))
    assert not plan.start
    assert not plan.evict
    (move,) = plan.move
    assert (move.id, move.preemptor) == ("gang", "high")
    assert Placed(2, "p-2", (0,)) in move.to
    assert {placed.node for placed in move.to} == {"p-2"}


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_starts_where_a_victim_would_return_on_what_another_victim_leaves(engine: str) -> None:
    plan = check(jobs_that_leave_room_for_each_other(), ENGINES[engine], Random(7))
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("v1", "h2")]
    assert not plan.start
    assert not plan.move


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [gang_beside_free_gpus, jobs_that_leave_room_for_each_other])
def test_no_start_is_undone_by_a_victim_of_its_plan(make: Callable[[], World], engine: str) -> None:
    world = make()
    come_to_rest(world, ENGINES[engine])
    assert "low" not in {start.id for plan in world.plans for start in plan.start}


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_start_that_could_evict_a_victim_again_does_not_make_way_for_it(engine: str) -> None:
    """x and y are within their team's 2 GPUs; lent is within its department's 3 while one of them waits."""
    world = World().pool("p", gpus=3).team("top", 3).team("a", 2, parent="top").team("b", parent="top")
    world.profile("one", 1).profile("two", 2).run("lent", "b", "two", "p-1")
    world.change("lent", placement=(Placed(0, "p-1", (0, 1)),))
    world.jobs("x y", "a", "one", priority=-1)
    plan = check(world, ENGINES[engine], Random(7))
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("lent", "y")]
    assert not plan.move
    world.release().reconcile()
    assert world.named() == ["x", "y"]


def two_machines_of_two_pools() -> World:
    """Return a world where old runs over quota in p, though it may run in q, too, where its team reserves 3 GPUs.

    asks needs all 4 cores of the first machine. The second one has 2 cores left: for old in q, or for late in p.
    """
    world = World().pool("p", nodes=2, gpus=2).pool("q", nodes=2, gpus=2).team("a", 3, pools=("q",)).team("b", 1)
    for name, node in world.nodes.items():
        world.nodes[name] = replace(node, host=f"m{name[-1]}", cpu=4000)
    world.profile("either", 2, cpu=2000, pools=("p", "q")).profile("all", 1, cpu=4000, pools=("q",))
    world.profile("one", 1, cpu=2000, pools=("p",)).profile("small", 1, cpu=1000, pools=("p",))
    world.run("old", "a", "either", "p-1").run("firm", "b", "one", "p-2", preemptible=False)
    world.change("old", placement=(Placed(0, "p-1", (0, 1)),))
    world.change("firm", placement=(Placed(0, "p-2", (0,)),))
    return world.submit("asks", "a", "all").submit("late", "a", "small")


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_starts_in_another_pool_of_the_machine_where_a_victim_returns(engine: str) -> None:
    world = two_machines_of_two_pools()
    plan = check(world, ENGINES[engine], Random(7))
    assert not plan.start, "late would leave old 1 core, and be evicted for it"
    assert [(move.id, move.preemptor, [placed.node for placed in move.to]) for move in plan.move] == [
        ("old", "asks", ["q-2"])
    ]
    come_to_rest(world, ENGINES[engine])
    assert world.named() == ["asks", "firm", "old"]


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_start_in_another_pool_of_the_machine_stays_where_a_victim_has_room_beside_it(engine: str) -> None:
    world = two_machines_of_two_pools()
    for name in ("p-2", "q-2"):
        world.nodes[name] = replace(world.nodes[name], cpu=5000)
    plan = check(world, ENGINES[engine], Random(7))
    assert [start.id for start in plan.start] == ["late"]
    assert [move.id for move in plan.move] == ["old"]


def one_start_beyond_a_reservation() -> World:
    """Return a world where a node is down, and old runs on the 2 GPUs that its team b reserves.

    asks needs all of the first node: mine and old have to leave it. late can start over quota on the second node, or
    mine can move there: it is in quota, so it comes first.
    """
    world = World(consolidation=False).pool("p", nodes=3, gpus=2).team("b", 2).team("c", 6)
    world.nodes["p-1"] = replace(world.nodes["p-1"], gpus=4)
    world.nodes["p-3"] = replace(world.nodes["p-3"], ready=False)
    world.profile("one", 1).profile("two", 2).profile("four", 4)
    world.run("old", "b", "two", "p-1").run("mine", "c", "two", "p-1")
    world.change("old", placement=(Placed(0, "p-1", (0, 1)),))
    world.change("mine", placement=(Placed(0, "p-1", (2, 3)),))
    return world.session("asks", "c", "four").submit("late", "b", "one")


@pytest.mark.covers("F09", "F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_start_does_not_make_way_where_only_its_gpus_let_others_of_its_team_be_evicted(engine: str) -> None:
    world = one_start_beyond_a_reservation()
    world.change("old", avoid=("p-2",))
    plan = check(world, ENGINES[engine], Random(7))
    assert [start.id for start in plan.start] == ["late"], "without it, b used no more than it reserves"
    assert sorted((eviction.id, eviction.preemptor) for eviction in plan.evict) == [("mine", "asks"), ("old", "asks")]
    assert not plan.move
    come_to_rest(world, ENGINES[engine])
    assert world.named() == ["asks", "late"]


@pytest.mark.covers("F09", "F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_victim_within_its_reservation_takes_the_room_of_the_start_that_let_it_be_evicted(engine: str) -> None:
    world = one_start_beyond_a_reservation()
    plan = check(world, ENGINES[engine], Random(7))
    assert not plan.start
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("mine", "asks")]
    assert [(move.id, move.preemptor) for move in plan.move] == [("old", "asks")]
    come_to_rest(world, ENGINES[engine])
    assert world.named() == ["asks", "old"]


@pytest.mark.covers("F09", "F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_start_makes_way_where_its_team_uses_more_than_it_reserves_without_it(engine: str) -> None:
    world = one_start_beyond_a_reservation()
    world.nodes["p-2"] = replace(world.nodes["p-2"], gpus=3)
    world.run("firm", "b", "one", "p-2", preemptible=False)
    plan = check(world, ENGINES[engine], Random(7))
    assert not plan.start
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("old", "asks")]
    assert [(move.id, move.preemptor) for move in plan.move] == [("mine", "asks")]


@pytest.mark.covers("F16", "F17")
@pytest.mark.parametrize("shrinks", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_over_quota_preempts_none_that_would_return_at_the_cost_of_a_gang_that_shrinks(
    engine: str, shrinks: bool
) -> None:
    world = World(consolidation=False).pool("p", gpus=2).pool("q", gpus=1).team("a").team("c", 1)
    world.team("b", 1, pools=("p",)).profile("any", 1, pools=("q", "p")).profile("there", 1, pools=("q",))
    world.profile("gang", 1, workers=2, min_workers=1, pools=("p",))
    world.submit("elastic", "a", "gang")
    both = (Placed(0, "p-1", (0,)), Placed(1, "p-1", (1,)))
    world.change("elastic", state="running", placement=both, started_at=world.now)
    world.run("low", "b", "any", "q-1").submit("owner", "c", "any")
    assert [move.id for move in check(world, ENGINES[engine], Random(7)).move] == ["elastic"]
    if not shrinks:
        world.release().reconcile()
        world.step()
    world.submit("high", "b", "there", priority=1)
    assert not check(world, ENGINES[engine], Random(7)).acts, "low would evict what the gang keeps"


@pytest.mark.covers("F09", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_whose_start_over_quota_is_replaced_starts_where_it_then_evicted(engine: str) -> None:
    """`asks` starts over quota in q, `late` replaces it, it evicts `old` in p, and `old` gets the room of `late`."""
    world = World(fair_share="reclaim").pool("p", gpus=2).pool("q", gpus=3)
    world.team("a", priority=1).team("b", priority=1, weight="High").team("c", 2, pools=("p",), weight="Lowest")
    world.profile("one", 1, pools=("p", "q")).profile("two", 2, pools=("q", "p"))
    world.profile("gang", 1, workers=3, pools=("q",))
    world.run("old", "a", "one", "p-1").submit("asks", "c", "two").submit("late", "b", "gang")
    plan = check(world, ENGINES[engine], Random(7))
    assert [(move.id, move.preemptor) for move in plan.move] == [("old", "asks")]
    assert not plan.start, "started over quota in q, it would be replaced again, and `old` would move in vain"
    come_to_rest(world, ENGINES[engine])
    assert [(name, world.workloads[name].placement[0].node) for name in world.named()] == [
        ("asks", "p-1"),
        ("old", "q-1"),
    ]
