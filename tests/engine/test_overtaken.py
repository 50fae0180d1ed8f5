"""What the plan after one may do with nothing changed (invariant I7), and what it may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from engine.engines import ENGINES
from engine.overtaken import only_for_such_starts
from engine.properties import check
from engine.test_reference import world_of
from makeway_quota.engine import Placed, Plan, Snapshot
from makeway_quota.snapshot_file import read_snapshot
from worlds import World


def overtaken() -> World:
    """Return a world where a nominated job starts, though the session of its own team needs its GPU and the next one.

    With the session, team b uses 3 of its 2 GPUs, so that team d gets its GPU back from lent.
    """
    world = World().pool("p", gpus=1).pool("q", gpus=2).team("b", 2).team("c").team("d", 1, pools=("p",))
    world.profile("here", 1, pools=("p",)).profile("one", 1, pools=("q",)).profile("two", 2, pools=("q",))
    world.run("lent", "b", "here", "p-1").submit("nominated", "b", "one").submit("over", "c", "one")
    world.change("nominated", nomination=(Placed(0, "q-1", (0,)),))
    return world.session("session", "b", "two").submit("owner", "d", "here")


def two_plans(engine: str) -> tuple[Snapshot, Plan, Plan]:
    world = overtaken()
    world.engine = ENGINES[engine]
    before, plan = world.snapshot(), world.plan()
    world.apply(plan)
    return before, plan, world.plan()


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_team_that_evicts_a_nominated_start_gives_back_what_it_borrowed_in_the_same_plan(engine: str) -> None:
    check(overtaken(), ENGINES[engine], Random(7))
    _, plan, again = two_plans(engine)
    assert [start.id for start in plan.start] == ["nominated", "over"]
    assert not plan.evict
    victims = {(eviction.id, eviction.preemptor) for eviction in again.evict}
    assert victims == {("nominated", "session"), ("over", "session"), ("lent", "owner")}


def full_node() -> World:
    """Return a world where a nominated job of team b starts on 4 of the 5 cores, though its session needs 3 of them.

    Without that job, team c has cores for its gang, too, if high also stops low: its limit is 3 GPUs.
    """
    world = World().pool("p", gpus=3, cpu=5000).pool("q", gpus=2).team("b", 1).team("c", limit=3)
    world.profile("wide", 1, cpu=4000, pools=("p",)).profile("one", 1, cpu=3000, pools=("p",))
    world.profile("gang", 1, workers=2, cpu=1000, pools=("p",)).profile("two", 2, pools=("q",))
    world.run("low", "c", "two", "q-1").submit("high", "c", "gang", priority=1).submit("nominated", "b", "wide")
    world.change("low", placement=(Placed(0, "q-1", (0, 1)),))
    world.change("nominated", nomination=(Placed(0, "p-1", (0,)),))
    return world.session("session", "b", "one")


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_had_no_room_beside_a_nominated_start_evicts_with_the_one_that_evicts_it(engine: str) -> None:
    world = full_node()
    check(world, ENGINES[engine], Random(7))
    assert {w.id for w in world.workloads.values() if w.state == "running"} == {"low", "nominated"}
    assert {(eviction.id, eviction.preemptor) for eviction in world.plan().evict} == {
        ("nominated", "session"),
        ("low", "high"),
    }


@pytest.mark.covers("F14", "F15")
def test_what_had_room_beside_a_nominated_start_is_no_exception() -> None:
    world = full_node()
    before, plan = world.snapshot(), world.plan()
    world.apply(plan)
    again = world.plan()
    assert only_for_such_starts(before, plan, again)
    nodes = tuple(replace(node, cpu=6000) if node.name == "p-1" else node for node in before.nodes)
    assert not only_for_such_starts(replace(before, nodes=nodes), plan, again), "4 + 2 cores"


@pytest.mark.covers("F14", "F15")
def test_what_was_nominated_or_started_evicts_nothing_in_the_next_plan() -> None:
    before, plan, again = two_plans("fast")
    assert only_for_such_starts(before, plan, again)
    place = (Placed(0, "q-1", (0, 1)),)
    twice = tuple(
        replace(waiting, nomination=place) if waiting.id == "session" else waiting for waiting in plan.pending
    )
    assert not only_for_such_starts(before, replace(plan, pending=twice), again)


@pytest.mark.covers("F14", "F15")
def test_an_eviction_of_a_team_that_the_overtaken_start_does_not_concern_is_no_exception() -> None:
    before, plan, again = two_plans("fast")
    workloads = tuple(replace(w, team="c") if w.id == "lent" else w for w in before.workloads)
    assert not only_for_such_starts(replace(before, workloads=workloads), plan, again)


@pytest.mark.covers("F14", "F15")
def test_the_next_plan_starts_nothing() -> None:
    before, plan, again = two_plans("fast")
    assert not only_for_such_starts(before, plan, replace(again, start=plan.start))


def fair_share() -> World:
    """Return a world where w03 of team b starts by a nomination, though w09 of a evicts it for the fair share of a."""
    path = Path(__file__).parent / "worlds" / "overtaken-fair-share-701327.yaml"
    return world_of(read_snapshot(path.read_text()))


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_team_of_an_overtaken_start_may_evict_for_the_fair_share_that_is_left_to_it(engine: str) -> None:
    world = fair_share()
    check(world, ENGINES[engine], Random(7))
    again = ENGINES[engine](world.snapshot())
    assert {(eviction.id, eviction.preemptor) for eviction in again.evict} == {("w03", "w09"), ("w10", "w06")}


@pytest.mark.covers("F14", "F15")
def test_an_eviction_for_the_fair_share_of_another_team_than_that_of_the_start_is_no_exception() -> None:
    world = fair_share()
    before, plan = world.snapshot(), world.plan()
    world.apply(plan)
    again = world.plan()
    assert only_for_such_starts(before, plan, again)
    workloads = tuple(replace(w, team="c") if w.id == "w06" else w for w in before.workloads)
    assert not only_for_such_starts(replace(before, workloads=workloads), plan, again)
