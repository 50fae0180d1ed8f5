"""Victim selection, rule by rule (engine rules 2 and 5.1 to 5.9)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from makeway_quota.engine import Plan
from worlds import World


def evicted(plan: Plan) -> list[str]:
    """Return the ids of the workloads that a plan stops, in order."""
    return sorted(e.id for e in plan.evict)


# Fair share (rule 5.9)


@pytest.mark.covers("F36")
@pytest.mark.parametrize(("size", "victims"), [(3, ["a2"]), (4, ["a2"]), (5, [])])
def test_a_job_that_straddles_its_reservation_reclaims_within_the_fair_share(size: int, victims: list[str]) -> None:
    world = World(fair_share="reclaim").pool("p", gpus=8).team("a", 1).team("b", 1)
    world.profile("four", 4).profile("asks", size).jobs("a1 a2", "a", "four").reconcile()
    world.submit("b1", "b", "asks")
    assert evicted(world.step()) == victims, "1 reserved and half of the other 6: a fair share is 4"
    assert not world.plan().acts
    world.release().reconcile()
    assert world.used("b") == (size if victims else 0)


def test_only_policies_above_their_fair_share_are_reclaimed_from() -> None:
    world = World(fair_share="reclaim").pool("p", gpus=8).team("a", priority=1).team("b").team("c").profile("one", 1)
    world.jobs("a1 a2 a3 a4 a5 a6", "a", "one").jobs("c1 c2", "c", "one").reconcile()
    world.paused = ("c/one",)  # so that c2 could not return
    assert evicted(world.submit("b1", "b", "one").step()) == ["a6"], "c has a lower priority, but its fair share is 2.6"


# Non-preemptible work and its own team (rule 5.1)


@pytest.mark.covers("F26")
@pytest.mark.parametrize("more", [{"preemptible": False}, {"kind": "session"}])
@pytest.mark.parametrize("priority", [-1, 1])
def test_non_preemptible_work_evicts_a_job_of_its_own_policy_that_fills_the_limit(
    more: dict[str, object], priority: int
) -> None:
    world = World().pool("p", gpus=8).team("a", 5, limit=5).profile("five", 5).profile("two", 2)
    world.submit("a1", "a", "five").reconcile()
    (victim,) = world.submit("f", "a", "two", priority=priority, **more).step().evict
    assert (victim.id, victim.rule) == ("a1", "reclaim_own_limit")
    assert "a is at its limit" in world.say(victim)
    assert [s.id for s in world.release().step().start] == ["f"]


@pytest.mark.covers("F26")
@pytest.mark.parametrize("more", [{"preemptible": False}, {"kind": "session"}])
def test_non_preemptible_work_evicts_a_job_of_its_own_policy_where_fewer_gpus_are_up_than_reserved(
    more: dict[str, object],
) -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", 8).profile("four", 4).profile("two", 2)
    world.lose("p-2").submit("a1", "a", "four", priority=1).reconcile()
    (victim,) = world.submit("f", "a", "two", **more).step().evict
    assert (victim.id, victim.rule) == ("a1", "reclaim_own_policy")
    assert [s.id for s in world.release().step().start] == ["f"]
    assert not world.plan().acts


def test_jobs_beyond_a_reservation_are_evicted_before_a_policys_own() -> None:
    world = World().pool("p", gpus=4).team("a", 4).team("b").profile("two", 2)
    world.submit("a1", "a", "two").submit("b1", "b", "two").reconcile()
    assert evicted(world.submit("f", "a", "two", preemptible=False).step()) == ["b1"]


def test_a_preemptible_job_does_not_evict_its_own_policy() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", 8).profile("four", 4).profile("two", 2)
    world.lose("p-2").submit("a1", "a", "four").reconcile()
    assert not world.submit("a2", "a", "two").step().acts


# Work without GPUs (rule 2)


def shared() -> World:
    """One node with 8 GPUs and 8 CPUs, full of jobs of 2 CPUs; `cpu` asks for 4 CPUs and no GPUs."""
    world = World().pool("p", gpus=8, cpu=8000).team("a", 1).team("b", 1).team("none", weight="None")
    world.profile("one", 1, cpu=2000).profile("cpu", 0, cpu=4000)
    return world


@pytest.mark.parametrize("kind", ["session", "job"])
@pytest.mark.parametrize("team", ["a", "none"])
def test_work_without_gpus_evicts_nothing(kind: str, team: str) -> None:
    world = shared().jobs("a1 a2", "a", "one").jobs("b1 b2", "b", "one")
    world.reconcile()
    plan = world.submit("c", team, "cpu", kind=kind).step()
    assert not plan.acts
    assert [w.id for w in plan.pending] == ["c"]
    (start,) = world.end("a2", "b2").step().start
    assert (start.id, start.in_quota) == ("c", team == "a")


def test_work_without_gpus_of_a_policy_beyond_its_reservation_is_not_in_quota() -> None:
    world = shared().jobs("a1 a2", "a", "one")
    world.reconcile()
    (start,) = world.submit("c", "a", "cpu").step().start
    assert not start.in_quota
    assert world.say(start) == "Starts on p-1 of pool p: it requests no GPUs."


@pytest.mark.parametrize("kind", ["session", "job"])
def test_work_without_gpus_is_evicted_where_its_cpu_keeps_guaranteed_gpus_idle(kind: str) -> None:
    world = shared().jobs("c1 c2", "a", "cpu")
    world.reconcile()
    plan = world.submit("b1", "b", "one", kind=kind).step()
    (victim,) = plan.evict
    assert (victim.id, victim.rule) == ("c2", "reclaim")
    assert "and some of the 4 cores that this job uses" in world.say(victim)
    assert {s.id for s in world.release().step().start} == {"b1"}
    assert not world.submit("b2", "b", "one").submit("b3", "b", "one").step().evict, "over quota"


def test_work_without_gpus_that_is_not_preemptible_stays() -> None:
    world = shared()
    for name in ("c1", "c2"):
        world.run(name, "a", "cpu", "p-1", preemptible=False)
    assert not world.submit("b1", "b", "one").step().acts
    assert world.workloads["c1"].state == "running"


def test_a_gpu_job_stays_where_the_cpu_of_work_without_gpus_is_enough() -> None:
    world = shared().jobs("b1 b2", "b", "one").submit("c1", "a", "cpu")
    world.reconcile()
    assert evicted(world.submit("a1", "a", "one").step()) == ["c1"]


def test_work_without_gpus_stays_where_its_cpu_is_not_in_the_way() -> None:
    world = World().pool("p", gpus=2, cpu=64_000).team("a").team("b", 1).profile("one", 1, cpu=1000)
    world.profile("cpu", 0, cpu=4000).jobs("a1 a2", "a", "one").submit("c1", "a", "cpu").reconcile()
    assert evicted(world.submit("b1", "b", "one").step()) == ["a2"]
    assert world.workloads["c1"].state == "running"


# Gangs move (rule 5.6)


def gang(*nodes: str, workers: int = 3, reserved: float = 3, gpus: int = 3) -> World:
    """Two nodes; a gang of `a` with workers of 1 GPU on these nodes; `b` has reserved a whole node."""
    world = World().pool("p", nodes=2, gpus=gpus).team("a", reserved).team("b", gpus)
    world.profile("gang", 1, workers=workers).profile("whole", gpus).profile("three", 3).profile("one", 1)
    return world.run("g", "a", "gang", *nodes)


def moved(plan: Plan) -> dict[str, list[str]]:
    """Return the nodes of each job that moves."""
    assert not plan.evict
    assert {move.rule for move in plan.move} <= {"consolidate"}
    return {move.id: [placed.node for placed in move.to] for move in plan.move}


@pytest.mark.covers("F41", "F42")
@pytest.mark.parametrize("reserved", [2, 3])
def test_a_gang_on_two_nodes_moves_the_worker_that_must(reserved: float) -> None:
    world = gang("p-1", "p-1", "p-2", reserved=reserved).submit("b1", "b", "whole")
    plan = world.step()
    assert moved(plan) == {"g": ["p-1", "p-1", "p-1"]}
    (move,) = plan.move
    assert [p.worker for p in move.to] == [0, 1, 2]
    assert [p.devices for p in move.to[:2]] == [(0,), (1,)], "these workers stay"
    assert world.say(move).startswith("1 of its 3 workers moves from p-2 to p-1, so that b's job b1")
    assert not world.plan().acts
    world.release().reconcile()
    assert world.named() == ["b1", "g"]


def test_only_the_workers_that_must_leave_a_node() -> None:
    world = gang("p-1", "p-1", gpus=4, workers=2).run("f", "a", "three", "p-2")
    world.submit("b1", "b", "three")
    assert moved(world.step()) == {"g": ["p-1", "p-2"]}
    world.release().reconcile()
    assert world.named() == ["b1", "f", "g"]


def test_the_workers_of_two_gangs_change_nodes() -> None:
    world = gang("p-1", "p-2", gpus=4, workers=2).run("h", "a", "gang", "p-1", "p-2")
    world.submit("b1", "b", "whole")
    assert moved(world.step()) == {"g": ["p-2", "p-2"], "h": ["p-2", "p-2"]}
    world.release().reconcile()
    assert world.named() == ["b1", "g", "h"]


def test_a_gang_moves_for_a_gang() -> None:
    world = World().pool("p", nodes=3, gpus=4).team("a", 4).team("b", 8).profile("gang", 1, workers=4)
    world.profile("wide", 4, workers=2).run("g", "a", "gang", "p-1", "p-1", "p-2", "p-3").submit("b1", "b", "wide")
    assert moved(world.step()) == {"g": ["p-1", "p-1", "p-1", "p-1"]}


def test_a_gang_that_has_nowhere_to_go_stays() -> None:
    world = World().pool("p", nodes=2, gpus=3, cpu=6000).team("a", 3).team("b", 3)
    world.profile("gang", 1, workers=3, cpu=2000).profile("whole", 3).run("x", "b", "gang", "p-2", workers=1, cpu=4000)
    world.run("g", "a", "gang", "p-1", "p-1", "p-2").submit("b1", "b", "whole")
    assert not world.step().acts


# Sets of victims, and the plan as a whole (rules 5.4 and 5.5)


@pytest.mark.covers("F17")
def test_an_eviction_that_a_later_one_makes_superfluous_is_withdrawn() -> None:
    """For s, c1 would leave; then a1 leaves for a3 of its own team, which needs half of its GPUs: s takes the rest."""
    world = World().pool("p", nodes=2, gpus=8).team("a", 2).team("b", 10).team("c", 2)
    for size in (3, 4, 5, 8):
        world.profile(f"g{size}", size)
    world.run("b1", "b", "g4", "p-2", kind="session").run("a1", "a", "g8", "p-1", priority=-1)
    world.run("c1", "c", "g3", "p-2").session("s", "b", "g4").submit("a3", "a", "g4")
    plan = world.step()
    assert evicted(plan) == ["a1"]
    assert {w.id: [p.node for p in w.nomination] for w in plan.pending if w.nomination} == {"s": ["p-1"], "a3": ["p-1"]}
    assert not world.plan().acts
    world.release().reconcile()
    assert world.named() == ["a3", "b1", "c1", "s"]


@pytest.mark.covers("F42")
def test_a_gang_that_would_keep_too_few_workers_on_usable_nodes_is_stopped() -> None:
    world = World().pool("p", nodes=4, gpus=2).team("a").team("b", 8).profile("two", 2)
    world.profile("elastic", 2, workers=4, min_workers=3).submit("g", "a", "elastic").reconcile()
    world.nodes["p-1"] = replace(world.nodes["p-1"], cordoned=True)
    plan = world.submit("b1", "b", "two").step()
    assert evicted(plan) == ["g"]
    assert not plan.move
