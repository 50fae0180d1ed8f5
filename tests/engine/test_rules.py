"""The rules that the golden scenarios leave out, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.engines import ENGINES
from makeway_quota.engine import Placed, QuotaLine
from worlds import World


def pair(**settings: object) -> World:
    world = World(**settings).pool("p", gpus=8).team("a", reserved=4).team("b", reserved=4)
    return world.profile("one", 1).profile("two", 2).profile("four", 4)


@pytest.mark.covers("F36")
def test_the_cheapest_victim_is_the_one_that_lost_least_work() -> None:
    for order, victim in (("newest", "a4"), ("cheapest", "a3")):
        world = pair(victim_order=order)
        world.jobs("a1 a2 a3 a4", "a", "two").reconcile()
        world.now += 1000
        world.change("a3", last_checkpoint_at=world.now - 1)
        plan = world.submit("b1", "b", "two").step()
        assert [e.id for e in plan.evict] == [victim]


@pytest.mark.covers("F31", "F36")
def test_low_priority_policies_and_jobs_are_evicted_first() -> None:
    world = pair().team("c", reserved=0, priority=1).team("d", reserved=0).profile("one", 1)
    world.jobs("c1 c2", "c", "one").jobs("d1 d2", "d", "one", priority=1).jobs("d3 d4", "d", "one", priority=-1)
    world.jobs("a1 a2", "a", "one").reconcile()
    plan = world.jobs("b1 b2 b3 b4", "b", "one").step()
    assert [e.id for e in plan.evict] == ["d4", "d3", "d2", "d1"]


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_start_over_quota_uses_idle_gpus_until_it_is_reclaimed_with_its_team(engine: str) -> None:
    world = World().pool("p", gpus=4).team("a", reserved=4).team("b", reserved=1)
    world.profile("half", 0.5).profile("two", 2).profile("four", 4)
    world.jobs("b1", "b", "half").step()
    world.submit("b2", "b", "two")  # b is within its reservation until this starts, and 2.5 GPUs beyond 1 then
    world.submit("a1", "a", "four")
    world.engine = ENGINES[engine]
    assert [start.id for start in world.step().start] == ["b2"]
    assert {(e.id, e.preemptor) for e in world.step().evict} == {("b1", "a1"), ("b2", "a1")}
    world.release().reconcile()
    assert world.named("running") == ["a1"]
    assert not world.plan().acts


@pytest.mark.covers("F32")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_that_never_borrows_waits_for_its_victim_where_another_pool_has_room_only_over_quota(engine: str) -> None:
    world = World().pool("p", gpus=2).pool("q", gpus=2).team("a", 2, pools=("q",), weight="None").team("b")
    world.profile("one", 1, pools=("p", "q")).jobs("b1 b2 b3 b4", "b", "one").reconcile()
    victim = next(name for name in ("b1", "b2", "b3", "b4") if world.workloads[name].placement[0].node == "p-1")
    world.end(victim).submit("a1", "a", "one")
    world.engine = ENGINES[engine]
    plan = world.step()
    assert not plan.start, "p has a free GPU, but team a reserves none there"
    assert [(move.preemptor, move.to[0].node) for move in plan.move] == [("a1", "p-1")], "the victim may borrow there"
    assert not plan.evict
    assert world.workloads["a1"].nomination[0].node == "q-1"
    assert "a1" in {start.id for start in world.release().step().start if start.in_quota}


@pytest.mark.covers("F32")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("department", "started"), [(4, 4), (6, 2)])
def test_a_department_and_its_teams_keep_the_larger_of_both_free(engine: str, department: int, started: int) -> None:
    world = World().pool("p", gpus=8).team("top", reserved=department, lend=0)
    world.team("a", reserved=2, lend=0, parent="top").team("b", reserved=2, lend=0, parent="top").team("c")
    world.profile("one", 1).jobs("c1 c2 c3 c4 c5 c6", "c", "one")
    world.engine = ENGINES[engine]
    plan = world.plan()
    assert len(plan.start) == started
    assert {(w.code, w.rule) for w in plan.pending} == {("static_quota", "lend")}


def test_min_runtime_protects_from_jobs_but_not_from_sessions() -> None:
    world = pair().profile("two", 2, min_runtime=100).jobs("a1 a2 a3 a4", "a", "two")
    world.step()
    assert not world.submit("b1", "b", "two").step().evict
    assert world.reason("b1")[0] == "protected"
    assert [e.id for e in world.session("s", "b", "one").step().evict] == ["a4"]
    world.release()
    world.step()
    world.now += 200
    assert [e.preemptor for e in world.step().evict] == ["b1"]


def test_reclaim_after_waits_for_a_free_node_first() -> None:
    world = pair()
    world.profile("slow", 2, reclaim_after=60).jobs("a1 a2 a3 a4", "a", "two").reconcile()
    assert not world.submit("b1", "b", "slow").step().evict
    assert world.reason("b1")[1].endswith("It waits 1 min for free GPUs before other work makes way for it.")
    world.now += 60
    assert [e.id for e in world.step().evict] == ["a4"]


def test_a_higher_priority_job_preempts_its_own_team() -> None:
    world = pair()
    world.jobs("b1 b2", "b", "two").jobs("a1 a2", "a", "two", priority=-1).reconcile()
    plan = world.submit("urgent", "a", "two", priority=1).step()
    assert [(e.id, e.rule) for e in plan.evict] == [("a2", "preempt_in_team")]
    world.release().reconcile()
    assert "urgent" in world.named()
    calm = pair(in_team_preemption=False).jobs("b1 b2", "b", "two").jobs("a1 a2", "a", "two", priority=-1)
    calm.reconcile()
    assert not calm.submit("urgent", "a", "two", priority=1).step().evict


@pytest.mark.covers("F36")
def test_fair_share_reclaims_between_teams_that_borrow() -> None:
    for mode, evicted in (("order", []), ("reclaim", ["a8", "a7", "a6", "a5"])):
        world = World(fair_share=mode).pool("p", gpus=8).team("a").team("b").profile("one", 1)
        world.jobs("a1 a2 a3 a4 a5 a6 a7 a8", "a", "one").reconcile()
        world.jobs("b1 b2 b3 b4 b5 b6", "b", "one")
        plan = world.step()
        assert [e.id for e in plan.evict] == evicted
        assert not world.plan().acts
        world.release().reconcile()
        assert world.used("b") == len(evicted)


@pytest.mark.covers("F31", "F36")
def test_over_quota_use_follows_the_weights() -> None:
    world = World().pool("p", gpus=8).team("a", weight="High").team("b", weight="Low").team("z", weight="Lowest")
    world.profile("one", 1).jobs("z1 z2", "z", "one")
    world.jobs(" ".join(f"a{i}" for i in range(9)), "a", "one").jobs(" ".join(f"b{i}" for i in range(9)), "b", "one")
    world.reconcile()
    assert (world.used("a"), world.used("b"), world.used("z")) == (6, 2, 0)


def test_history_counts_against_a_team() -> None:
    world = World().pool("p", gpus=4).team("a").team("b").profile("one", 1)
    world.policies["a"] = replace(world.policies["a"], history=3000)
    world.jobs("a1 a2 a3 a4", "a", "one").jobs("b1 b2 b3 b4", "b", "one").reconcile()
    assert (world.used("a"), world.used("b")) == (1, 3), "a counts 3 GPUs of past use; at equal shares its job is older"


def test_users_of_a_team_take_turns() -> None:
    for fair, mine in ((True, 2), (False, 4)):
        world = World(user_fairness=fair).pool("p", gpus=4).team("a", 4).profile("one", 1)
        world.jobs("x1 x2 x3 x4", "a", "one", owner="xi").jobs("y1 y2 y3 y4", "a", "one", owner="yu").reconcile()
        assert len([i for i in world.named() if i.startswith("x")]) == mine


@pytest.mark.covers("F33")
def test_departments_cap_and_guarantee_the_sum_of_their_teams() -> None:
    world = World().pool("p", gpus=8).team("top", 4, limit=6).team("a", 0, parent="top").team("b", 0, parent="top")
    world.team("other", 4).profile("one", 1)
    world.jobs("o1 o2 o3 o4 o5 o6 o7 o8", "other", "one").reconcile()
    world.jobs("a1 a2 a3", "a", "one").jobs("b1 b2 b3", "b", "one")
    plan = world.step()
    assert len(plan.evict) == 4, "the department's four, whichever of its teams asks"
    world.release().reconcile()
    assert world.used("a") + world.used("b") == 4
    assert world.used("other") == 4
    world.end(*(f"o{i}" for i in range(1, 9))).reconcile()
    assert world.used("a") + world.used("b") == 6
    assert not world.plan().acts


def test_a_team_keeps_its_own_reservation_inside_the_department() -> None:
    world = World().pool("p", gpus=4).team("top", 4).team("a", 0, parent="top").team("b", 2, parent="top")
    world.profile("one", 1).jobs("a1 a2 a3 a4", "a", "one").reconcile()
    assert world.used("a") == 4
    plan = world.jobs("b1 b2 b3", "b", "one").step()
    assert [e.id for e in plan.evict] == ["a4", "a3"]


@pytest.mark.covers("F04")
def test_shares_of_a_device_fill_one_device_first() -> None:
    world = World().pool("p", nodes=2, gpus=2).team("a", 4).profile("half", 0.5).profile("quarter", 0.25)
    world.profile("two", 2).jobs("h1", "a", "half").jobs("q1 q2 q3", "a", "quarter")
    plan = world.step()
    places = [s.placement[0] for s in plan.start]
    assert [(p.node, p.devices, p.milli_per_device) for p in places] == [
        ("p-1", (0,), 500),
        ("p-1", (0,), 250),
        ("p-1", (0,), 250),
        ("p-1", (1,), 250),
    ]
    assert world.submit("whole", "a", "two").step().start[0].placement[0].node == "p-2"


def test_spread_takes_the_emptiest_node() -> None:
    world = World().pool("p", nodes=2, gpus=4, strategy="spread").team("a", 8).profile("one", 1)
    plan = world.jobs("j1 j2 j3 j4", "a", "one").step()
    assert [s.placement[0].node for s in plan.start] == ["p-1", "p-2", "p-1", "p-2"]


@pytest.mark.covers("F35")
def test_an_evicted_job_returns_ahead_of_later_ones() -> None:
    world = pair()
    world.jobs("a1 a2 a3 a4", "a", "two").reconcile()
    world.submit("b1", "b", "two").step()
    world.release().submit("a5", "a", "two").reconcile()
    world.end("b1")
    assert [s.id for s in world.step().start] == ["a4"]


def test_nothing_takes_nominated_gpus() -> None:
    world = pair()
    world.jobs("a1 a2 a3 a4", "a", "two").reconcile()
    world.submit("b1", "b", "four").step()
    assert len(world.named("checkpointing")) == 2
    world.release(world.named("checkpointing")[0])
    plan = world.jobs("a9", "a", "two").step()
    assert not plan.start, "half of it is free, and kept for b1"
    assert world.reason("a9")[0] == "nominated"
    assert not plan.evict
    world.release()
    assert [s.id for s in world.step().start] == ["b1"]


def test_lines_over_some_pools_count_only_there() -> None:
    world = World().pool("fast", gpus=4).pool("slow", gpus=4).team("a").profile("one", 1, pools=("fast", "slow"))
    lines = (QuotaLine(("fast",), reserved=1000, limit=2000), QuotaLine((), limit=5000))
    world.policies["a"] = replace(world.policies["a"], quotas=lines)
    plan = world.jobs("j1 j2 j3 j4 j5 j6", "a", "one").step()
    assert [s.pool for s in plan.start] == ["fast", "fast", "slow", "slow", "slow"]
    assert [world.say(w) for w in plan.pending] == ["a uses 2 of its limit of 2 GPUs; this job needs 1."]


def test_a_node_that_is_gone_does_not_stop_the_rest() -> None:
    world = pair()
    world.submit("a1", "a", "two")
    world.change("a1", state="running", placement=(Placed(0, "nowhere", (0,)),))
    plan = world.submit("a2", "a", "two").step()
    assert [s.id for s in plan.start] == ["a2"]
    assert plan.keep == ("a1",)


def test_a_start_that_takes_a_team_beyond_its_fair_share_lets_others_reclaim_in_the_same_plan() -> None:
    world = World(fair_share="reclaim").pool("p", nodes=2, gpus=4).team("a").team("b").team("c", 1)
    world.profile("one", 1).profile("three", 3).run("c1", "c", "one", "p-2", kind="session")
    world.run("a1", "a", "one", "p-1").run("a2", "a", "one", "p-1").run("a3", "a", "one", "p-2")
    plan = world.submit("b1", "b", "three").submit("a4", "a", "one").step()
    assert [s.id for s in plan.start] == ["a4"]
    assert [(m.id, m.preemptor, m.to[0].node) for m in plan.move] == [("a3", "b1", "p-1")], "it gets what is left there"
    assert not plan.evict
    assert not world.plan().acts


def test_a_start_on_gpus_about_to_be_free_lets_a_higher_priority_preempt_its_own_team_in_the_same_plan() -> None:
    world = World().pool("p", gpus=4).team("a", 1).team("b").profile("one", 1).profile("two", 2).profile("three", 3)
    world.run("a1", "a", "one", "p-1", priority=-1).run("b1", "b", "two", "p-1")
    world.change("b1", state="checkpointing", deadline=world.now + 30)
    plan = world.submit("a2", "a", "three", priority=1).submit("b2", "b", "one").step()
    assert [s.id for s in plan.start] == ["b2"]
    assert [(e.id, e.rule) for e in plan.evict] == [("a1", "preempt_in_team")]
    assert not world.plan().acts
