"""The ranking of nodes finds the best set of victims of all nodes, though it scores only those below the best found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from random import Random

import pytest
from engine.histories import random_world
from engine.mixed_worlds import contended_world, happen_mixed, mixed_world
from makeway_quota.engine import WhatIf
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.index.nodes import Allocation, NodeState
from makeway_quota.engine.rules.victims.bounds import bounds_of
from makeway_quota.engine.rules.victims.on_node import NodeVictims
from makeway_quota.engine.rules.victims.preemptor import Preemptor, Rights
from makeway_quota.engine.rules.victims.ranking import Ranking, enough_devices
from makeway_quota.engine.rules.victims.sets import Scored
from makeway_quota.engine.snapshot import LIVE
from worlds import World

SEEDS = int(os.environ.get("HISTORIES", "40"))
RIGHTS: tuple[Rights, ...] = (
    ("reservation",),
    ("reservation", "own_team_any_priority"),
    ("reservation", "own_team"),
    ("own_team",),
    ("fair_share",),
    ("own_team", "fair_share"),
)


def judge(preemptor: Preemptor, node: NodeState, able: list[Allocation]) -> Scored | None:
    return NodeVictims(preemptor, node, able).best()


def preemptors(cluster: Cluster) -> Iterator[Preemptor]:
    for workload in cluster.workloads.values():
        need = cluster.need(workload)
        if workload.state == "pending" and need.min_workers == 1:
            for pool in cluster.pools_of(workload):
                for rights in RIGHTS:
                    yield Preemptor(cluster, workload, need, cluster.account(workload), pool, rights)


def scores(preemptor: Preemptor) -> dict[int, Scored]:
    """Score every node."""
    result = {}
    for node in preemptor.pool.nodes:
        able = preemptor.candidates_on(node) if node.suits(preemptor.need) else []
        if able and enough_devices(preemptor, node, able) and (scored := judge(preemptor, node, able)):
            result[node.position] = scored
    return result


def lived_in(random: Random) -> World:
    """Return a mixed world after some events; the last ones are not planned for yet."""
    world = mixed_world(random)
    for _ in range(random.randint(5, 25)):
        happen_mixed(world, random)
        world.apply(world.plan())
        world.now += random.choice([1, 600])
    for _ in range(6):
        happen_mixed(world, random)
    return world


@pytest.mark.parametrize("make", [lived_in, contended_world])
def test_no_node_is_better_than_its_bound_and_the_best_of_all_is_found(make: Callable[[Random], World]) -> None:
    compared = 0
    for seed in range(SEEDS):
        cluster = Cluster(make(Random(seed)).snapshot())
        for preemptor in preemptors(cluster):
            every, bounds = scores(preemptor), bounds_of(cluster, preemptor.pool, preemptor.need)
            for position, (exact, _) in every.items():
                bound = bounds.at(position)
                minimum = bound.key(preemptor.shares()) if bound else None
                assert minimum is not None, (seed, preemptor.workload.id, position)
                assert minimum <= exact, (seed, preemptor.workload.id, position)
            expected = min(((exact, position) for position, (exact, _) in every.items()), default=None)
            ranking, result = Ranking(judge), None
            for _ in range(2):  # the second time from what the first one learned
                result = ranking.best(preemptor)
                assert (result[:2] if result else None) == expected, (seed, preemptor.workload.id, preemptor.rights)
            compared += expected is not None
    assert compared > 50


@pytest.mark.parametrize("make", [random_world, mixed_world])
@pytest.mark.parametrize("seed", range(5))
def test_bounds_that_are_kept_from_question_to_question_change_no_offer(
    seed: int, make: Callable[[Random], World]
) -> None:
    random = Random(seed)
    world = make(random)
    kept = WhatIf(world.snapshot())
    for _ in range(15):
        happen_mixed(world, random)
        snapshot = world.snapshot()
        kept.renew(snapshot)
        for team in sorted(world.policies)[:2]:
            for profile in sorted(world.profiles):
                for kind in ("session", "job"):
                    expected = WhatIf(snapshot).offer(team, profile, kind, "ana")
                    assert kept.offer(team, profile, kind, "ana") == expected
        world.apply(world.plan())
        world.now += random.choice([1, 5, 600])
        world.workloads = {i: w for i, w in world.workloads.items() if w.state in LIVE}
