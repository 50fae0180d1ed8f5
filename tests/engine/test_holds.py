"""Holds for workloads that waited too long (engine rule 3): no workload starves."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random

import pytest
from engine.engines import ENGINES
from engine.histories import HISTORIES
from engine.invariants import check
from makeway_quota.engine import QuotaLine
from worlds import World

DAY = 86_400.0
HOUR = 3_600.0


def busy(**settings: object) -> World:
    """Return two nodes full of borrowed 2-GPU jobs without a known end, and a gang that needs both nodes."""
    world = World(**settings).pool("p", nodes=2, gpus=4).team("a").team("b")
    world.profile("two", 2).profile("brief", 2, time_limit=HOUR).profile("gang", 4, workers=2)
    world.jobs("a1 a2 a3 a4", "a", "two").reconcile()
    return world.submit("g", "b", "gang")


@pytest.mark.covers("F43")
def test_nodes_are_held_for_a_workload_that_waited_too_long() -> None:
    world = busy()
    world.now += DAY - 60
    world.end("a4").submit("a5", "a", "two")
    assert [s.id for s in world.step().start] == ["a5"], "not yet a day"
    world.now += 60
    world.end("a5").submit("a6", "a", "two")
    plan = world.step()
    assert not plan.start
    waiting = {w.id: w for w in plan.pending}
    assert (waiting["a6"].code, waiting["a6"].rule) == ("held", "starvation")
    assert world.say(waiting["a6"]) == (
        "p-1 and p-2 are held for b's job g of b-user, which has waited 1 d; this job needs 2."
    )
    assert world.say(waiting["g"]).endswith("p-1 and p-2 are held for it.")
    world.end("a1", "a2", "a3")
    assert [s.id for s in world.step().start] == ["g"]


def test_what_is_in_quota_is_not_held_back() -> None:
    world = busy().team("c", 2)
    world.profile("two", 2)
    world.now += DAY
    world.end("a4").submit("c1", "c", "two")
    assert [s.id for s in world.step().start] == ["c1"]


def test_what_ends_in_time_may_use_held_gpus() -> None:
    world = busy()
    for name in ("a1", "a2", "a3"):
        world.change(name, time_limit=DAY + 2 * HOUR)
    world.now += DAY
    world.end("a4").submit("late", "a", "two").submit("timely", "a", "brief")
    plan = world.step()
    assert [s.id for s in plan.start] == ["timely"]
    waiting = {w.id: w for w in plan.pending}
    assert waiting["late"].code == "outranked"
    assert waiting["g"].not_before == pytest.approx(world.workloads["a3"].started_at + DAY + 2 * HOUR)
    assert not world.plan().acts


def test_only_the_gpus_that_are_needed_are_held() -> None:
    world = World().pool("p", gpus=8).team("a").team("b").profile("one", 1).profile("two", 2).profile("big", 6)
    world.jobs("a1 a2 a3 a4", "a", "two").reconcile()
    world.submit("big", "b", "big")
    world.change("a1", time_limit=DAY + HOUR)
    world.now += DAY
    world.end("a3", "a4").jobs("a5 a6", "a", "one")
    assert not world.step().start, "six GPUs in an hour"
    assert world.reason("a5")[0] == "held"
    world.profile("big", 5)
    assert [s.id for s in world.step().start] == ["a5"], "six GPUs in an hour, so one of the four may be used"
    assert world.reason("a6")[0] == "held"


def test_a_limit_is_held_too() -> None:
    world = World().pool("p", gpus=8).team("a", limit=4).profile("one", 1).profile("four", 4)
    world.jobs("s1 s2 s3 s4", "a", "one").reconcile()
    world.submit("big", "a", "four")
    world.now += DAY
    world.end("s1").submit("s5", "a", "one")
    plan = world.step()
    assert not plan.start
    assert {w.id: w.code for w in plan.pending} == {"big": "limit", "s5": "held"}
    message = (
        "a uses 3 of its limit of 4 GPUs, and 4 are held for a's job big of a-user, which has waited 1 d; "
        "this job needs 1."
    )
    assert world.reason("s5")[1] == message
    world.end("s2", "s3", "s4")
    assert [s.id for s in world.step().start] == ["big"]


def test_the_lowest_weight_holds_nothing() -> None:
    world = busy()
    world.policies["b"] = replace(world.policies["b"], weight="Lowest")
    world.now += DAY
    world.end("a4").submit("a5", "a", "two")
    assert [s.id for s in world.step().start] == ["a5"]


def test_fair_share_goes_before_a_hold() -> None:
    """Where work over quota reclaims, nothing is held beyond the fair share: the workload would be evicted at once."""
    world = busy(fair_share="reclaim")
    world.now += DAY
    world.end("a4").submit("a5", "a", "two")
    assert [s.id for s in world.step().start] == ["a5"]


def stream(random: Random) -> World:
    """Return a world with an endless stream of small jobs of several teams, more than fit, and a few large ones."""
    world = World(starvation_after=random.choice([0, HOUR, 6 * HOUR]))
    world.pool("p", nodes=random.randint(2, 4), gpus=4).team("a").team("b", 2, weight="Low").team("c", priority=1)
    world.policies["d"] = replace(world.policies["a"], name="d", quotas=(QuotaLine(limit=8000),))
    world.profile("one", 1).profile("two", 2, time_limit=random.choice([None, HOUR]))
    world.profile("whole", 4).profile("gang", 4, workers=2)
    world.pools["p"] = replace(world.pools["p"], profiles=("one", "two"))
    return world


@pytest.mark.covers("F43")
@pytest.mark.parametrize("start", range(20))
def test_no_workload_starves(start: int) -> None:
    starve(Random(start))


@pytest.mark.slow
@pytest.mark.covers("F43")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(20, 20 + HISTORIES // 10))
def test_no_workload_starves_at_length(start: int) -> None:
    starve(Random(start))


def starve(random: Random) -> None:
    """Run large jobs behind an endless stream of small ones until they have started, for at most 400 rounds."""
    world = stream(random)
    ends: dict[str, float] = {}
    large: list[str] = []
    served: set[str] = set()
    max_length = 2 * HOUR
    names = count()
    for turn in range(400):
        while len(world.named("pending")) < 12:
            world.submit(f"s{next(names):05}", random.choice("acd"), random.choice(["one", "two"]))
        if turn in (20, 25, 30):
            large.append(f"big{turn}")
            world.submit(large[-1], random.choice("bd"), "gang" if turn == 20 else "whole")
        if turn % 20:
            world.step()
        else:
            check(world, Random(1))
        served |= set(world.named()) & set(large)
        if len(served) == 3:
            return
        for name in world.named():
            limit = HOUR if world.workloads[name].profile == "two" else max_length
            ends.setdefault(name, world.now + random.uniform(60, limit))
        world.release().now += random.uniform(60, 900)
        for name in [n for n in world.named() if n in ends and ends[n] <= world.now]:
            world.end(name)
        world.workloads = {i: w for i, w in world.workloads.items() if w.state != "succeeded" or i in large}
    raise AssertionError(f"only {served} of {large} ever started")


def outranked(**settings: object) -> World:
    """Return a world in which a small job of `a` runs, a large one waited too long, and an urgent one arrives."""
    world = World(**settings).pool("p", gpus=4).team("a").profile("two", 2).profile("three", 3).profile("eight", 8)
    world.submit("low", "a", "two", priority=-1).reconcile()
    world.submit("late", "a", "three", priority=-1)
    world.now += DAY
    return world


def test_a_workload_that_waited_too_long_comes_after_its_own_teams_higher_priority() -> None:
    world = outranked().submit("urgent", "a", "three", priority=1)
    plan = world.step()
    assert [(e.id, e.rule) for e in plan.evict] == [("low", "preempt_in_team")]
    assert world.release().step().start[0].id == "urgent"
    assert not world.plan().acts
    assert world.reason("low")[1].endswith("p-1 is held for it."), "the one of its team that waits longest, again"
    calm = outranked(in_team_preemption=False).submit("urgent", "a", "three", priority=1)
    assert calm.reason("late")[1].endswith("p-1 is held for it.")


def test_a_job_that_waited_too_long_is_not_started_to_be_preempted() -> None:
    world = outranked().submit("urgent", "a", "three", priority=1)
    world.end("low")
    assert [s.id for s in world.step().start] == ["urgent"]
    world.now += HOUR
    assert not world.plan().acts


def test_a_higher_priority_that_can_never_start_ends_no_hold() -> None:
    world = outranked().submit("urgent", "a", "eight", priority=1)
    assert world.reason("late")[1].endswith("p-1 is held for it.")


@pytest.mark.parametrize("capacity", [None, 3000])
def test_nothing_is_held_for_what_can_never_start(capacity: int | None) -> None:
    world = World(starvation_after=0).pool("p", gpus=4, capacity=capacity).team("a", limit=None if capacity else 3)
    world.profile("two", 2).profile("four", 4).submit("never", "a", "four").submit("small", "a", "two")
    assert [s.id for s in world.step().start] == ["small"]


def test_a_gang_that_grows_may_end_a_hold_and_then_others_start_at_once() -> None:
    """The wider gang of `c`, over quota, reduces the fair share of `b`, so that nothing is held for `b`."""
    world = World(starvation_after=0, fair_share="reclaim").pool("p", nodes=2, gpus=4)
    world.team("b").team("c", 1, weight="High").team("d", 2)
    world.profile("one", 1).profile("three", 3).profile("four", 4).profile("elastic", 1, workers=2, min_workers=1)
    world.run("s1", "d", "one", "p-1", kind="session").run("s2", "d", "one", "p-2", kind="session")
    world.submit("large", "b", "four").submit("small", "b", "three").submit("gang", "c", "elastic")
    assert len(world.step().start) == 2
    assert not world.plan().acts


def test_a_workload_that_starts_elsewhere_holds_nothing() -> None:
    world = World(starvation_after=600).pool("q", gpus=1, profiles=("small", "big")).pool("p", gpus=4).team("a")
    world.profile("small", 1, pools=("q", "p")).profile("big", 2, pools=("q", "p")).run("a0", "a", "small", "q-1")
    world.submit("low", "a", "small", priority=-1).submit("high", "a", "big").now += 700
    plan = world.plan()
    assert [(s.id, s.pool) for s in plan.start] == [("high", "p"), ("low", "p")]
    assert not plan.pending


def test_gpus_of_a_dropped_hold_are_used_in_the_same_plan() -> None:
    world = World(starvation_after=600).pool("q", gpus=2, profiles=("small", "big")).pool("p", gpus=6)
    world.team("a").team("b").profile("one", 1, pools=("q",))
    world.profile("small", 2, pools=("q", "p")).profile("big", 2, pools=("q", "p")).run("a0", "a", "one", "q-1")
    world.submit("low", "a", "small", priority=-1).submit("high", "a", "big").now += 700
    plan = world.submit("b1", "b", "one").plan()
    assert [(s.id, s.pool) for s in plan.start] == [("high", "p"), ("low", "p"), ("b1", "q")]


@pytest.mark.covers("F43")
def test_a_workload_that_waited_too_long_may_preempt_its_own_teams_lower_priority() -> None:
    world = World().pool("p", gpus=2).team("a").team("b").profile("one", 1)
    world.submit("low", "a", "one", priority=-1).submit("other", "b", "one").reconcile()
    world.submit("high", "a", "one", priority=1).change("high", submitted_at=world.now - 2 * DAY)
    plan = world.step()
    assert [(e.id, e.preemptor, e.rule) for e in plan.evict] == [("low", "high", "preempt_in_team")]


@pytest.mark.covers("F43")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("limit", [4, None])
def test_a_preemptor_over_quota_starts_on_no_held_gpus_of_another_pool(limit: int | None, engine: str) -> None:
    """Held for big in q: with a limit of 4 GPUs the limit, and nodes otherwise."""
    world = World().pool("p", gpus=1).pool("q", gpus=8 if limit else 4).team("a", limit=limit, pools=("q",)).team("b")
    world.profile("one", 1, pools=("q",)).profile("either", 1, pools=("p", "q")).profile("four", 4, pools=("q",))
    world.submit("low", "a", "either", priority=-1).jobs("s1 s2 s3", "a", "one").reconcile()
    world.submit("big", "a" if limit else "b", "four")
    world.now += DAY
    world.change("low", submitted_at=world.now)
    world.engine = ENGINES[engine]
    plan = world.submit("high", "a", "either").step()
    assert not plan.start
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("low", "high")]
    assert [start.id for start in world.release().step().start] == ["high"]
    world.end("s1", "s2", "s3")
    assert [start.id for start in world.step().start] == ["big"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weight", ["Medium", "None"])
def test_a_higher_priority_without_gpus_ends_no_hold_of_its_team(weight: str, engine: str) -> None:
    """It never evicts, so that the workload that waited too long would not be preempted for it."""
    world = World().pool("p", gpus=4, cpu=4000).team("a", reserved=4, weight=weight).team("b")
    world.profile("two", 2).profile("three", 3).profile("cores", 0, cpu=3000).profile("busy", 2, cpu=2000)
    world.run("s", "b", "busy", "p-1", preemptible=False).submit("late", "a", "three")
    world.now += DAY
    world.engine = ENGINES[engine]
    plan = world.submit("urgent", "a", "cores", priority=1).submit("b1", "b", "two").step()
    assert not plan.start
    assert world.reason("b1")[0] == "held"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_non_preemptible_job_is_held_for_whatever_its_teams_priorities(engine: str) -> None:
    world = World().pool("p", gpus=4).team("a", reserved=4).team("b").profile("two", 2).profile("three", 3)
    world.run("s", "b", "two", "p-1", preemptible=False).submit("late", "a", "three", preemptible=False)
    world.now += DAY
    world.engine = ENGINES[engine]
    plan = world.submit("urgent", "a", "three", priority=1).submit("b1", "b", "two").step()
    assert not plan.start
    assert world.reason("b1")[0] == "held"
