"""Sets of victims are counted before they are listed, so that a gang on many nodes costs no more than a few of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from engine.engines import ENGINES
from engine.mixed_worlds import contended_world, with_lost_nodes
from engine.properties import check
from makeway_quota.engine import QuotaLine
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.rules.victims import one_by_one, sets
from makeway_quota.engine.rules.victims.sets import Victim
from makeway_quota.engine.rules.victims.trial import PoolTrial
from worlds import World


@pytest.mark.covers("F42")
def test_the_ways_of_a_gang_on_many_nodes_are_not_listed_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(*values: Any) -> Victim:
        nonlocal made
        made += 1
        return Victim(*values)

    for module in (sets, one_by_one):
        monkeypatch.setattr(module, "Victim", counted)
    world = World().pool("p", nodes=13, gpus=8).team("a").team("b", reserved=16)
    world.profile("elastic", 8, workers=13, min_workers=2).profile("wide", 8, workers=2)
    world.submit("g", "a", "elastic").reconcile()
    world.nodes["p-1"] = replace(world.nodes["p-1"], cordoned=True)
    plan = world.submit("b1", "b", "wide").step()
    assert not plan.evict, "the gang shrinks"
    assert [len(move.to) for move in plan.move] == [10], "the worker on the cordoned node cannot stay, either"
    assert 0 < made < 500


@pytest.mark.covers("F42")
def test_the_count_of_ways_is_the_number_of_those_that_exist() -> None:
    """In worlds where some nodes are lost; beyond the most combinations that are examined, any larger count will do."""
    shrinks = 0
    for seed in range(100):
        cluster = Cluster(with_lost_nodes(contended_world(Random(seed)), Random(seed + 9)).snapshot())
        for allocation in cluster.allocations.values():
            nodes = list({part.node.position: part.node for part in allocation.parts}.values())
            for item in (None, *nodes):
                result = sets.ways(allocation, nodes if item is None else [item])
                assert sets.combinations_of([allocation], item) == 1 + len(result)
                assert all(victim.kept for (victim,) in result if victim.kind == sets.SHRINK)
                shrinks += len(result) - 1
    assert shrinks > 20


@pytest.mark.covers("F42")
def test_a_gang_whose_least_workers_are_in_the_way_is_not_shrunk_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The department's limit admits b1 only without the whole gang: of its 1,022 shrinks, one is tried to see that."""
    world = World().pool("p", nodes=13, gpus=8).team("top", limit=11).team("a", parent="top")
    world.team("b", 10, parent="top").profile("one", 1)
    world.profile("elastic", 1, workers=10, min_workers=1).profile("five", 5, workers=2)
    world.run("g", "a", "elastic", *(f"p-{at}" for at in range(1, 11))).run("a1", "a", "one", "p-11")
    tried = 0
    become = PoolTrial.become

    def counted(trial: PoolTrial, victims: Iterable[Victim] = ()) -> None:
        nonlocal tried
        tried += 1
        become(trial, victims)

    monkeypatch.setattr(PoolTrial, "become", counted)
    plan = world.submit("b1", "b", "five").step()
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("g", "b1")]
    assert 0 < tried < 50


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_victims_that_count_on_different_lines_leave_in_an_order_that_is_legal(engine: str) -> None:
    """The larger one is above the line over both pools only before the smaller one leaves, which has a line of its own.

    The department's limit admits `s` without both only.
    """
    world = World().pool("p").pool("q").team("top", limit=4).team("a", reserved=3, parent="top")
    world.team("b", parent="top").profile("one", 1, pools=("p",)).profile("two", 2, pools=("q",)).profile("three", 3)
    lines = QuotaLine(("p",), 1000), QuotaLine(("p", "q"), 3000)
    world.policies["b"] = replace(world.policies["b"], quotas=lines)
    world.run("kept", "b", "one", "p-1", preemptible=False).run("small", "b", "one", "p-1")
    world.run("large", "b", "two", "q-1").session("s", "a", "three")
    plan = check(world, ENGINES[engine], Random(7))
    assert [eviction.id for eviction in plan.evict] == ["large", "small"]


@pytest.mark.covers("F06", "F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gang_of_which_a_node_is_gone_counts_more_in_a_static_quota_than_it_frees(engine: str) -> None:
    """Without both, `top` and `a` would keep all that is free."""
    world = World(consolidation=False).pool("p", nodes=3, gpus=2).team("top", reserved=6, lend=0)
    world.team("a", reserved=2, lend=0, parent="top").team("b", parent="top").team("c", reserved=5)
    world.profile("one", 1).profile("three", 3).profile("gang", 1, workers=4, min_workers=1)
    world.nodes["p-2"] = replace(world.nodes["p-2"], gpus=3)
    world.run("gang", "b", "gang", "p-1", "p-1", "p-3", "p-3").run("job", "b", "three", "p-2")
    del world.nodes["p-1"]
    plan = ENGINES[engine](world.submit("new", "c", "one").snapshot())
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("job", "new")]
