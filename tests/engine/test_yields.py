"""Jobs that ran for longer than `yields_after` have a lower priority than shorter ones of their team."""

from __future__ import annotations

from dataclasses import replace

import pytest
from makeway_quota.engine import IncrementalEngine, schedule
from worlds import World

HOUR = 3600.0


def full(yields_after: float) -> World:
    """Team a fills all 8 GPUs with two jobs; one of them began ten hours ago."""
    world = World(yields_after=yields_after).pool("p", gpus=8).team("a", reserved=8).team("b", reserved=0)
    world.profile("four", 4).submit("old", "a", "four").reconcile()
    world.now += 9.5 * HOUR
    world.submit("new", "a", "four").reconcile()
    world.now += 0.5 * HOUR
    return world


@pytest.mark.covers("F36")
def test_a_job_that_ran_for_long_yields_to_a_shorter_one_of_its_team() -> None:
    world = full(8 * HOUR)
    plan = world.submit("next", "a", "four").step()
    (evict,) = plan.evict
    assert (evict.id, evict.preemptor) == ("old", "next")
    assert world.say(evict).endswith("this job of the same team ran for more than 8 h and yields to it.")
    world.change("old", earlier_runtime=10 * HOUR)
    world.reconcile()
    assert world.named() == ["new", "next"]
    assert not world.step().evict, "who was made to wait does not come back while others are no longer than it"
    world.submit("later", "a", "four")
    world.end("new")
    world.reconcile()
    assert world.named() == ["later", "next"], "it also waits behind shorter ones"


def test_no_job_yields_without_the_setting_nor_to_another_team_nor_too_early() -> None:
    assert not full(0.0).submit("next", "a", "four").step().evict
    assert not full(12 * HOUR).submit("next", "a", "four").step().evict
    assert not full(8 * HOUR).submit("next", "b", "four").step().evict


def test_earlier_attempts_count_and_non_preemptible_work_never_yields() -> None:
    world = full(12 * HOUR)
    world.change("new", earlier_runtime=12 * HOUR)
    assert [e.id for e in world.submit("next", "a", "four").step().evict] == ["new"]
    world = full(8 * HOUR)
    world.change("old", preemptible=False)
    assert not world.submit("next", "a", "four").step().evict


def test_the_incremental_engine_lowers_priorities_as_time_passes() -> None:
    world = full(12 * HOUR).submit("next", "a", "four")
    snapshot = world.snapshot()
    incremental = IncrementalEngine(snapshot)
    assert incremental.plan(world.now) == schedule(snapshot)
    for _ in range(2):
        world.now += 2 * HOUR
        plan = incremental.plan(world.now)
        assert plan == schedule(replace(snapshot, now=world.now))
        assert [e.id for e in plan.evict] == ["old"]


def test_jobs_that_ended_long_before_they_would_yield_are_not_remembered() -> None:
    world = full(12 * HOUR)
    incremental = IncrementalEngine(world.snapshot())
    known = len(incremental.cluster.yields_at)
    for at in range(300):
        (job,) = (item for item in world.snapshot().workloads if item.id == "new")
        incremental.change([replace(job, id=f"short{at}", started_at=world.now)], ["new", f"short{at - 1}"])
    assert len(incremental.cluster.yields_at) < known + 100
    assert {"old", "short299"} <= {name for _, name in incremental.cluster.yields_at}
