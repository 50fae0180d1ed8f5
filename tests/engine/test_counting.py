"""Accounting (engine rule 2): reservations, limits, capacity, foreign pods, nodes that are down, weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.engines import ENGINES
from makeway_quota.engine import Plan, QuotaLine, TeamQuota
from makeway_quota.wording.sentences import sentence
from worlds import World


def pair(gpus: int = 8, **settings: object) -> World:
    world = World(**settings).pool("p", gpus=gpus).team("a", reserved=gpus / 2).team("b", reserved=gpus / 2)
    return world.profile("one", 1).profile("two", 2).profile("four", 4).profile("six", 6)


def started(plan: Plan) -> dict[str, bool]:
    """Return the workloads that start, and whether in quota."""
    return {start.id: start.in_quota for start in plan.start}


@pytest.mark.parametrize("state", ["starting", "running", "checkpointing"])
def test_all_that_holds_gpus_counts_on_the_limit(state: str) -> None:
    world = pair().team("a", reserved=4, limit=4).run("a1", "a", "four", "p-1")
    world.change("a1", state=state)
    assert not world.submit("a2", "a", "one").step().start
    assert world.reason("a2")[0] == "limit"


def test_a_job_larger_than_the_reservation_is_over_quota_as_a_whole() -> None:
    world = pair().submit("a1", "a", "six")
    assert started(world.plan()) == {"a1": False}
    world.jobs("b1 b2 b3 b4", "b", "two").reconcile()
    world.submit("a2", "a", "six").end("a1")
    assert not world.plan().evict, "it may not reclaim"


@pytest.mark.parametrize("kind", ["session", "job"])
@pytest.mark.parametrize("lines", [(2, 6), (6, 2)])
def test_every_line_that_covers_the_pool_must_have_room(kind: str, lines: tuple[int, int]) -> None:
    """A reservation for one pool and one for all: the smaller decides, whichever it is."""
    world = World().pool("p", gpus=8).team("a").profile("two", 2)
    both = (QuotaLine(("p",), reserved=lines[0] * 1000), QuotaLine((), reserved=lines[1] * 1000))
    world.policies["a"] = TeamQuota("a", both, weight="None")
    plan = world.submit("x1", "a", "two", kind=kind).submit("x2", "a", "two", kind=kind).step()
    assert started(plan) == {"x1": True}


def test_a_limit_is_hard_for_sessions_too() -> None:
    world = pair().team("a", reserved=4, limit=4).run("s1", "a", "two", "p-1", kind="session")
    world.run("j", "a", "two", "p-1", preemptible=False)
    world.team("a", reserved=6, limit=4)
    assert not world.session("s2", "a", "two").step().acts
    assert world.reason("s2") == ("limit", "a uses 4 of its limit of 4 GPUs; this notebook needs 2.")


def test_others_are_evicted_where_the_capacity_of_the_pool_is_full() -> None:
    world = pair()
    world.pools["p"] = replace(world.pools["p"], capacity=6000)
    world.jobs("b1 b2 b3", "b", "two").reconcile()
    plan = world.submit("a1", "a", "two").step()
    assert [e.id for e in plan.evict] == ["b3"], "two GPUs idle, but six may run"
    world.release().reconcile()
    assert (world.used("a"), world.used("b")) == (2, 4)


def test_foreign_pods_are_never_evicted() -> None:
    world = pair()
    world.nodes["p-1"] = replace(world.nodes["p-1"], foreign_gpus=6000)
    world.submit("b1", "b", "two").reconcile()
    assert not world.submit("a1", "a", "four").step().acts
    assert world.reason("a1")[1].startswith("0 of the 2 GPUs of pool p are free; this job needs 4.")


@pytest.mark.parametrize("down", [{"cordoned": True}, {"ready": False}])
def test_no_workload_is_evicted_from_a_node_that_takes_nothing(down: dict[str, bool]) -> None:
    world = World().pool("p", nodes=2, gpus=2).team("a", reserved=2).team("b").profile("two", 2)
    world.jobs("b1 b2", "b", "two").reconcile()
    node = world.workloads["b2"].placement[0].node
    world.nodes[node] = replace(world.nodes[node], **down)
    plan = world.submit("a1", "a", "two").step()
    assert [e.id for e in plan.evict] == ["b1"], "b2 started last, but its node is of no use"
    assert "b2" in plan.keep


def test_a_part_of_a_reservation_is_lent() -> None:
    world = World().pool("p", gpus=4).team("a", reserved=3, lend=1).team("b").profile("one", 1)
    world.jobs("b1 b2 b3", "b", "one").step()
    assert world.named() == ["b1", "b2"], "two are kept for a"
    world.session("s1", "a", "one").step()
    assert world.named() == ["b1", "b2", "s1"]
    assert not world.plan().start, "one of the two is in use, the other is kept"
    world.session("s2", "a", "one").step()
    plan = world.session("s3", "a", "one").step()
    assert [e.id for e in plan.evict] == ["b2"], "what was lent comes back by reclaim"


@pytest.mark.parametrize(("weight", "used"), [("None", 0), ("Lowest", 0), ("Low", 3), ("Medium", 4), ("High", 5)])
def test_named_weights_share_what_is_over(weight: str, used: int) -> None:
    """Against a team of the weight Medium: none, what is left over, a third, a half, three fifths (of whole jobs)."""
    world = World().pool("p", gpus=8).team("x", weight=weight).team("m").profile("one", 1)
    for at in range(8):
        world.submit(f"x{at}", "x", "one").submit(f"m{at}", "m", "one")
    world.reconcile()
    assert world.used("x") == used
    world.end(*(f"m{at}" for at in range(8))).reconcile()
    assert world.used("x") == (0 if weight == "None" else 8), "all GPUs without another request"


def test_history_is_weighed_like_use() -> None:
    world = World().pool("p", gpus=4).team("a").team("b").profile("one", 1)
    world.policies["a"] = replace(world.policies["a"], history=2000)
    for at in range(4):
        world.submit(f"a{at}", "a", "one").submit(f"b{at}", "b", "one")
    world.step()
    assert (world.used("a"), world.used("b")) == (1, 3), "two GPUs of old use count as two in use"


def test_the_department_that_uses_less_goes_first() -> None:
    world = World().pool("p", gpus=6).team("top").team("a", parent="top").team("b", parent="top").team("c")
    world.profile("one", 1).jobs("a1 a2", "a", "one").step()
    world.submit("b1", "b", "one").submit("c1", "c", "one").submit("b2", "b", "one").submit("c2", "c", "one")
    assert [s.id for s in world.step().start] == ["c1", "c2", "b1", "b2"], "b has nothing, but its department has two"


def test_paused_work_waits_alone() -> None:
    world = pair().submit("a1", "a", "two", paused=True).submit("a2", "a", "two")
    plan = world.step()
    assert [s.id for s in plan.start] == ["a2"]
    assert [(w.id, world.say(w)) for w in plan.pending] == [
        ("a1", "Paused: this job does not start until it is resumed.")
    ]
    world.paused = ("a/two",)
    world.change("a1", paused=False)
    assert not world.step().start
    assert "a2" in world.named(), "what runs goes on"


def department(engine: str = "fast", **more: float) -> World:
    """Return a department that reserves 4 for team a without a line and team b with 2; team c reserves the other 4."""
    world = World().pool("p", gpus=8).team("dep", 4).team("a", parent="dep").team("b", 2, parent="dep", **more)
    world.team("c", 4).profile("one", 1)
    world.engine = ENGINES[engine]
    return world


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_department_guarantees_notebooks_what_it_reserves_and_no_more(engine: str) -> None:
    """Team a has what no line of a team in it reserves, team b its own line, and everybody all that is reserved."""
    world = department(engine)
    for name in ("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "c0", "c1", "c2", "c3", "c4"):
        world.session(name, name[0], "one")
    refused = {refusal.id for refusal in world.step().refused}
    assert world.named() == ["a0", "a1", "b0", "b1", "c0", "c1", "c2", "c3"]
    assert refused == {"a2", "a3", "b2", "b3", "c4"}


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_level_above_a_notebook_is_asked(engine: str) -> None:
    """Team a has 4 of its own, but only 2 are left of what the level above its department reserves."""
    world = World().pool("p", gpus=8).team("top", 4).team("dep", 4, parent="top").team("a", 4, parent="dep")
    world.team("direct", 2, parent="top").profile("one", 1)
    world.engine = ENGINES[engine]
    world.session("d0", "direct", "one").session("d1", "direct", "one").step()
    for at in range(4):
        world.session(f"a{at}", "a", "one")
    assert {refusal.id for refusal in world.step().refused} == {"a2", "a3"}
    assert world.named(team="a") == ["a0", "a1"]


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_that_borrow_a_departments_reservation_make_way_for_the_teams_line(engine: str) -> None:
    world = department(engine)
    world.jobs("a0 a1 a2 a3", "a", "one").jobs("c0 c1 c2 c3", "c", "one").reconcile()
    plan = world.session("b0", "b", "one").submit("b1", "b", "one").step()
    assert {eviction.id for eviction in plan.evict} == {"a2", "a3"}
    assert not plan.refused


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_line_within_another_line_of_its_team_promises_nothing_more_of_the_department(engine: str) -> None:
    world = department(engine).pool("q", gpus=4)
    lines = (QuotaLine(("p",), 2000), QuotaLine(("p", "q"), 2000))
    world.policies["b"] = replace(world.policies["b"], quotas=lines)
    for at in range(3):
        world.session(f"a{at}", "a", "one")
    assert {refusal.id for refusal in world.step().refused} == {"a2"}


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_departments_in_a_circle_are_planned(engine: str) -> None:
    """No policy document has one; a snapshot file may."""
    world = World().pool("p", gpus=4).team("x", 2, parent="z").team("y", parent="x").team("z", parent="y")
    world.profile("one", 1)
    world.engine = ENGINES[engine]
    world.session("x0", "x", "one").session("y0", "y", "one").session("z0", "z", "one")
    assert {refusal.id for refusal in world.step().refused} == {"z0"}


def test_a_refused_notebook_says_whose_guaranteed_gpus_are_in_use() -> None:
    world = department()
    world.session("a0", "a", "one", owner="ana").session("a1", "a", "one", owner="bo").step()
    refused = world.session("a2", "a", "one").step().refused
    assert sentence(refused[0].facts) == (
        "2 of the 2 GPUs that dep guarantees beyond those of its teams are in use: ana 1, bo 1."
    )
    world.policies["dep"] = replace(world.policies["dep"], quotas=(QuotaLine((), 3000),))
    world.session("b0", "b", "one", owner="eva").step()
    refused = world.session("b1", "b", "one").step().refused
    assert sentence(refused[0].facts) == (
        "3 of the 3 guaranteed GPUs of dep, your department, are in use: ana 1, bo 1, eva 1."
    )
