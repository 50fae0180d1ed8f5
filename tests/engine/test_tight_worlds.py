"""Victims are spared wherever the workloads of a plan have room without them, in whatever places (rule 5.4, I4)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from engine.cascades import come_to_rest
from engine.engines import ENGINES, differences
from engine.histories import HISTORIES
from engine.host_worlds import FIRSTS
from engine.properties import check
from engine.tight_worlds import tight_world
from makeway_quota.engine import Placed, Plan, reference, schedule
from makeway_quota.engine.cycle import sparing
from makeway_quota.engine.placement import together
from makeway_quota.engine.request import Need
from worlds import World

ROWS = ("F14", "F15", "F16")
PARTS = 20
"""The slow tier in parts, so that several processors may share it."""
ROUNDS = 6
"""So many plans are compared and checked in each world; then it comes to rest."""
WRONG_ONCE = (1150, 1367, 1511)
"""Worlds with a needless victim, as long as places were looked for one workload after the other."""


def live_through(seed: int, alike: bool = False) -> Plan:
    """Compare the plans of both engines until nothing changes, check the invariants of each, and return the first one.

    `alike`: all that waits requests the same.
    """
    world, engine = tight_world(Random(seed)), ENGINES["fast" if seed % 2 else "reference"]
    if alike:
        make_alike(world)
    plans = []
    for _ in range(ROUNDS):
        snapshot = world.snapshot()
        differing = differences(schedule(snapshot), reference.schedule(snapshot))
        assert not differing, f"fast and reference differ: {differing}"
        plans.append(check(world, engine, Random(7)))
        if not plans[-1].acts and not world.named("checkpointing"):
            break
        world.now += 1
        world.release()
    come_to_rest(world, engine)
    return plans[0]


def make_alike(world: World) -> None:
    """Have all that waits request the same as the first of it."""
    waiting = world.named("pending")
    for name in waiting:
        world.change(name, profile=world.workloads[waiting[0]].profile)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("part", range(3))
def test_no_victim_is_needless_where_places_depend_on_each_other(part: int) -> None:
    for seed in range(10 * part, 10 * part + 10):
        live_through(seed, alike=seed % 3 == 2)


@pytest.mark.covers(*ROWS)
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_victim_is_needless_in_many_more_such_worlds(part: int) -> None:
    for seed in range(30 + part, 30 + HISTORIES * 4, PARTS):
        live_through(seed, alike=seed % 3 == 2)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("seed", WRONG_ONCE)
def test_a_victim_is_spared_where_its_preemptors_fit_in_other_places_only(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = live_through(seed)
    monkeypatch.setattr(together.Search, "places", lambda *_: None)
    before = schedule(tight_world(Random(seed)).snapshot())
    assert len({*left(before)} - {*left(plan)}) == 1, "the world shows nothing any more"


def left(plan: Plan) -> list[str]:
    return [change.id for change in (*plan.evict, *plan.move)]


@pytest.mark.covers(*ROWS)
def test_a_victim_that_cannot_stay_is_known_by_counting_without_placing_a_gang_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One gang over many machines has many victims: none costs as much as the gang (or the time grows as a square)."""
    tries: list[object] = []
    found = sparing._try
    monkeypatch.setattr(sparing, "_try", lambda *of: tries.append(of) or found(*of))
    world = World().pool("whole", nodes=6, gpus=2).pool("slices", nodes=6, gpus=4).team("a").team("b", 8)
    for name, node in list(world.nodes.items()):
        first = FIRSTS["q" if node.pool == "slices" else "p"]
        world.nodes[name] = replace(node, host=f"h{name[-1]}", first_device=first, cpu=4000)
    world.profile("slice", 1, cpu=1000, pools=("slices",))
    world.profile("gang", 1, workers=8, cpu=2000, pools=("whole",))
    for at in range(24):
        world.run(f"w{at:02}", "a", "slice", f"slices-{at // 4 + 1}")
        place = Placed(0, f"slices-{at // 4 + 1}", (FIRSTS["q"] + at % 4,))
        world.change(f"w{at:02}", placement=(place,))
    world.submit("g", "b", "gang")
    plan = check(world, schedule, Random(7))
    assert len(plan.evict) == 16, "two of one core each for every worker"
    assert not tries


def gangs_on_crowded_nodes(gangs: int, workers: int) -> World:
    """Return a world of nodes with a free GPU each, where each gang of two GPUs a worker has a size of its own."""
    world, random = World().pool("p", nodes=120, gpus=8).team("a", 200).team("b"), Random(1)
    for at, (name, node) in enumerate(list(world.nodes.items())):
        world.nodes[name] = replace(node, cpu=64000 + 7 * at)
    for at in range(gangs):
        world.profile(f"gang{at}", 2, cpu=1000 + 10 * at, workers=workers)
    for size in range(5):
        world.profile(f"one{size}", 1, cpu=(1000, 2000, 3000, 500, 4000)[size])
    for at in range(7 * len(world.nodes)):
        name, place = f"w{at:03}", (Placed(0, f"p-{at // 7 + 1}", (at % 7,)),)
        world.submit(name, "b", f"one{random.randrange(5)}")
        world.change(name, state="running", started_at=world.now - random.random() * 1e5, placement=place)
    for at in range(gangs):
        world.submit(f"gang-{at}", "a", f"gang{at}")
    return world


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize(("gangs", "workers"), [(4, 3), (8, 12)])
def test_nodes_are_looked_at_within_one_bound_for_all_victims(
    gangs: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, all combinations were tried anew for each victim: 2 million looks at nodes for 4 gangs of 3 workers."""
    looked = [0]
    found = together.Room.workers

    def look(room: together.Room, need: Need) -> int:
        looked[0] += 1
        return found(room, need)

    monkeypatch.setattr(together.Room, "workers", look)
    plan = schedule(gangs_on_crowded_nodes(gangs, workers).snapshot())
    assert len(left(plan)) >= gangs * workers, "one job has to leave its node for every worker"
    assert 0 < looked[0] < 200_000


@pytest.mark.parametrize(("steps", "in_all"), [(3, 50_000), (10_000, 5), (20, 60)], ids=["one", "all", "both"])
def test_both_engines_stop_looking_for_places_after_as_many_steps(
    steps: int, in_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = [tight_world(Random(seed)).snapshot() for seed in (*range(60), *WRONG_ONCE)]
    whole = [schedule(snapshot) for snapshot in snapshots]
    monkeypatch.setattr(together, "MAX_STEPS", steps)
    monkeypatch.setattr(together, "MAX_STEPS_IN_ALL", in_all)
    plans = [schedule(snapshot) for snapshot in snapshots]
    for plan, snapshot in zip(plans, snapshots, strict=True):
        assert not differences(plan, reference.schedule(snapshot))
    assert any(len(plan.evict) > len(before.evict) for plan, before in zip(plans, whole, strict=True)), "none stopped"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_steps_of_a_plan_are_bounded_over_all_its_rounds(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may look for needless victims many times: once more whenever one is spared or moves."""
    taken = [0]
    step = together.Search._step

    def count(search: together.Search) -> bool:
        before = search.steps
        allowed = step(search)
        taken[0] += before - search.steps
        return allowed

    monkeypatch.setattr(together, "MAX_STEPS_IN_ALL", 20)
    monkeypatch.setattr(together.Search, "_step", count)
    most = 0
    for seed in range(60, 80):
        taken[0] = 0
        ENGINES[engine](tight_world(Random(seed)).snapshot())
        most = max(most, taken[0])
    assert most == 20, "some plan takes all of them, and none takes more"
