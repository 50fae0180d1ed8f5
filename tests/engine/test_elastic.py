"""Elastic gangs start with the workers that fit, shrink to make room, and grow when they start again (rule 5.5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from makeway_quota.engine import Plan, QuotaLine, WhatIf
from worlds import World


def gang(nodes: int = 4, gpus: int = 8, workers: int = 4, least: int = 2, each: float = 8, **team: float) -> World:
    """A gang of `a` with all its workers, on a cluster that it fills; `b` reserves as much as there is."""
    world = World().pool("p", nodes=nodes, gpus=gpus).team("a", **team).team("b", reserved=nodes * gpus)
    for size in (1, 2, 4, 8):
        world.profile(f"gpu{size}", size)
    world.profile("wide", 8, workers=2).profile("elastic", each, workers=workers, min_workers=least)
    world.submit("g", "a", "elastic").reconcile()
    assert len(world.workloads["g"].placement) == workers
    return world


def shrunk(plan: Plan) -> dict[str, list[str]]:
    """Return the nodes on which each gang that shrinks goes on."""
    assert not plan.evict
    assert {move.rule for move in plan.move} <= {"shrink"}
    return {move.id: [p.node for p in move.to] for move in plan.move}


@pytest.mark.covers("F17", "F42")
@pytest.mark.parametrize("kind", ["session", "job"])
def test_a_gang_gives_up_the_workers_that_are_needed_the_last_ones_first(kind: str) -> None:
    world = gang()
    plan = world.submit("b1", "b", "gpu4", kind=kind).step()
    assert shrunk(plan) == {"g": ["p-1", "p-2", "p-3"]}
    assert [p.worker for p in plan.move[0].to] == [0, 1, 2]
    assert [p.node for w in plan.pending if w.id == "b1" for p in w.nomination] == ["p-4"]
    assert not world.plan().acts


def test_the_reason_names_both_numbers_of_workers() -> None:
    world = gang(reserved=8)
    (move,) = world.submit("b1", "b", "gpu8").step().move
    assert world.say(move) == (
        "b's job b1 of b-user needs 8 GPUs within its reservation; a uses 32 GPUs, 24 more than its 8 reserved; "
        "g is first in the eviction order (lowest priority, most over its share, last started). "
        "It saves a checkpoint and goes on with 3 of its 4 workers."
    )
    assert (move.numbers["workers"], move.numbers["keeps"], move.numbers["frees"]) == (4, 3, 8)


@pytest.mark.covers("F17", "F35")
def test_a_gang_that_shrank_restarts_where_it_was_and_grows_again_when_it_starts_with_gpus_to_spare() -> None:
    world = gang()
    world.submit("b1", "b", "gpu8").step()
    world.release()
    plan = world.step()
    assert {s.id: [p.node for p in s.placement] for s in plan.start} == {"b1": ["p-4"], "g": ["p-1", "p-2", "p-3"]}
    assert world.workloads["g"].attempt == 2
    assert "It starts with 3 of 4 workers." in next(world.say(s) for s in plan.start if s.id == "g")
    world.end("b1")
    assert not world.step().acts, "a gang that runs is not widened"
    world.submit("b2", "b", "wide").step()
    world.end("b2").release()
    (start,) = world.step().start
    assert [p.node for p in start.placement] == ["p-1", "p-2", "p-3", "p-4"], "it had kept two"


def test_a_gang_that_shrank_is_over_quota_as_far_as_it_goes_on() -> None:
    world = gang(reserved=16)
    world.submit("b1", "b", "gpu8").step()
    plan = world.release().step()
    assert {s.id: s.in_quota for s in plan.start} == {"b1": True, "g": False}, "24 of 16"


def test_no_gang_goes_on_with_fewer_than_its_least_number_of_workers() -> None:
    world = gang(least=3)
    assert shrunk(world.submit("b1", "b", "gpu8").step()) == {"g": ["p-1", "p-2", "p-3"]}
    world = gang(least=3)
    plan = world.submit("b1", "b", "wide").step()
    assert [e.id for e in plan.evict] == ["g"]
    assert not plan.move


@pytest.mark.covers("F42")
def test_a_gang_shrinks_for_a_gang() -> None:
    assert shrunk(gang().submit("b1", "b", "wide").step()) == {"g": ["p-1", "p-2"]}


def test_a_gang_gives_up_workers_on_the_node_where_the_fewest_have_to_leave() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a").team("b", reserved=8).profile("one", 1)
    world.profile("two", 2).profile("elastic", 1, workers=6, min_workers=2)
    world.run("s", "b", "one", "p-2", kind="session")
    world.run("g", "a", "elastic", "p-1", "p-1", "p-1", "p-2", "p-2", "p-2")
    plan = world.submit("b1", "b", "two").step()
    assert shrunk(plan) == {"g": ["p-1", "p-1", "p-2", "p-2", "p-2"]}, "one GPU of p-1 is free"


def test_workers_leave_from_the_node_where_one_is_enough() -> None:
    world = World(consolidation=False).pool("p", nodes=2, gpus=4).team("a").team("b", reserved=8).profile("one", 1)
    world.profile("two", 2).profile("elastic", 1, workers=6, min_workers=2)
    world.run("s", "b", "one", "p-1", kind="session").run("t", "b", "one", "p-2", kind="session")
    world.run("g", "a", "elastic", "p-1", "p-1", "p-2", "p-2", "p-2")
    assert shrunk(world.submit("b1", "b", "two").step()) == {"g": ["p-1", "p-2", "p-2", "p-2"]}


def test_workers_on_one_node_leave_one_by_one() -> None:
    world = World().pool("p", gpus=8).team("a").team("b", reserved=8).profile("two", 2)
    world.profile("elastic", 1, workers=8, min_workers=2).submit("g", "a", "elastic").reconcile()
    plan = world.submit("b1", "b", "two").step()
    assert len(plan.move[0].to) == 6
    assert [p.devices for p in plan.move[0].to] == [(0,), (1,), (2,), (3,), (4,), (5,)]


def test_a_gang_within_its_reservation_does_not_shrink() -> None:
    world = World().pool("p", nodes=2, gpus=8).team("a", reserved=16).team("b", reserved=8)
    world.profile("gpu8", 8).profile("elastic", 8, workers=2, min_workers=1)
    world.submit("g", "a", "elastic").reconcile()
    assert not world.submit("b1", "b", "gpu8").step().acts
    assert world.reason("b1")[1].endswith("no preemptible workload would free enough GPUs.")


def test_shrinking_a_gang_costs_less_than_stopping_a_larger_job() -> None:
    world = World().pool("p", nodes=3, gpus=8).team("a").team("b", reserved=8)
    world.profile("gpu8", 8).profile("gpu4", 4).profile("elastic", 4, workers=4, min_workers=2)
    world.run("g", "a", "elastic", "p-1", "p-1", "p-2", "p-2").run("job", "a", "gpu8", "p-3")
    assert shrunk(world.submit("b1", "b", "gpu4").step()) == {"g": ["p-1", "p-1", "p-2"]}


def test_a_gang_shrinks_for_a_higher_priority_of_its_own_team() -> None:
    world = gang()
    plan = world.submit("urgent", "a", "gpu8", priority=1).step()
    assert shrunk(plan) == {"g": ["p-1", "p-2", "p-3"]}
    assert "higher priority" in world.say(plan.move[0])


def test_a_gang_shrinks_where_its_teams_limit_is_in_the_way_of_its_own_session() -> None:
    world = World().pool("p", nodes=3, gpus=4).team("a", reserved=4, limit=8).profile("four", 4)
    world.profile("elastic", 4, workers=2, min_workers=1).submit("g", "a", "elastic").reconcile()
    assert shrunk(world.session("s", "a", "four").step()) == {"g": ["p-1"]}
    world.release().reconcile()
    assert world.used("a") == 8


def test_workers_on_a_cordoned_node_do_not_stay() -> None:
    world = gang()
    world.nodes["p-1"] = replace(world.nodes["p-1"], cordoned=True)
    assert shrunk(world.submit("b1", "b", "gpu8").step()) == {"g": ["p-2", "p-3"]}


def test_a_limit_that_was_lowered_meanwhile_lets_a_gang_go_on_with_its_least() -> None:
    world = gang()
    world.submit("b1", "b", "gpu8").step()
    world.policies["a"] = replace(world.policies["a"], quotas=(QuotaLine(limit=20_000),))
    plan = world.release().step()
    assert {s.id: len(s.placement) for s in plan.start} == {"b1": 1, "g": 2}


def test_the_picker_says_that_a_gang_goes_on_with_fewer_workers() -> None:
    world = gang()
    offer = WhatIf(world.snapshot()).offer("b", "gpu8", owner="bo")
    assert world.say(offer) == "Ready in 30 s or less: 1 gang goes on with fewer workers, no job is stopped."
    assert [victim.id for victim in offer.moved] == ["g"]


def test_a_gang_that_is_wider_than_its_least_moves_as_wide_as_it_is() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=4).team("b", reserved=4)
    world.profile("elastic", 1, workers=2, min_workers=1).profile("two", 2).profile("four", 4)
    world.run("g", "a", "elastic", "p-1", "p-1").run("a1", "a", "two", "p-2", kind="session")
    (move,) = world.submit("b1", "b", "four").step().move
    assert (move.rule, [p.node for p in move.to]) == ("consolidate", ["p-2", "p-2"])


def test_a_gang_restarts_once_for_all_workloads_that_came_meanwhile() -> None:
    world = gang(least=1)
    world.submit("b1", "b", "gpu8").step()
    world.jobs("b2 b3", "b", "gpu8")
    assert not world.step().acts, "it is on its way"
    plan = world.release().step()
    assert {s.id: len(s.placement) for s in plan.start} == {"b1": 1, "b2": 1, "b3": 1, "g": 1}
    assert not plan.evict
    assert world.workloads["g"].attempt == 2
    assert not world.plan().acts
