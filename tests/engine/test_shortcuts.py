"""The engine's shortcuts change no decision: a full computation has the same result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from random import Random

import pytest
from engine.histories import HISTORIES, happen, random_world
from makeway_quota.engine import GPU, Placed, schedule
from makeway_quota.engine.cycle import rounds
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.index.nodes import Allocation, NodeState, WorkerPlacement
from makeway_quota.engine.request import Need
from makeway_quota.engine.rules import consolidation, hold
from makeway_quota.engine.rules.victims import ranking as victim_ranking
from makeway_quota.engine.rules.victims.on_node import NodeVictims
from makeway_quota.engine.rules.victims.preemptor import Preemptor
from makeway_quota.engine.rules.victims.sets import Scored
from makeway_quota.engine.rules.victims.trial import evict, restore
from worlds import World

WRONG_ONCE = (23, 25, 32, 58, 118, 358)
"""Seeds of histories in which one of these shortcuts once decided something else."""
SEEDS = min(10, 1 + HISTORIES // 30)
"""Histories of each test: three, and ten with `make invariants`."""
SIZES = (0.5, 1, 2, 4, 8)


@pytest.mark.covers("F14", "F15")
def test_the_cheapest_node_is_chosen_though_few_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    best = victim_ranking.Ranking.best

    def checked(
        ranking: victim_ranking.Ranking, preemptor: Preemptor, without: Collection[int] = ()
    ) -> victim_ranking.Ranked | None:
        chosen = best(ranking, preemptor, without)
        all_of_them = [
            victim_ranking.Ranked(scored[0], node.position, scored[1])
            for node in preemptor.pool.nodes
            if node.position not in without and (scored := ranking._best_set_at(preemptor, node.position))
        ]
        assert chosen == min(all_of_them, key=lambda ranked: ranked[:2], default=None)
        seen["several" if len(all_of_them) > 1 else "one"] += 1
        return chosen

    monkeypatch.setattr(victim_ranking.Ranking, "best", checked)
    for start in range(400):
        crowded(Random(start), 1.0, SIZES).plan()
    assert seen["several"] > 200, seen


@pytest.mark.covers("F16")
def test_no_node_is_scored_below_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[bool] = Counter()
    option = consolidation._option

    def checked(preemptor: Preemptor, node: NodeState, *staying: list[Allocation]) -> consolidation._Option | None:
        result = option(preemptor, node, *staying)
        if result is not None and preemptor.need.min_workers == 1:
            minimum = consolidation._min_moved(preemptor, node)
            assert minimum <= result.cost
            seen[minimum > 0] += 1
        return result

    monkeypatch.setattr(consolidation, "_option", checked)
    for start in range(100):
        crowded(Random(start), 0.5, (4, 8)).plan()
    assert seen[True] > 100, seen


@pytest.mark.covers("F13", "F14")
@pytest.mark.parametrize("start", range(20))
def test_another_round_would_decide_nothing(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(start, rounds.Rounds, "_quota_gains_nothing", lambda *_: False, monkeypatch)


@pytest.mark.covers("F17")
@pytest.mark.parametrize("start", range(20))
def test_whole_devices_are_held_as_any_others(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(part: WorkerPlacement, need: Need, sign: int) -> None:
        part.node.shift(part, need, 0, sign, for_a_while=True)

    compare(start, hold, "_shift", one_by_one, monkeypatch)


def compare(start: int, module: object, name: str, otherwise: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan along random histories, each time also without one of the shortcuts."""
    for seed in (*range(10 * start, 10 * start + SEEDS), *WRONG_ONCE[start : start + 1]):
        random = Random(seed)
        world = random_world(random)
        for _ in range(80 if seed in WRONG_ONCE else 40):
            happen(world, random)
            plan = world.plan()
            with monkeypatch.context() as patch:
                patch.setattr(module, name, otherwise)
                assert schedule(world.snapshot()) == plan
            world.apply(plan)
            world.now += random.choice([1, 5, 600, 4000])


def crowded(random: Random, fill: float, asked: tuple[float, ...]) -> World:
    """Return nodes full of work over quota, and an owner who reclaims them with several jobs."""
    world = World(fair_share=random.choice(["order", "reclaim"]), victim_order=random.choice(["newest", "cheapest"]))
    world.pool("p", nodes=random.randint(3, 8), gpus=8)
    for name in ("a", "b", "c"):
        world.team(name, reserved=random.randint(0, 4), priority=random.choice([0, 0, 1]))
    world.team("owner", reserved=40)
    for size in SIZES:
        world.profile(f"g{size}", size)
    world.profile("elastic", 1, workers=4, min_workers=1)
    for node in list(world.nodes):
        at = 0
        while at < 8:
            size = random.choice([1, 1, 2, 4, 4])
            devices = tuple(range(at, min(8, at + size)))
            at += size
            if len(devices) < size or random.random() > fill:
                continue
            name, world.now = f"w{len(world.workloads):02}", world.now + random.choice([0, 7])
            if size == 4 and random.random() < 0.3:
                world.run(name, random.choice("abc"), "elastic", node)
                placed = tuple(Placed(worker, node, (device,)) for worker, device in enumerate(devices))
            else:
                share = size == 1 and random.random() < 0.3
                world.run(name, random.choice("abc"), f"g{0.5 if share else size}", node)
                placed = (Placed(0, node, devices, GPU // 2 if share else GPU),)
            world.change(name, placement=placed)
    for at in range(random.randint(1, 4)):
        world.submit(f"preemptor{at}", "owner", f"g{random.choice(asked)}")
    return world


def test_a_victim_that_stays_after_all_lets_the_scores_of_other_nodes_stand() -> None:
    world = World().pool("p", nodes=6).team("owner", reserved=40).team("a", reserved=2).team("b", reserved=2)
    world.profile("two", 2)
    for at in range(24):
        world.run(f"j{at:02}", "ab"[at % 2], "two", f"p-{1 + at // 4}")
    cluster = Cluster(world.submit("next", "owner", "two").snapshot())
    workload, scored = cluster.workloads["next"], list[int]()
    account, pool = cluster.account(workload), cluster.pools["p"]
    preemptor = Preemptor(cluster, workload, cluster.need(workload), account, pool, ("reservation",))

    def judge(preemptor: Preemptor, node: NodeState, able: list[Allocation]) -> Scored | None:
        scored.append(node.position)
        return NodeVictims(preemptor, node, able).best()

    ranking = victim_ranking.Ranking(judge)
    first = ranking.best(preemptor)
    assert first is not None
    second = ranking.best(preemptor, {first.position})
    assert second is not None
    scored.clear()
    for victim in first.victims:
        evict(preemptor, victim)
    for victim in first.victims:
        restore(preemptor, victim)
    assert ranking.best(preemptor) == first
    assert ranking.best(preemptor, {first.position}) == second
    assert set(scored) == {first.position}
