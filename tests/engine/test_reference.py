"""The reference engine keeps the invariants, and the fast engine makes the same decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from engine.cascades import come_to_rest
from engine.engines import ENGINES, differences
from engine.histories import HISTORIES, happen, random_world
from engine.mixed_worlds import (
    contended_world,
    happen_mixed,
    in_two_pools,
    keep_more_back,
    mixed_world,
    with_a_department,
    with_foreign_pods,
    with_holds,
    with_lost_nodes,
)
from engine.properties import check
from makeway_quota.engine import Placed, Plan, Snapshot, reference, schedule
from makeway_quota.engine.cycle import admission
from makeway_quota.engine.reference import cycle as reference_cycle
from makeway_quota.engine.snapshot import LIVE
from makeway_quota.snapshot_file import read_snapshot
from worlds import World

WORLDS = Path(__file__).parent / "worlds"
PARTS = 20
"""The slow tier in parts, so that several processors may share it."""
ROWS = ("F13", "F14", "F15", "F16", "F17")
KINDS: dict[str, tuple[Callable[[Random], World], Callable[[World, Random], None]]] = {
    "plain": (random_world, happen),
    "mixed": (mixed_world, happen_mixed),
}


def compare(world: World) -> Plan:
    """Plan with both engines, which must decide the same; return the plan of the fast one."""
    snapshot = world.snapshot()
    plan = schedule(snapshot)
    differing = differences(plan, reference.schedule(snapshot))
    assert not differing, f"fast and reference differ: {differing}"
    return plan


def live_through(kind: str, seed: int, events: int) -> None:
    """Compare the plans of both engines along a random history."""
    make, happens = KINDS[kind]
    random = Random(seed)
    world = make(random)
    for _ in range(events):
        happens(world, random)
        world.apply(compare(world))
        world.now += random.choice([1, 5, 600])
        world.workloads = {i: w for i, w in world.workloads.items() if w.state in LIVE}


def keep_the_invariants(kind: str, seed: int, events: int, engine: str) -> None:
    """Check the invariants of one engine along a random history."""
    make, happens = KINDS[kind]
    random = Random(seed)
    world = make(random)
    for _ in range(events):
        happens(world, random)
        check(world, ENGINES[engine], Random(7))
        world.now += random.choice([1, 5, 600])
        world.workloads = {i: w for i, w in world.workloads.items() if w.state in LIVE}


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(4))
def test_both_engines_decide_the_same_over_random_histories(kind: str, part: int) -> None:
    for seed in range(2 * part, 2 * part + 2):
        live_through(kind, seed, 25)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("part", range(4))
def test_both_engines_decide_the_same_in_contended_worlds(part: int) -> None:
    for seed in range(20 * part, 20 * part + 20):
        compare(contended_world(Random(seed)))


@pytest.mark.covers(*ROWS)
def test_a_nomination_that_starts_in_another_pool_frees_reservation_for_the_same_class() -> None:
    live_through("plain", 3199, 40)


@pytest.mark.covers(*ROWS)
def test_both_engines_decide_the_same_with_static_quotas() -> None:
    for seed in (*range(80), 6306):
        compare(keep_more_back(contended_world(Random(seed)), Random(seed + 7)))


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_keeps_the_invariants(kind: str, engine: str) -> None:
    for seed in range(4):
        keep_the_invariants(kind, seed, 20, engine)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_plan_of_a_contended_world_keeps_the_invariants(engine: str) -> None:
    victims = 0
    for seed in range(40):
        plan = check(contended_world(Random(seed)), ENGINES[engine], Random(7))
        victims += bool(plan.evict or plan.move)
    assert victims > 10


@pytest.mark.covers("F16")
@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_move_for_a_gang_in_the_plan_that_starts_others_on_their_node(engine: str) -> None:
    plan = check(contended_world(Random(310419)), ENGINES[engine], Random(7))
    assert [start.id for start in plan.start] == ["new0"]
    assert [(move.id, move.preemptor) for move in plan.move] == [("w02", "new2")]


@pytest.mark.covers("F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_victim_is_spared_where_a_later_preemptor_leaves_its_devices_to_an_earlier_one(engine: str) -> None:
    plan = check(contended_world(Random(9004177)), ENGINES[engine], Random(7))
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("w03", "new2")]
    assert sorted(waiting.id for waiting in plan.pending if waiting.nomination) == ["new1", "new2"]


@pytest.mark.covers("F15")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("overbooked", ["cpu", "memory"])
def test_a_victim_is_spared_on_a_node_that_foreign_pods_overbook(overbooked: str, engine: str) -> None:
    """p1 alone evicts v; then p2 evicts h, which leaves room for both."""
    world = World(consolidation=False).pool("p", nodes=2, gpus=8).team("a").team("b", 5)
    world.profile("eight", 8).profile("uses", 1, **{overbooked: 4000}).profile("one", 1).profile("four", 4)
    foreign = {overbooked: 8000, f"foreign_{overbooked}": 6000}
    world.nodes["p-2"] = replace(world.nodes["p-2"], gpus=1, **foreign)  # type: ignore[arg-type]
    world.run("h", "a", "eight", "p-1").run("v", "a", "uses", "p-2")
    world.change("h", placement=(Placed(0, "p-1", tuple(range(8))),))
    world.change("v", placement=(Placed(0, "p-2", (0,)),))
    world.engine = ENGINES[engine]
    world.submit("p1", "b", "one").submit("p2", "b", "four")
    plan = check(world, ENGINES[engine], Random(7))
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("h", "p2")]
    assert sorted(waiting.id for waiting in plan.pending if waiting.nomination) == ["p1", "p2"]


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("part", range(2))
def test_both_engines_keep_the_invariants_where_foreign_pods_overbook_nodes(part: int) -> None:
    for seed in range(40 * part, 40 * part + 40):
        world = with_foreign_pods(contended_world(Random(seed)), Random(seed + 3))
        compare(world)
        check(world, ENGINES["fast" if seed % 2 else "reference"], Random(7))


@pytest.mark.covers("F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_victim_that_was_spared_is_spared_again_from_a_later_eviction(engine: str) -> None:
    """y's victim leaves room for x, so that v is spared; b1 evicts v, and then b2's victim leaves room for b1."""
    world = World(consolidation=False).pool("p", gpus=8).team("a", 3).team("b")
    world.profile("one", 1).profile("two", 2).profile("three", 3)
    for name, profile, devices in (("v", "two", (0, 1)), ("w1", "three", (2, 3, 4)), ("w2", "three", (5, 6, 7))):
        world.run(name, "b", profile, "p-1")
        world.change(name, placement=(Placed(0, "p-1", devices),))
    world.submit("x", "a", "one", priority=1).submit("y", "a", "two")
    world.submit("b1", "b", "one", priority=1, owner="ana").submit("b2", "b", "two", priority=1, owner="bob")
    plan = check(world, ENGINES[engine], Random(7))
    assert {eviction.id for eviction in plan.evict} == {"w1", "w2"}
    assert sorted(waiting.id for waiting in plan.pending if waiting.nomination) == ["b1", "b2", "x", "y"]


@pytest.mark.covers("F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_victim_is_not_spared_where_its_cpu_is_promised_to_the_start_that_needed_it(engine: str) -> None:
    """Team a's start fits beside x only until team b's nominated job runs: 3 + 2 + 2 cores of 6."""
    world = World(consolidation=False).pool("p", gpus=8, cpu=6000).team("a", 3).team("b", 3)
    world.profile("three", 3, cpu=2000).profile("four", 4, cpu=500).profile("none", 0, cpu=3000)
    world.run("y", "a", "four", "p-1").run("x", "a", "none", "p-1")
    world.engine = ENGINES[engine]
    world.submit("b1", "b", "three")
    world.change("y", state="checkpointing", evicted_for="b1", deadline=world.now + 30)
    world.change("b1", nomination=(Placed(0, "p-1", (0, 1, 2)),))
    world.submit("a1", "a", "three", preemptible=False)
    plan = check(world, ENGINES[engine], Random(7))
    assert [start.id for start in plan.start] == ["a1"]
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("x", "a1")]


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_nomination_stands_where_its_teams_other_work_uses_up_the_departments_reservation(engine: str) -> None:
    """a1 counts on its department in q, a2 on its own team in p: a1 does not evict once more to be in quota in p."""
    world = World().pool("p", gpus=4).pool("q", gpus=4).team("b")
    world.team("top", 4).team("a", 2, parent="top", pools=("p",))
    world.profile("two", 2, pools=("q", "p"))
    world.jobs("b1 b2 b3 b4", "b", "two").reconcile()
    world.engine = ENGINES[engine]
    world.jobs("a1 a2", "a", "two", preemptible=False)
    plan = check(world, ENGINES[engine], Random(7))
    nominated = {waiting.id: waiting.nomination[0].node for waiting in plan.pending if waiting.nomination}
    assert nominated == {"a1": "q-1", "a2": "p-1"}
    assert len(plan.evict) == 2
    world.release().reconcile()
    assert world.named(team="a") == ["a1", "a2"]


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_no_eviction_leads_to_another_that_could_be_avoided(engine: str) -> None:
    for seed in range(40):
        come_to_rest(contended_world(Random(seed)), ENGINES[engine])


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [164, 268, 324, 494])
def test_unavoidable_cascades_are_distinguished_from_the_others(seed: int, engine: str) -> None:
    assert come_to_rest(contended_world(Random(seed)), ENGINES[engine])


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("seed", [4000324, 4000838, 4008931])
def test_both_engines_decide_the_same_in_contended_worlds_that_once_differed(seed: int) -> None:
    compare(contended_world(Random(seed)))


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("file", sorted(WORLDS.glob("*.yaml")), ids=lambda file: file.stem)
def test_both_engines_decide_the_same_in_worlds_that_once_differed(file: Path) -> None:
    snapshot = read_snapshot(file.read_text(encoding="utf-8"))
    differing = differences(schedule(snapshot), reference.schedule(snapshot))
    assert not differing, f"fast and reference differ: {differing}"


@pytest.mark.covers(*ROWS)
def test_both_engines_decide_the_same_with_lost_nodes() -> None:
    for seed in (*range(60), 1416):
        compare(with_lost_nodes(contended_world(Random(seed)), Random(seed + 9)))


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("file", sorted(WORLDS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_plan_of_a_world_that_once_broke_an_invariant_keeps_them(file: Path, engine: str) -> None:
    snapshot = read_snapshot(file.read_text(encoding="utf-8"))
    plan = check(world_of(snapshot), ENGINES[engine], Random(7))
    assert not differences(plan, schedule(snapshot)), "both engines make the same plan"


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("file", sorted(WORLDS.glob("two-pools-*.yaml")), ids=lambda file: file.stem)
def test_every_world_of_two_pools_that_once_broke_an_invariant_comes_to_rest(file: Path, engine: str) -> None:
    come_to_rest(world_of(read_snapshot(file.read_text(encoding="utf-8"))), ENGINES[engine])


def world_of(snapshot: Snapshot) -> World:
    """Return a world whose snapshot this is."""
    world = World()
    world.now, world.settings, world.paused = snapshot.now, snapshot.settings, snapshot.paused
    world.pools, world.nodes = {p.name: p for p in snapshot.pools}, {n.name: n for n in snapshot.nodes}
    world.profiles, world.policies = {p.name: p for p in snapshot.profiles}, {p.name: p for p in snapshot.policies}
    world.workloads = {w.id: w for w in snapshot.workloads}
    return world


def changed_worlds(seed: int) -> Iterator[World]:
    """Iterate over a contended world with lost nodes, static quotas, both in a department, two pools, and holds."""
    random = Random(seed + 9)
    yield with_lost_nodes(contended_world(Random(seed)), random)
    yield keep_more_back(contended_world(Random(seed)), random)
    nested = with_a_department(contended_world(Random(seed)), random)
    yield keep_more_back(with_lost_nodes(nested, random), random)
    yield in_two_pools(contended_world(Random(seed)), random)
    yield with_holds(in_two_pools(contended_world(Random(seed)), Random(seed)), random)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("part", range(4))
def test_both_engines_decide_the_same_in_changed_worlds(part: int) -> None:
    for seed in range(20 * part, 20 * part + 20):
        for world in changed_worlds(seed):
            compare(world)


def jobs_in_each_others_pool() -> World:
    """Return a world whose jobs late3 and new1 have a reservation in one pool only, where the other one comes first.

    A limit of their department admits one of them.
    """
    return with_holds(in_two_pools(contended_world(Random(1537)), Random(1537)), Random(1546))


@pytest.mark.timeout(60)
def test_no_two_starts_of_a_plan_replace_each_other_for_ever() -> None:
    for engine in ENGINES.values():
        plan = check(jobs_in_each_others_pool(), engine, Random(7))
        assert {start.id for start in plan.start} & {"late3", "new1"}
    compare(jobs_in_each_others_pool())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_that_replaced_too_many_starts_evicts_no_more(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = jobs_in_each_others_pool()
    assert ENGINES[engine](world.snapshot()).evict
    for module in (admission, reference_cycle):
        monkeypatch.setattr(module, "MAX_WITHDRAWN", 0)
    plan = ENGINES[engine](world.snapshot())
    assert plan.start
    assert not plan.evict


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_plan_of_a_world_of_two_pools_keeps_the_invariants(engine: str) -> None:
    victims = 0
    for seed in (*range(40), 1002067):
        plan = check(in_two_pools(contended_world(Random(seed)), Random(seed)), ENGINES[engine], Random(7))
        victims += bool(plan.evict or plan.move)
    assert victims > 10


@pytest.mark.slow
@pytest.mark.covers(*ROWS)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_both_engines_decide_the_same_at_length(part: int) -> None:
    many = max(1, HISTORIES // PARTS)
    for seed in range(10**6 + part * many, 10**6 + (part + 1) * many):
        live_through("mixed" if seed % 3 else "plain", seed, 60)
        keep_the_invariants("mixed", seed, 20, "fast" if seed % 2 else "reference")
        for item in range(4 * seed, 4 * seed + 4):
            compare(contended_world(Random(item)))
            check(contended_world(Random(item)), ENGINES["fast" if item % 2 else "reference"], Random(7))
            come_to_rest(contended_world(Random(item)), ENGINES["reference" if item % 2 else "fast"])
        for world in changed_worlds(seed):
            compare(world)
        check(
            in_two_pools(contended_world(Random(seed)), Random(seed)),
            ENGINES["fast" if seed % 2 else "reference"],
            Random(7),
        )
