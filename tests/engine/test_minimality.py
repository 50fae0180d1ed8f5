"""Compare how much a plan stops with the least that an exhaustive search finds, in small worlds played to rest."""

from __future__ import annotations

import os
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from random import Random

import pytest
from engine.engines import ENGINES, Engine
from engine.facts import Facts
from engine.fewest import cheaper_sets
from engine.host_worlds import crowded_world
from engine.legal_sets import Leaving
from engine.properties import check
from engine.small_worlds import small_world
from makeway_quota.engine import Plan
from makeway_quota.engine.placement import together
from worlds import World

ROUNDS = 40
WORLDS = int(os.environ.get("MINIMALITY", "60"))
"""So many worlds with an eviction are compared."""
MAX_SHARE = 0.01
"""In so many of them a plan may stop more than needed: where the search goes by the order of rule 3."""


def stops_too_much(world: World, engine: Engine) -> bool | None:
    """Whether a plan stops more than needed while a world comes to rest; None if nothing is evicted in it."""
    world.engine, result = engine, None
    for _ in range(ROUNDS):
        before, plan = _copy(world), world.plan()
        if plan.evict or any(move.rule == "shrink" for move in plan.move):
            result = bool(result) or _could_stop_less(before, plan)
        world.apply(plan)
        world.now += 1
        if not plan.acts and not world.named("checkpointing"):
            return result
        world.release()
    raise AssertionError("the world does not come to rest")


def _could_stop_less(world: World, plan: Plan) -> bool:
    """Whether a cheaper set would do, none of whose members returns at once by evicting (rule 5.4 a)."""
    facts = Facts(world.snapshot())
    served = [s.id for s in plan.start] + [w.id for w in plan.pending if w.nomination]
    returning = False
    for group in cheaper_sets(facts, plan):
        if not _returns(world, served, group):
            return True
        returning = True
    return returning and _any_returns(world, served, [eviction.id for eviction in plan.evict])


def _returns(world: World, served: Iterable[str], group: Iterable[Leaving]) -> bool:
    return _any_returns(world, served, [leaving.victim.id for leaving in group if not leaving.kept])


def _any_returns(world: World, served: Iterable[str], stopped: list[str]) -> bool:
    return any(_evicts(world, served, stopped, name) for name in stopped)


def _evicts(world: World, served: Iterable[str], stopped: list[str], name: str) -> bool:
    """Whether a victim, the only one of those that are stopped that waits, evicts once the others have started."""
    other, kept = _copy(world), {*served, name}
    waiting = [w.id for w in world.workloads.values() if w.state == "pending" and w.id not in kept]
    other.end(*waiting, *(item for item in stopped if item != name), state="cancelled")
    other.change(name, state="checkpointing", evicted_for=next(iter(served)), deadline=other.now)
    for _ in range(ROUNDS):
        other.release()
        plan = other.plan()
        if any(eviction.preemptor == name for eviction in plan.evict):
            return True
        if not plan.acts:
            return False
        other.apply(plan)
        other.now += 1
    return True


def _copy(world: World) -> World:
    other = copy(world)
    other.nodes, other.workloads, other.plans = dict(world.nodes), dict(world.workloads), []
    return other


def _world(seed: int) -> World:
    """Return a small world; every fourth one of machines in two pools that share CPU, memory and pods."""
    if seed % 4 != 3:
        return small_world(Random(seed))
    world = crowded_world(Random(seed))
    world.settings = replace(world.settings, fair_share="order")  # the exhaustive search knows no fair share
    return world


@pytest.mark.covers("F16", "F17")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ENGINES)
def test_plans_rarely_stop_more_than_the_least_that_would_do(engine: str) -> None:
    compared, too_much, seed = 0, [], 0
    while compared < WORLDS:
        judged = stops_too_much(_world(seed), ENGINES[engine])
        compared += judged is not None
        too_much += [seed] if judged else []
        seed += 1
    print(f"{len(too_much)} of {compared} worlds with evictions stop more than needed: {too_much}")
    assert len(too_much) <= max(1, MAX_SHARE * compared)


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("search", [True, False])
def test_a_victim_is_spared_where_its_preemptors_have_room_in_an_order_of_their_cpu(
    engine: str, search: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b1 and b2 need 2 cores each, and share a GPU of theirs; with w9 running on, they fit before b and c only.

    A search of all places finds those beside w1, too, which is protected more; then w9 is needed.
    """
    if not search:
        monkeypatch.setattr(together.Search, "places", lambda *_: None)
    world = World().pool("p", nodes=3, gpus=3, cpu=4000).team("a").team("b", 3).team("c", 4)
    world.profile("one", 1, cpu=1000).profile("gang", 1, workers=2, cpu=1000).profile("light", 0, cpu=1500)
    world.profile("halves", 0.5, workers=2, cpu=1000)
    world.run("w0", "a", "gang", "p-2", "p-2").run("w1", "b", "light", "p-2").run("w2", "c", "light", "p-3")
    world.run("w3", "c", "gang", "p-3", "p-3").run("w5", "c", "gang", "p-1", "p-1").run("w9", "b", "light", "p-1")
    for name in ("w0", "w3", "w5"):
        placement = world.workloads[name].placement
        world.change(name, placement=tuple(replace(placed, devices=(placed.worker,)) for placed in placement))
    world.submit("b", "b", "one").submit("c", "c", "one", preemptible=False).jobs("b1 b2", "b", "halves")
    plan = check(world, ENGINES[engine], Random(7))
    assert {eviction.id for eviction in plan.evict} == {"w0", "w2", "w9" if search else "w1"}
