"""What still terminates: it is counted once, it is waited for, and it is given up once it is stuck (rule 5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from engine.engines import ENGINES, differences
from engine.histories import happen, random_world
from engine.mixed_worlds import contended_world, in_two_pools, with_holds
from engine.properties import check
from engine.test_incremental import Follower, carry_out
from makeway_quota.engine import Placed, Terminating, reference, schedule
from makeway_quota.engine.snapshot import ADMITTED
from makeway_quota.wording.sentences import sentence
from worlds import World


def borrowed(gpus: int = 2, **settings: float) -> World:
    """Return a node full of one team's jobs, whose GPUs another one has reserved."""
    world = World(**settings).pool("p", gpus=gpus).team("a").team("b", gpus)
    world.profile("one", 1, grace=30)
    for at in range(gpus):
        world.run(f"a{at}", "a", "one", "p-1")
        world.change(f"a{at}", placement=(Placed(0, "p-1", (at,)),))
    return world


def outlived(world: World, *devices: int, deadline: float = 10.0, node: str = "p-1") -> None:
    """Make a pod of an ended attempt hold devices."""
    result = Terminating("old", devices, deadline=world.now + deadline)
    world.nodes[node] = replace(world.nodes[node], terminating=(*world.nodes[node].terminating, result))


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_nomination_stays_on_what_an_ended_attempt_still_holds(engine: str) -> None:
    world = borrowed(3)
    world.submit("b1", "b", "one")
    world.engine = ENGINES[engine]
    world.end("a2", state="cancelled")
    world.change("b1", nomination=(Placed(0, "p-1", (2,)),))
    outlived(world, 2)
    plan = world.plan()
    assert not plan.evict
    assert not plan.start
    (waiting,) = plan.pending
    assert (waiting.code, waiting.nomination[0].devices) == ("reclaiming", (2,))
    world.nodes["p-1"] = replace(world.nodes["p-1"], terminating=())
    assert [start.placement[0].devices for start in world.plan().start] == [(2,)]


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_evicted_while_enough_gpus_are_terminating_of_ended_attempts(engine: str) -> None:
    world = borrowed(3)
    world.engine = ENGINES[engine]
    world.end("a1", "a2", state="cancelled")
    outlived(world, 1, 2)
    world.submit("b1", "b", "one").submit("b2", "b", "one").submit("b3", "b", "one")
    plan = world.plan()
    assert [evict.id for evict in plan.evict] == ["a0"]
    assert not plan.start


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("past", [58.0, 59.0])
def test_what_outlives_its_deadline_by_stuck_after_is_given_up(engine: str, past: float) -> None:
    world = borrowed(2)
    world.engine = ENGINES[engine]
    world.end("a1", state="cancelled")
    outlived(world, 1, deadline=-past)
    world.submit("b1", "b", "one")
    world.change("b1", nomination=(Placed(0, "p-1", (1,)),))
    assert [evict.id for evict in world.plan().evict] == ([] if past < 59 else ["a0"])


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("past", [59.0, 60.0, 200_000.0])
def test_a_victim_that_never_ends_is_replaced_by_another_and_never_chosen_again(engine: str, past: float) -> None:
    world = borrowed(2)
    world.engine = ENGINES[engine]
    world.submit("b1", "b", "one", kind="session")
    world.change("a1", state="checkpointing", evicted_for="b1", deadline=world.now - past)
    world.change("b1", nomination=(Placed(0, "p-1", (1,)),))
    plan = world.plan()
    assert [evict.id for evict in plan.evict] == ([] if past < 60 else ["a0"])
    world.apply(plan)
    assert not world.plan().acts
    if past >= 60:
        world.release("a0")
        assert [start.placement[0].devices for start in world.plan().start] == [(0,)]


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_setting_says_how_long_a_victim_may_take(engine: str) -> None:
    for seconds, victims in ((5.0, ["a0"]), (500.0, [])):
        world = borrowed(2, stuck_after=seconds)
        world.engine = ENGINES[engine]
        world.submit("b1", "b", "one")
        world.change("a1", state="checkpointing", evicted_for="b1", deadline=world.now - 100)
        world.change("b1", nomination=(Placed(0, "p-1", (1,)),))
        assert [evict.id for evict in world.plan().evict] == victims


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("down_for", "victims"),
    [(None, []), (0.0, []), (59.0, []), (60.0, ["a0"])],
    ids=["unknown", "new", "short", "long"],
)
def test_a_node_that_is_not_ready_for_a_moment_keeps_its_nominations(
    engine: str, down_for: float | None, victims: list[str]
) -> None:
    world = World().pool("p", nodes=2, gpus=1).team("a").team("b", 1).profile("one", 1)
    world.run("a0", "a", "one", "p-1").run("a1", "a", "one", "p-2")
    for at in range(2):
        world.change(f"a{at}", placement=(Placed(0, f"p-{at + 1}", (0,)),))
    world.engine = ENGINES[engine]
    world.submit("b1", "b", "one")
    world.change("a1", state="checkpointing", evicted_for="b1", deadline=world.now + 100)
    world.change("b1", nomination=(Placed(0, "p-2", (0,)),))
    since = None if down_for is None else world.now - down_for
    world.nodes["p-2"] = replace(world.nodes["p-2"], ready=False, down_since=since)
    plan = world.plan()
    assert not plan.start
    assert [evict.id for evict in plan.evict] == victims


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_starts_on_a_nomination_whose_node_is_not_ready(engine: str) -> None:
    world = World().pool("p", nodes=2, gpus=1).team("a").team("b", 1).profile("one", 1)
    world.run("a0", "a", "one", "p-1")
    world.change("a0", placement=(Placed(0, "p-1", (0,)),))
    world.engine = ENGINES[engine]
    world.submit("b1", "b", "one")
    world.change("b1", nomination=(Placed(0, "p-2", (0,)),))
    world.nodes["p-2"] = replace(world.nodes["p-2"], ready=False, down_since=world.now - 3)
    plan = world.plan()
    assert not plan.acts
    world.nodes["p-2"] = replace(world.nodes["p-2"], ready=True, down_since=None)
    assert [start.placement[0].node for start in world.plan().start] == ["p-2"]


def with_terminating(world: World, random: Random) -> World:
    """Return a world with victims and pods that terminate, some of them stuck, on nodes some of which are down."""
    for w in list(world.workloads.values()):
        if w.state == "running" and w.preemptible is not False and w.kind == "job" and random.random() < 0.25:
            deadline = world.now + random.choice([-200.0, -30.0, 20.0])
            waiting = world.named("pending")
            world.change(w.id, state="checkpointing", evicted_for=random.choice(waiting), deadline=deadline)
            if random.random() < 0.5:
                minimum = world.profiles[w.profile].min_workers or world.profiles[w.profile].workers
                same = [n for n in waiting if world.workloads[n].profile == w.profile]
                for name in same[:1]:
                    world.change(name, nomination=w.placement[:minimum])
    held = {
        (p.node, d) for w in world.workloads.values() if w.state in ADMITTED for p in w.placement for d in p.devices
    }
    for name, node in world.nodes.items():
        free = [device for device in range(node.gpus) if (name, device) not in held]
        result = []
        while free and random.random() < 0.6:
            devices = tuple(free.pop() for _ in range(min(len(free), random.randint(1, 2))))
            milli = random.choice([1000, 1000, 1000, 500])
            deadline = world.now + random.choice([-200.0, -30.0, 20.0])
            result.append(Terminating("old", devices, milli, cpu=random.choice([0, 1000]), deadline=deadline))
        down = random.random() < 0.15
        since = random.choice([None, world.now - 10, world.now - 100]) if down else None
        world.nodes[name] = replace(node, terminating=tuple(result), ready=not down, down_since=since)
    return world


def worlds(seed: int) -> Iterator[World]:
    random = Random(seed + 5)
    yield with_terminating(contended_world(Random(seed)), random)
    yield with_terminating(in_two_pools(contended_world(Random(seed)), Random(seed)), random)
    yield with_terminating(with_holds(in_two_pools(contended_world(Random(seed)), Random(seed)), random), random)


@pytest.mark.covers("F13", "F14", "F15", "F16", "F17")
@pytest.mark.parametrize("part", range(6))
def test_both_engines_decide_the_same_while_work_terminates_or_is_stuck(part: int) -> None:
    for seed in range(40 * part, 40 * part + 40):
        for world in worlds(seed):
            snapshot = world.snapshot()
            differing = differences(schedule(snapshot), reference.schedule(snapshot))
            assert not differing, f"seed {seed}: fast and reference differ: {differing}"


@pytest.mark.covers("F13", "F14", "F15", "F16", "F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_plan_keeps_the_invariants_while_work_terminates_or_is_stuck(engine: str) -> None:
    for seed in range(60):
        for world in worlds(seed):
            check(world, ENGINES[engine], Random(7))


@pytest.mark.covers("F13", "F14")
@pytest.mark.parametrize("start", range(12))
def test_the_incremental_engine_plans_as_a_new_one_while_pods_outlive_their_attempts(start: int) -> None:
    random = Random(start)
    world = random_world(random)
    follower = Follower(world)
    for _ in range(30):
        happen(world, random)
        name = random.choice(list(world.nodes))
        held = {d for w in world.workloads.values() for p in w.placement if p.node == name for d in p.devices}
        node = world.nodes[name]
        free = [device for device in range(node.gpus) if device not in held]
        ended = tuple(Terminating("old", (d,), deadline=world.now + random.choice([-60, 1, 30])) for d in free[:1])
        down_since = random.choice([None, world.now]) if not node.ready else None
        world.nodes[name] = replace(node, terminating=random.choice([(), ended]), down_since=down_since)
        follower.check()
        carry_out(world, random)
        follower.check()
        world.now += random.choice([1, 5, 31, 61, 600, -20])


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", [*ENGINES, "incremental"])
@pytest.mark.parametrize("blip", [False, True])
@pytest.mark.parametrize("requeued", [False, True])
def test_patience_that_ends_while_gpus_are_on_their_way_evicts_nothing(engine: str, blip: bool, requeued: bool) -> None:
    """The victim terminates, or waits again while its pod still does, as the job's `reclaim_after` ends."""
    world = World().pool("p", nodes=2, gpus=1).team("a").team("b", 1).profile("one", 1, grace=60)
    world.profile("patient", 1, reclaim_after=20)
    for at in range(2):
        world.run(f"a{at}", "a", "one", f"p-{at + 1}")
        world.change(f"a{at}", placement=(Placed(0, f"p-{at + 1}", (0,)),))
    follower = Follower(world) if engine == "incremental" else None
    world.engine = ENGINES.get(engine, schedule)
    world.submit("s", "b", "patient", preemptible=False)
    assert not world.step().evict
    world.now += 18
    world.change("a1", state="checkpointing", evicted_for="s", deadline=world.now + 60)
    world.change("s", nomination=(Placed(0, "p-2", (0,)),))
    for _ in range(4):
        world.now += 2
        if requeued and "a1" in world.named("checkpointing"):
            world.release("a1")
            outlived(world, 0, deadline=30, node="p-2")
        world.nodes["p-2"] = replace(world.nodes["p-2"], ready=not blip)
        if follower is not None:
            follower.check()
        plan = world.step()
        assert not plan.evict
        assert world.workloads["s"].nomination == (Placed(0, "p-2", (0,)),)


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_workload_waits_for_what_is_stuck_where_nothing_else_makes_way(engine: str) -> None:
    world = World().pool("p", gpus=2).team("a", 1).team("b", 1).profile("one", 1)
    world.run("a0", "a", "one", "p-1").run("a1", "a", "one", "p-1", preemptible=False)
    world.change("a0", placement=(Placed(0, "p-1", (0,)),), state="checkpointing", evicted_for="b1", deadline=world.now)
    world.change("a1", placement=(Placed(0, "p-1", (1,)),))
    world.submit("b1", "b", "one")
    world.now += 125
    world.engine = ENGINES[engine]
    assert world.reason("b1")[0] == "stuck"
    world.end("a0", state="cancelled")
    outlived(world, 0, deadline=-7300)
    assert world.reason("b1")[0] == "stuck"


def test_the_reason_names_what_does_not_end_and_where() -> None:
    world = borrowed(2)
    world.submit("b1", "b", "one")
    world.change("a1", state="checkpointing", evicted_for="b1", deadline=world.now - 7200, owner="ana")
    (waiting,) = world.plan().pending
    assert waiting.waits_for == ("a0",)
    text = sentence(waiting.facts)
    assert "1 GPU is being freed for you, ready within 30 s" in text
    assert text.endswith("a's job a1 of ana does not end on p-1, 2 h after its deadline.".capitalize())
    world.change("a0", preemptible=False)
    (waiting,) = world.plan().pending
    text = sentence(waiting.facts)
    assert "1 GPU is held by pods or processes that should have ended" in text
    assert "job a1 of ana does not end on p-1, 2 h after its deadline." in text


@pytest.mark.covers("F20")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("there", "foreign", "code"), [(1, 1000, "no_free_gpus"), (2, 0, "stuck")])
def test_of_a_stuck_gang_over_two_pools_only_the_gpus_of_a_pool_are_waited_for(
    there: int, foreign: int, code: str, engine: str
) -> None:
    """Its node q-1 was in pool p when it started; one of the 3 GPUs of q-1 is free."""
    world = World().pool("p", gpus=4).pool("q", gpus=3).team("a").team("b", 4, pools=("q",))
    world.nodes["q-1"] = replace(world.nodes["q-1"], foreign_gpus=foreign)
    world.profile("gang", 1, workers=4).profile("three", 3, pools=("q",)).run("gang", "a", "gang")
    placement = tuple(Placed(at, "q-1" if at < there else "p-1", (at,)) for at in range(4))
    deadline = world.now - 100
    world.change("gang", state="checkpointing", placement=placement, evicted_for="b1", deadline=deadline)
    world.engine = ENGINES[engine]
    world.submit("b1", "b", "three")
    assert world.reason("b1")[0] == code
