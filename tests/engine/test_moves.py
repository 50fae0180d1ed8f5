"""Who moves over: counted once, and only where that is enough (engine rule 5.6)."""

from __future__ import annotations

from makeway_quota.engine import Plan
from worlds import World


def scattered() -> World:
    """Six 3-GPU jobs of `a` run as 6, 6, 3, 3; `b` asks for 8 GPUs, so that one of them moves."""
    world = World().pool("p", nodes=4, gpus=10).team("a", reserved=20, weight="None").team("b", reserved=20)
    world.profile("gpu2", 2).profile("gpu3", 3).profile("gpu8", 8)
    for at, node in enumerate([1, 1, 2, 2, 3, 4]):
        world.run(f"a{at}", "a", "gpu3", f"p-{node}")
    return world.submit("b", "b", "gpu8")


def in_quota(plan: Plan) -> dict[str, bool]:
    return {start.id: start.in_quota for start in plan.start}


def test_a_job_that_moves_counts_once_on_its_reservation_in_the_same_plan() -> None:
    world = scattered().submit("more", "a", "gpu2")
    plan = world.step()
    assert len(plan.move) == 1
    assert in_quota(plan) == {"more": True}, "18 + 2 of the 20 reserved"


def test_a_job_that_moves_counts_once_on_its_reservation_until_it_has_moved() -> None:
    world = scattered()
    assert len(world.step().move) == 1
    world.submit("more", "a", "gpu2").submit("beyond", "a", "gpu2")
    plan = world.step()
    assert in_quota(plan) == {"more": True}
    assert {w.id: w.code for w in plan.pending}["beyond"] == "never_over_quota"
    plan = world.release().step()
    assert in_quota(plan)["b"]
    assert world.used("a") == 20
    assert world.reason("beyond")[0] == "never_over_quota"
