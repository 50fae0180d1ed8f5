"""Work is counted by its request, in the pools where its nodes are now, whatever the nodes show (engine rule 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from engine.engines import ENGINES, differences
from engine.mixed_worlds import (
    contended_world,
    in_two_pools,
    with_a_clock_set_back,
    with_a_department,
    with_another_policy,
    with_lost_nodes,
    with_relabelled_nodes,
    with_vanished_devices,
)
from makeway_quota.engine import GPU, IncrementalEngine, Placed, Plan, Snapshot, Workload
from makeway_quota.engine.rules.usage import usage_by_team
from makeway_quota.engine.snapshot import ADMITTED
from worlds import World

ROWS = ("F13", "F14", "F15", "F16", "F17")
Change = Callable[[World, Random], World]
CHANGES: dict[str, tuple[Change, ...]] = {
    "relabelled": (with_relabelled_nodes,),
    "relabelled in two pools": (in_two_pools, with_relabelled_nodes),
    "relabelled and lost": (with_relabelled_nodes, with_lost_nodes),
    "vanished": (with_vanished_devices,),
    "vanished in a department": (with_a_department, with_vanished_devices),
    "vanished and relabelled": (in_two_pools, with_vanished_devices, with_relabelled_nodes),
    "another policy": (in_two_pools, with_a_department, with_another_policy, with_a_clock_set_back),
    "all": (in_two_pools, with_relabelled_nodes, with_another_policy, with_vanished_devices, with_a_clock_set_back),
}


def changed_world(kind: str, seed: int) -> World:
    """Return a world under whose running work something changed."""
    world, random = contended_world(Random(seed)), Random(seed + 11)
    for change in CHANGES[kind]:
        world = change(world, random)
    return world


def counted(snapshot: Snapshot, w: Workload) -> dict[str | None, int]:
    """Return pool to the milli-GPUs that a workload counts there, by its placement alone; None: its nodes are gone."""
    nodes = {node.name: node for node in snapshot.nodes}
    profile = next(p for p in snapshot.profiles if p.name == w.profile)
    there = [nodes[placed.node].pool for placed in w.placement if placed.node in nodes]
    served = profile.pools or tuple(sorted({p.name for p in snapshot.pools} | {n.pool for n in snapshot.nodes}))
    home = next(iter([*there, *served]), None)
    result: dict[str | None, int] = {}
    for placed in w.placement:
        pool = nodes[placed.node].pool if placed.node in nodes else home
        result[pool] = result.get(pool, 0) + profile.gpus
    return result


def usage_is_what_was_requested(snapshot: Snapshot, plan: Plan) -> None:
    """Check the usage of every line by sums over the workloads that hold GPUs and those that start."""
    parents = {team.name: team.parent for team in snapshot.policies}
    started = {start.id: start.placement for start in plan.start}
    for line in plan.usage:
        expected = 0
        for w in snapshot.workloads:
            levels, at = [], w.team
            while at is not None:
                levels.append(at)
                at = parents.get(at)
            placed = w if w.state in ADMITTED else replace(w, placement=started.get(w.id, ()))
            if line.team in levels:
                pools = counted(snapshot, placed)
                expected += sum(n for pool, n in pools.items() if not line.pools or pool in line.pools)
        assert line.usage == expected, line


def nothing_starts_on_devices_that_are_not_there(snapshot: Snapshot, plan: Plan) -> None:
    """Check every node that counts its devices: what is held and what starts there is no more than it shows."""
    profiles = {profile.name: profile for profile in snapshot.profiles}
    requests = {w.id: profiles[w.profile].gpus for w in snapshot.workloads}
    held = [(w.id, w.placement) for w in snapshot.workloads if w.state in ADMITTED]
    starts = [(start.id, start.placement) for start in plan.start]
    for node in snapshot.nodes:
        more = sum(requests[id] for id, placement in starts for placed in placement if placed.node == node.name)
        before = sum(requests[id] for id, placement in held for placed in placement if placed.node == node.name)
        if more and not node.devices:
            assert before + more <= node.gpus * GPU, node


def evictions_lead_to_starts(world: World, engine: str) -> None:
    """Check that once all victims of a plan are gone, and nothing else changed, what they were evicted for starts."""
    world.engine = ENGINES[engine]
    plan = world.step()
    wanted = {change.preemptor for change in (*plan.evict, *plan.move)}
    world.now -= 1
    world.release()
    done = {start.id for start in (*plan.start, *world.step().start)}
    assert wanted <= done, plan


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("kind", CHANGES)
def test_both_engines_count_and_decide_the_same_where_nodes_changed_under_running_work(kind: str) -> None:
    for seed in range(40):
        snapshot = changed_world(kind, seed).snapshot()
        plan = ENGINES["fast"](snapshot)
        differing = differences(plan, ENGINES["reference"](snapshot))
        assert not differing, f"fast and reference differ with {seed}: {differing}"
        usage_is_what_was_requested(snapshot, plan)
        nothing_starts_on_devices_that_are_not_there(snapshot, plan)
        assert IncrementalEngine(snapshot).plan(snapshot.now) == plan


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["relabelled", "relabelled in two pools", "vanished", "vanished and relabelled"])
def test_no_eviction_is_in_vain_where_nodes_changed_under_running_work(kind: str, engine: str) -> None:
    for seed in range(40):
        evictions_lead_to_starts(changed_world(kind, seed), engine)


def a_gang_over_two_pools() -> World:
    """Return a world where a gang of two runs on nodes of the pool m, of which one moved to the pool h."""
    world = World().pool("h").pool("m", nodes=2, gpus=1).team("a", 2).team("b", 2)
    world.nodes["h-1"] = replace(world.nodes["h-1"], gpus=1)
    world.profile("gang", 1, workers=2, pools=("m",)).profile("one", 1, pools=("m",)).profile("any", 1)
    world.run("g", "a", "gang", "m-1", "m-2")
    world.nodes["m-2"] = replace(world.nodes["m-2"], pool="h")
    return world


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gang_counts_in_each_pool_where_its_nodes_are(engine: str) -> None:
    world = a_gang_over_two_pools()
    world.team("a", reserved=1, limit=2, pools=("m",))
    world.engine = ENGINES[engine]
    (line, _) = world.plan().usage
    assert line.usage == GPU, "one worker runs in m"
    used = {team.team: team for team in usage_by_team(world.snapshot())}
    assert used["a"].guaranteed + used["a"].in_quota + used["a"].borrowed == 2 * GPU
    world.pools["h"] = replace(world.pools["h"], capacity=1000)
    world.submit("x", "b", "any")
    assert not world.plan().start, "the pool h is full, and so is m"


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pool", ["m", "h"])
def test_a_gang_over_two_pools_is_evicted_as_a_whole_from_either(engine: str, pool: str) -> None:
    world = a_gang_over_two_pools().team("a", 0)
    world.nodes["h-1"] = replace(world.nodes["h-1"], ready=False)
    world.profile("here", 1, pools=(pool,))
    world.submit("x", "b", "here")
    world.engine = ENGINES[engine]
    plan = world.step()
    assert [(eviction.id, eviction.preemptor) for eviction in plan.evict] == [("g", "x")]
    world.release()
    assert [start.placement[0].node for start in world.step().start] == [{"m": "m-1", "h": "m-2"}[pool]]


@pytest.mark.covers("F15", "F17")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_is_not_moved_within_a_pool_that_its_profile_does_not_name(engine: str) -> None:
    """Two jobs of one GPU are scattered over two nodes that moved from m to h; h's job of two GPUs needs one node."""
    world = World().pool("m").pool("h", nodes=2, gpus=2).team("a", 0).team("b", 4)
    world.profile("small", 1, pools=("m",)).profile("two", 2, pools=("h",))
    world.run("s1", "a", "small", "h-1").run("s2", "a", "small", "h-2").submit("x", "b", "two")
    world.engine = ENGINES[engine]
    plan = world.plan()
    assert not plan.evict
    assert [(item.id, item.to[0].node) for item in plan.move] == [("s2", "m-1")], "it gets room in its own pool"


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_idle_gpus_that_break_are_not_offered_and_the_borrower_is_asked(engine: str) -> None:
    """The jobs of rnd hold two of four GPUs; the idle two vanish, by whatever number the node names them."""
    world = World().pool("p", gpus=4).team("rnd").team("devops", 2).profile("one", 1).jobs("r1 r2", "rnd", "one")
    world.step()
    for name, device in (("r1", 2), ("r2", 3)):
        world.change(name, placement=(Placed(0, "p-1", (device,)),))
    world.nodes["p-1"] = replace(world.nodes["p-1"], gpus=2)
    world.submit("d", "devops", "one")
    world.engine = ENGINES[engine]
    plan = world.step()
    assert {line.team: line.usage for line in plan.usage} == {"devops": 0, "rnd": 2 * GPU}
    assert not plan.start
    assert [eviction.id for eviction in plan.evict] == ["r2"]
    world.release()
    assert [start.id for start in world.step().start] == ["d"]


@pytest.mark.covers("F09", "F14", "F36")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_device_plugin_that_restarts_gives_no_team_more_than_its_limit(engine: str) -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", 0, limit=4).team("b", 4).profile("one", 1)
    world.jobs("a1 a2 a3 a4", "a", "one").step()
    (node,) = {placed.node for name in world.named() for placed in world.workloads[name].placement}
    world.nodes[node] = replace(world.nodes[node], gpus=0)
    world.engine = ENGINES[engine]
    world.jobs("a5 a6", "a", "one").session("s", "b", "one")
    plan = world.step()
    assert [start.id for start in plan.start] == ["s"], "the team uses its limit of 4 already"
    assert {w.id: w.code for w in plan.pending} == {"a5": "limit", "a6": "limit"}
    world.nodes[node] = replace(world.nodes[node], gpus=4)
    assert not world.step().start
    assert (world.used("a"), world.used("b")) == (4, 1)


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("shown", "victims"), [(3, 2), (2, 3), (1, 4), (0, 0)])
def test_a_node_that_shows_fewer_gpus_than_are_held_frees_one_only_after_the_rest(
    engine: str, shown: int, victims: int
) -> None:
    world = World().pool("p", gpus=4).team("a").team("b", 4).profile("one", 1).jobs("a1 a2 a3 a4", "a", "one")
    world.step()
    world.nodes["p-1"] = replace(world.nodes["p-1"], gpus=shown)
    world.engine = ENGINES[engine]
    world.submit("b1", "b", "one")
    plan = world.step()
    assert len(plan.evict) == victims
    assert not plan.start
    assert not world.step().acts
    world.release()
    assert [start.id for start in world.step().start] == (["b1"] if victims else [])


@pytest.mark.covers("F14")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_named_device_that_vanishes_takes_no_other_device_along(engine: str) -> None:
    """The backend names its devices: the job on device 3 counts, and the three others are free as they were."""
    world = World().pool("p", gpus=4).team("a", 0, limit=4).profile("one", 1).run("j", "a", "one", "p-1")
    world.change("j", placement=(Placed(0, "p-1", (3,)),))
    world.nodes["p-1"] = replace(world.nodes["p-1"], gpus=3, devices=(0, 1, 2))
    world.engine = ENGINES[engine]
    world.jobs("k l m n", "a", "one")
    plan = world.plan()
    assert {start.id: start.placement[0].devices for start in plan.start} == {"k": (0,), "l": (1,), "m": (2,)}
    assert [(w.id, w.code) for w in plan.pending] == [("n", "limit")]


@pytest.mark.covers("F15", "F16")
@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_of_one_size_are_not_taken_for_equal_where_a_device_of_one_is_gone(engine: str) -> None:
    """The younger job holds one device that the node shows, the older one two: only its end makes room for two."""
    world = World().pool("p", gpus=4).team("a").team("b", 2).profile("two", 2)
    world.run("older", "a", "two", "p-1").run("younger", "a", "two", "p-1")
    world.change("younger", placement=(Placed(0, "p-1", (0, 1)),))
    world.change("older", placement=(Placed(0, "p-1", (2, 3)),))
    world.nodes["p-1"] = replace(world.nodes["p-1"], gpus=3, devices=(0, 2, 3))
    world.engine = ENGINES[engine]
    world.submit("owner", "b", "two")
    assert [eviction.id for eviction in world.step().evict] == ["older"]
    world.release()
    assert "owner" in [start.id for start in world.step().start]
