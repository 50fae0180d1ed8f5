"""Every pending workload has a reason with numbers and names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from makeway_quota.engine import Node
from makeway_quota.engine.cycle.preemptors import replace_preemptors
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.index.groups import PendingWorkloads
from makeway_quota.engine.plan_builder import PlanBuilder
from makeway_quota.engine.rules.victims.preemptor import Preemptor, Rights
from makeway_quota.engine.rules.victims.sets import whole
from worlds import World


def two_teams(**team: object) -> World:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=4, title="Alpha", **team).team("b", reserved=4)
    return world.profile("one", 1).profile("two", 2).profile("three", 3).profile("eight", 8)


@pytest.mark.covers("F10")
def test_limit_names_the_team_and_its_department() -> None:
    world = two_teams(limit=4).jobs("j1 j2", "a", "two").submit("j3", "a", "one")
    assert world.reason("j3") == ("limit", "Alpha uses 4 of its limit of 4 GPUs; this job needs 1.")
    world = two_teams(parent="top").team("top", 0, limit=3, title="Institute").jobs("j1 j2", "a", "two")
    assert world.reason("j2") == ("limit", "Institute uses 2 of its limit of 3 GPUs; this job needs 2.")


@pytest.mark.covers("F03")
def test_a_full_pool_capacity_is_the_reason() -> None:
    world = two_teams()
    world.pools["p"] = replace(world.pools["p"], capacity=3000)
    world.jobs("j1 j2", "a", "two")
    assert world.reason("j2") == ("pool_capacity", "Pool p runs 2 of its capacity of 3 GPUs; this job needs 2.")


def test_no_free_gpus_and_no_candidate_to_evict() -> None:
    world = two_teams()
    world.jobs("j1 j2", "a", "two").jobs("k1 k2", "b", "two").reconcile()
    world.submit("j3", "a", "two")
    assert world.reason("j3") == ("no_free_gpus", "0 of the 8 GPUs of pool p are free; this job needs 2.")


@pytest.mark.covers("F41")
def test_fragmented_has_the_free_gpus_and_their_nodes() -> None:
    world = World(consolidation=False).pool("p", nodes=2, gpus=4).team("a", 8).profile("two", 2).profile("three", 3)
    world.run("j1", "a", "two", "p-1").run("j2", "a", "two", "p-2").submit("j3", "a", "three")
    code, message = world.reason("j3")
    assert code == "fragmented"
    assert message.startswith("4 GPUs of pool p are free, but at most 2 on one node; this job needs 3.")
    assert message.endswith("It is within the reservation, but no preemptible workload would free enough GPUs.")


def test_a_job_larger_than_every_node_is_too_large() -> None:
    world = two_teams().submit("j", "a", "eight")
    assert world.reason("j") == (
        "too_large",
        "Too large for pool p: its largest node has 4 GPUs; this job needs 8.",
    )


@pytest.mark.covers("F32")
def test_a_team_without_weight_never_runs_over_quota() -> None:
    world = two_teams(weight="None").jobs("j1 j2 j3", "a", "two")
    message = "Alpha uses 4 of its 4 reserved GPUs; this job needs 2, and Alpha never runs over quota."
    assert world.reason("j3") == ("never_over_quota", message)


@pytest.mark.covers("F11")
def test_closed_and_paused_queues_lose_nothing() -> None:
    world = two_teams().profile("one", 1, policies=["b"]).submit("j1", "a", "one").submit("j2", "a", "two")
    world.paused = ("a/two",)
    assert world.reason("j1")[0] == "queue_closed"
    assert world.reason("j2") == ("paused", "Paused: the queue a/two starts nothing until it is resumed.")


@pytest.mark.covers("F47")
def test_a_lost_node_is_named() -> None:
    world = two_teams().submit("j", "a", "three")
    world.step()
    world.lose("p-1")
    world.nodes["p-2"] = replace(world.nodes["p-2"], cordoned=True)
    code, message = world.reason("j")
    assert code == "node_failed"
    assert message == (
        "p-1 and p-2 of pool p are not available; this job needs 3 and fits nowhere else."
        " It was running on p-1, which was lost."
    )


@pytest.mark.covers("F05")
def test_outranked_counts_the_workloads_ahead() -> None:
    world = two_teams().jobs("j1 j2", "a", "two").jobs("k1 k2", "b", "two").submit("x", "b", "one")
    assert world.reason("x") == (
        "outranked",
        "4 workloads ahead in pool p took its free GPUs (j1, k1, j2 and k2); 0 are left, this job needs 1.",
    )


@pytest.mark.covers("F40")
def test_reclaiming_has_victims_and_a_deadline() -> None:
    world = two_teams()
    world.jobs("k1 k2 k3 k4", "b", "two", owner="bo").reconcile()
    world.submit("j", "a", "two")
    plan = world.step()
    (waiting,) = [w for w in plan.pending if w.id == "j"]
    assert waiting.code == "reclaiming"
    assert waiting.waits_for == ("k4",)
    assert waiting.not_before == plan.evict[0].deadline
    assert "b's job k4 of bo (2 GPUs)" in world.say(waiting)


def test_time_limits_tell_when_a_start_is_due() -> None:
    world = two_teams().profile("two", 2, time_limit=100).jobs("k1 k2 k3 k4", "b", "two")
    world.step()
    world.submit("x", "b", "two")
    started = min(w.started_at or 0 for w in world.workloads.values() if w.state == "running")
    (waiting,) = world.plan().pending
    assert waiting.not_before == pytest.approx(started + 100)


def test_foreign_pods_and_cpu_count() -> None:
    world = two_teams().profile("one", 1, cpu=2000, memory=100)
    world.nodes = {"n": Node("n", "p", 4, cpu=6000, memory=1000, foreign_gpus=1000, foreign_devices=(0,))}
    plan = world.jobs("j1 j2 j3", "a", "one").step()
    assert [s.placement[0].devices for s in plan.start] == [(1,), (2,)]
    world.nodes = {"n": Node("n", "p", 4, cpu=3000)}
    world.workloads = {}
    world.jobs("j1 j2", "a", "one")
    code, message = world.reason("j2")
    assert code == "outranked"
    world.step()
    code, message = world.reason("j2")
    assert code == "fragmented"
    assert message.startswith("3 GPUs of pool p are free, but on no node together with 2 cores and 100 MiB of memory;")


@pytest.mark.parametrize("rights", [("reservation",), ("reservation", "own_team_any_priority"), ("own_team",)])
def test_a_victim_whose_gpus_another_team_got_is_not_said_to_make_way_for_its_own(rights: Rights) -> None:
    world = World().pool("p", gpus=1).team("a", 1).team("b", 1).profile("one", 1).run("victim", "a", "one", "p-1")
    world.submit("mine", "a", "one", priority=1).submit("theirs", "b", "one")
    cluster = Cluster(world.snapshot())
    mine, theirs = ((group, w) for group in PendingWorkloads(cluster).begin() for w in group.members())
    builder, victim = PlanBuilder(cluster), cluster.allocations["victim"]
    preemptor = Preemptor(cluster, mine[1], mine[0].need, mine[0].account, victim.pool, rights)
    cluster.evict(victim)
    builder.evict(preemptor, [whole(victim)])
    assert builder.evicted["victim"].facts[0].code != "reclaim"
    cluster.nominate(theirs[1], theirs[0].need, victim.parts)
    builder.nominate(theirs[1], theirs[0], victim.pool)
    replace_preemptors(builder)
    evict = builder.evicted["victim"]
    assert (evict.preemptor, evict.rule) == ("theirs", "reclaim")
    assert "a's own jobs" not in world.say(evict)
    assert world.say(evict).startswith("b's job theirs of b-user needs 1 GPU within its reservation;")
