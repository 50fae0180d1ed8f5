"""What work over quota may evict, and what counts of work that moves between pools, in worlds of two pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.engines import ENGINES
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
    assert [(each.id, each.code) for each in plan.pending] == [("higher", "limit")]


@pytest.mark.covers("F16", "F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_over_quota_preempts_one_that_could_not_return(engine: str) -> None:
    world = in_quota_in_one_pool()
    world.engine = ENGINES[engine]
    world.change("high", priority=0)
    world.submit("higher", "a", "there", priority=1)
    assert [(each.id, each.preemptor) for each in world.step().evict] == [("high", "higher")]
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
    assert [(each.id, each.preemptor) for each in world.step().evict] == [("borrows", "other")]
    world.release().reconcile()
    assert world.named() == ["moves", "other", "owner"]
