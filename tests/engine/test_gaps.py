"""Worlds with gaps: records that name missing objects, nominations that no longer fit, nodes without room."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.engines import ENGINES
from engine.properties import check
from makeway_quota.engine import GPU, Node, Placed, Pool, QuotaLine, WhatIf, usage_by_team
from makeway_quota.engine.weights import decayed
from worlds import World


def pair(gpus: int = 4, **settings: object) -> World:
    world = World(**settings).pool("p", gpus=gpus).team("a", reserved=gpus / 2).team("b", reserved=gpus / 2)
    return world.profile("one", 1).profile("two", 2).profile("four", 4).profile("half", 0.5)


# Records that name missing objects


def test_a_node_may_name_an_undeclared_pool() -> None:
    world = pair()
    world.nodes["x"] = Node("x", "elsewhere", 2)
    world.profile("two", 2, pools=("elsewhere",))
    assert [s.pool for s in world.submit("j", "a", "two").step().start] == ["elsewhere"]


def test_work_counts_on_its_first_pool_when_its_node_is_gone() -> None:
    world = pair().submit("j", "a", "two")
    world.change("j", state="running", started_at=1.0, placement=(Placed(0, "gone", (0,)),))
    (line, *_) = world.plan().usage
    assert line.usage == 2 * GPU
    world.pools, world.nodes = {}, {}
    assert world.plan().keep == ("j",)


def test_work_of_a_deleted_team_is_over_quota_and_evictable() -> None:
    world = pair().team("old").profile("two", 2).jobs("o1 o2", "old", "two")
    world.step()
    del world.policies["old"]
    assert [e.id for e in world.submit("a1", "a", "two").step().evict] == ["o2"]


def test_a_device_that_does_not_exist_is_ignored() -> None:
    world = pair().submit("j", "a", "two")
    world.change("j", state="running", started_at=1.0, placement=(Placed(0, "p-1", (0, 9)),))
    assert [s.placement[0].devices for s in world.submit("k", "a", "one").step().start] == [(1,)]


def test_more_work_on_a_node_than_it_has_devices() -> None:
    world = pair()
    world.run("j1", "a", "four", "p-1").run("j2", "b", "four", "p-1").submit("k", "a", "one")
    plan = world.step()
    assert not plan.start
    assert set(plan.keep) | {e.id for e in plan.evict} == {"j1", "j2"}


def test_foreign_pods_on_unknown_devices_take_whole_ones_from_the_last_down() -> None:
    world = pair()
    world.nodes["p-1"] = replace(world.nodes["p-1"], foreign_gpus=1500)
    world.run("j", "b", "one", "p-1")
    plan = world.jobs("h1 h2 h3", "a", "half").step()
    assert sorted(p.devices for s in plan.start for p in s.placement) == [(1,), (1,), (2,)]
    world.nodes["p-1"] = replace(world.nodes["p-1"], foreign_gpus=9000)
    assert world.submit("k", "a", "one").reason("k")[0] in ("too_large", "no_free_gpus")


def test_work_without_gpus_runs_where_cpu_is_left() -> None:
    world = World().pool("p", gpus=1, cpu=2000).team("a", 1).profile("cpu", 0, cpu=1500)
    plan = world.jobs("c1 c2", "a", "cpu").step()
    assert [(s.id, s.placement[0].devices) for s in plan.start] == [("c1", ())]


def test_a_profile_without_pools_waits_with_a_reason() -> None:
    world = pair().profile("lost", 1, pools=("nowhere",)).submit("j", "a", "lost")
    assert world.reason("j") == ("too_large", "Profile lost names no pool that exists.")


def test_a_model_that_no_node_has() -> None:
    world = pair().profile("rare", 1, models=("H200",)).submit("j", "a", "rare")
    assert world.reason("j")[0] == "too_large"
    world.nodes["q"] = Node("q", "p", 1, model="H200")
    assert [s.placement[0].node for s in world.step().start] == ["q"]


def test_a_gang_that_fits_no_set_of_nodes() -> None:
    world = pair().profile("gang", 4, workers=2).submit("j", "a", "gang")
    message = "Too large for pool p: all its nodes together have no room for it; this job needs 8 (2 × 4)."
    assert world.reason("j") == ("too_large", message)


# Nominations


@pytest.mark.parametrize(("what", "amount"), [("cpu", 4000), ("memory", 4000)])
def test_a_nomination_waits_for_cpu_and_memory_too(what: str, amount: int) -> None:
    world = World().pool("p", gpus=2, **{what: 4000}).team("a", 0).team("b", 2)
    world.profile("greedy", 1, **{what: amount}).profile("one", 1, **{what: 1000})
    world.submit("a1", "a", "greedy").reconcile()
    plan = world.submit("b1", "b", "one").step()
    assert [e.id for e in plan.evict] == ["a1"]
    assert not world.step().start, f"the GPU is free, the {what} is not"
    assert world.reason("b1")[0] == "reclaiming"
    world.release()
    assert [s.id for s in world.step().start] == ["b1"]


def test_a_nomination_ends_with_its_node() -> None:
    world = World().pool("p", nodes=2, gpus=2).team("a", 0).team("b", 2).profile("two", 2)
    world.jobs("a1 a2", "a", "two").reconcile()
    (nomination,) = (w.nomination for w in world.submit("b1", "b", "two").step().pending)
    world.nodes[nomination[0].node] = replace(world.nodes[nomination[0].node], cordoned=True)
    world.release()
    assert all(p.node != nomination[0].node for w in world.plan().pending for p in w.nomination)


@pytest.mark.parametrize(("what", "less"), [("gpus", 1), ("cpu", 500), ("memory", 500)])
def test_a_nomination_ends_when_the_node_shrinks(what: str, less: int) -> None:
    world = World().pool("p", gpus=2, cpu=4000, memory=4000).team("a", 0).team("b", 2)
    world.profile("two", 2, cpu=1000, memory=1000).submit("a1", "a", "two").reconcile()
    world.submit("b1", "b", "two").step()
    world.release()
    world.nodes["p-1"] = replace(world.nodes["p-1"], **{what: less})
    plan = world.step()
    assert not plan.start
    assert not any(w.nomination for w in plan.pending)


def test_a_nomination_that_ended_has_no_precedence() -> None:
    world = World().pool("p", nodes=2, gpus=1).team("a").profile("one", 1).jobs("first second", "a", "one")
    world.nodes["p-2"] = replace(world.nodes["p-2"], ready=False)
    world.change("second", nomination=(Placed(0, "p-2", (0,)),))
    assert [s.id for s in world.step().start] == ["first"]


# Moving and terminating


def test_a_job_does_not_move_where_nothing_is_free() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=6).team("b", reserved=2)
    world.profile("one", 1).profile("three", 3).profile("two", 2)
    world.run("a1", "a", "three", "p-1").run("a2", "a", "three", "p-2")
    plan = world.submit("b1", "b", "two").step()
    assert not plan.move
    assert not plan.evict
    assert world.reason("b1")[0] == "fragmented"


def test_only_the_jobs_that_must_move() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=4).team("b", reserved=4)
    world.profile("one", 1).profile("two", 2).profile("three", 3)
    world.run("a1", "a", "one", "p-1").run("a2", "a", "two", "p-1").run("a3", "a", "two", "p-2")
    plan = world.submit("b1", "b", "three").step()
    assert [m.id for m in plan.move] == ["a2"]


def test_the_smallest_job_moves() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=4).team("b", reserved=4)
    world.profile("elastic", 1, workers=2, min_workers=1).profile("four", 4)
    world.run("a1", "a", "elastic", "p-1", "p-1").run("a2", "a", "elastic", "p-2")
    plan = world.submit("b1", "b", "four").step()
    assert [m.id for m in plan.move] == ["a2"]


def test_a_gang_that_may_not_borrow_does_not_grow() -> None:
    world = World().pool("p", nodes=3, gpus=2).team("a", reserved=2, weight="None")
    world.profile("elastic", 2, workers=3, min_workers=1)
    plan = world.submit("g", "a", "elastic").step()
    assert [len(s.placement) for s in plan.start] == [1]


def test_victims_of_another_line_where_a_limit_is_in_the_way() -> None:
    """The session's own team is at its limit in one pool, and work of other teams is evicted for it too."""
    world = World().pool("p", gpus=4).team("a", reserved=2, limit=2).team("b", reserved=1).profile("one", 1)
    world.profile("two", 2).submit("a1", "a", "one").jobs("b1 b2 b3", "b", "one").reconcile()
    plan = world.session("s", "a", "two").step()
    assert sorted((e.id, e.rule) for e in plan.evict) == [("a1", "reclaim_own_limit"), ("b3", "reclaim")]


# The picker and the numbers of teams


def test_offers_list_moves_and_terminating_work() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=4).team("b", reserved=4)
    world.profile("one", 1).profile("two", 2).profile("four", 4)
    world.run("a1", "a", "two", "p-1").run("a2", "a", "two", "p-2")
    offer = WhatIf(world.snapshot()).offer("b", "four", owner="bo")
    assert world.say(offer) == "Ready in 30 s or less: 1 job moves to other GPUs, no job is stopped."
    world = pair().jobs("b1 b2", "b", "two")
    world.reconcile()
    world.session("s", "a", "one").step()
    world.end("s")
    offer = WhatIf(world.snapshot()).offer("a", "one", owner="ana")
    assert world.say(offer) == "Ready in 28 s or less: the GPUs are about to be free."


def test_what_a_team_could_start_respects_capacity_and_static_quotas() -> None:
    world = World().pool("p", gpus=8, capacity=6000).team("a", reserved=2, lend=0).team("b", reserved=2)
    world.profile("one", 1).jobs("b1", "b", "one").reconcile()
    free = {team.team: team.free for team in usage_by_team(world.snapshot())}
    assert free == {"a": 5000, "b": 3000}


def test_a_team_that_reserves_nothing_borrows_all_it_uses() -> None:
    world = pair(gpus=8).team("c").profile("one", 1).jobs("c1 c2", "c", "one")
    world.reconcile()
    (team,) = (item for item in usage_by_team(world.snapshot()) if item.team == "c")
    assert (team.borrowed, team.in_quota) == (2000, 0)


@pytest.mark.parametrize("reserved", [0, 1, 2, 3, 4])
def test_work_counts_once_in_the_usage_after_its_reservation_was_cut(reserved: int) -> None:
    world = World().pool("p", gpus=8).team("top", 4).team("a", 4, parent="top").team("b", 2).profile("one", 1)
    for name in ("s1", "s2", "s3"):
        world.session(name, "a", "one")
    world.jobs("j1 j2", "a", "one").reconcile()
    world.team("a", reserved, parent="top")
    used = {team.team: team for team in usage_by_team(world.snapshot())}
    within = min(reserved, 5)
    assert used["a"].guaranteed + used["a"].in_quota + used["a"].borrowed == 5 * GPU
    assert used["top"].guaranteed + used["top"].in_quota + used["top"].borrowed == 5 * GPU
    if reserved:
        assert used["a"].borrowed == (5 - within) * GPU
        assert used["a"].guaranteed == min(3, within) * GPU


def test_departments_are_no_lenders_of_their_own_teams() -> None:
    world = World().pool("p", gpus=4).team("top", 2).team("a", 1, parent="top").team("b", 1).profile("one", 1)
    world.jobs("a1 a2 a3", "a", "one").reconcile()
    lent = {team.team: team.borrowed_from for team in usage_by_team(world.snapshot())}
    assert lent["a"] == (("b", 1000),)


# Pools that grow


def test_autoscaled_pools_grow_only_for_work_that_may_run_there() -> None:
    world = World().team("a", reserved=0, limit=3).team("none", weight="None").team("b")
    world.pools["cloud"] = Pool("cloud", kind="autoscaled", max_nodes=4, node_gpus=2)
    world.profile("one", 1, pools=("cloud",)).profile("two", 2, pools=("cloud",))
    world.jobs("a1 a2", "a", "two").submit("n", "none", "one").submit("b1", "b", "one")
    (scale,) = world.step().scale
    assert (scale.nodes, scale.workloads) == (2, ("a1", "b1"))


def test_past_use_fades_by_half_lives() -> None:
    assert decayed(1000, 7200, 3600) == 250
    assert decayed(1000, 7200, 0) == 0


def test_departments_with_lines_of_their_own_in_other_pools() -> None:
    world = World().pool("p", gpus=2).pool("q", gpus=2).team("top").team("a", 1, parent="top", pools=("p",))
    world.policies["top"] = replace(world.policies["top"], quotas=(QuotaLine(("q",), reserved=1000),))
    world.profile("one", 1, pools=("p", "q")).jobs("a1 a2 a3 a4", "a", "one")
    plan = world.step()
    assert {s.id: s.pool for s in plan.start if s.in_quota} == {"a1": "p", "a3": "q"}
    assert len(plan.start) == 4


def test_a_nomination_of_a_session_outlives_the_use_of_its_departments_reservation() -> None:
    world = World().pool("p", gpus=4).pool("q", gpus=4).team("b")
    world.team("top", 6).team("a", 4, parent="top", pools=("p",))
    world.profile("p4", 4, pools=("p",)).profile("q2", 2, pools=("q",)).profile("q4", 4, pools=("q",))
    world.submit("b1", "b", "q4").submit("b2", "b", "p4").reconcile()
    assert [e.id for e in world.session("s", "a", "q2").step().evict] == ["b1"]
    assert [e.id for e in world.submit("a1", "a", "p4", preemptible=False).step().evict] == ["b2"]
    world.policies["top"] = replace(world.policies["top"], quotas=(QuotaLine((), 4000),))
    assert not world.step().refused, "it was admitted by what its department reserved then"
    (plan,) = (plan for plan in world.release("b1", "b2").reconcile() if plan.acts)
    assert [s.id for s in plan.start] == ["s", "a1"]
    assert world.say(plan.start[0]) == (
        "Starts on q-1 of pool q, where GPUs were set aside for it: a's notebooks use 6 GPUs, more than the 4 "
        "reserved now."
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_nomination_that_outlives_its_quota_starts_by_right_once_another_one_exceeds_the_limit(engine: str) -> None:
    """Both were nominated within a reservation that is no more; now the team's limit has room for one of them only."""
    world = World().pool("p", gpus=4).team("a", limit=1, weight="None")
    world.profile("one", 1).profile("two", 2).submit("pair", "a", "two").submit("single", "a", "one")
    world.change("pair", nomination=(Placed(0, "p-1", (2, 3)),))
    world.change("single", nomination=(Placed(0, "p-1", (0,)),))
    plan = check(world, ENGINES[engine], Random(7))
    assert [(start.id, start.in_quota) for start in plan.start] == [("single", True)], "the team never borrows"
    assert [waiting.code for waiting in plan.pending] == ["never_over_quota"]
