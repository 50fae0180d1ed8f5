"""After nodes come, go and change, the incremental engine plans as a new engine would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from engine.histories import happen, random_world
from makeway_quota.engine import GPU, IncrementalEngine, Node, Placed, schedule
from worlds import World

MODELS = ("", "a", "b")


class NodeFollower:
    """Applies the nodes and workloads that differ from the last time to an incremental engine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.workloads, self.nodes = dict(world.workloads), dict(world.nodes)
        self.engine = IncrementalEngine(world.snapshot())

    def check(self, random: Random) -> None:
        """Compare the plan with a new engine's; nodes and workloads are applied in either order."""
        world = self.world
        snapshot = world.snapshot()
        nodes = [node for name, node in world.nodes.items() if self.nodes.get(name) != node]
        workloads = [w for name, w in world.workloads.items() if self.workloads.get(name) is not w]
        gone_nodes = [name for name in self.nodes if name not in world.nodes]
        gone = [name for name in self.workloads if name not in world.workloads]
        self.engine.use(replace(snapshot, nodes=(), workloads=()))
        if random.random() < 0.5:
            self.engine.change_nodes(nodes, gone_nodes)
            self.engine.change(workloads, gone)
        else:
            self.engine.change(workloads, gone)
            self.engine.change_nodes(nodes, gone_nodes)
        self.workloads, self.nodes = dict(world.workloads), dict(world.nodes)
        assert self.engine.plan(world.now) == schedule(snapshot)


def inventory(world: World, random: Random) -> None:
    """Change the inventory: a node comes, goes, returns, is cordoned, resized, moved to another pool or shared."""
    what = random.choice(
        ["come", "come", "go", "go", "cordon", "resize", "pool", "foreign", "devices", "first", "limit", "model"]
    )
    pools = list(world.pools)
    if what == "come":
        name = random.choice([f"{pool}-{number}" for pool in pools for number in ("0", "1", "15", "2", "3", "9")])
        world.nodes.setdefault(name, _node(random, name, random.choice(pools)))
        return
    if len(world.nodes) < 2:
        return
    name = random.choice(list(world.nodes))
    node = world.nodes[name]
    if what == "go":
        del world.nodes[name]
    else:
        world.nodes[name] = replace(node, **_changed(random, what, node, pools))  # type: ignore[arg-type]


def _node(random: Random, name: str, pool: str) -> Node:
    cpu = random.choice([0, 0, 8000])
    return Node(name, pool, random.choice([2, 4, 8, 16]), cpu=cpu, model=random.choice(MODELS))


def _changed(random: Random, what: str, node: Node, pools: list[str]) -> dict[str, object]:
    if what == "cordon":
        return {"cordoned": not node.cordoned}
    if what == "resize":
        return {"gpus": random.choice([1, 2, 4, 8, 12]), "devices": (), "foreign_devices": ()}
    if what == "pool":
        return {"pool": random.choice(pools)}
    if what == "foreign":
        return {"foreign_gpus": random.choice([0, 500, 1000]), "foreign_cpu": random.choice([0, 1000])}
    if what == "devices":
        ids = tuple(sorted(random.sample(range(12), node.gpus))) if node.gpus <= 12 else ()
        return {"devices": ids, "foreign_devices": ids[: random.randint(0, 1)]}
    if what == "first":
        return {"devices": (), "foreign_devices": (), "first_device": random.choice([0, 1, 4096])}
    if what == "limit":
        return {"cpu": random.choice([0, 4000, 16000]), "memory": random.choice([0, 64]), "pods": random.choice([0, 3])}
    return {"model": random.choice(MODELS)}


@pytest.mark.covers("F13", "F14")
@pytest.mark.parametrize("held", range(4))
@pytest.mark.parametrize(("before", "after"), [(4096, 8192), (0, 4096), (4096, 0), (1, 2), (2, 1)])
def test_work_on_a_node_whose_devices_begin_at_another_index_counts_as_for_a_new_engine(
    before: int, after: int, held: int
) -> None:
    world = World().pool("p", gpus=4).team("a", 4).profile("one", 1).profile("two", 2)
    world.nodes["p-1"] = replace(world.nodes["p-1"], first_device=before, foreign_gpus=GPU)
    for name, first in (("v", after), ("w", before)):  # one of them from before an earlier change of the same kind
        world.run(name, "a", "one", "p-1").change(name, placement=(Placed(0, "p-1", (first + held,)),))
    world.jobs("x", "a", "two").jobs("y", "a", "one")
    follower = NodeFollower(world)
    follower.check(Random(held))
    world.nodes["p-1"] = replace(world.nodes["p-1"], first_device=after)
    follower.check(Random(held))


@pytest.mark.covers("F13", "F14")
@pytest.mark.parametrize("start", range(40))
def test_the_standing_engine_plans_as_a_fresh_one_while_nodes_come_and_go(start: int) -> None:
    random = Random(start)
    world = random_world(random)
    _with_cpu_and_models(world, random)
    follower = NodeFollower(world)
    for _ in range(40):
        if random.random() < 0.6:
            inventory(world, random)
        for _ in range(random.randint(0, 2)):
            _happen(world, random)
        follower.check(random)
        world.step()
        follower.check(random)
        world.now += random.choice([1, 5, 600])


def _happen(world: World, random: Random) -> None:
    if world.nodes:
        happen(world, random)
    running = world.named("running")
    if running and random.random() < 0.1:  # a backend that does not name devices
        name = random.choice(running)
        world.change(name, placement=tuple(Placed(p.worker, p.node) for p in world.workloads[name].placement))


def _with_cpu_and_models(world: World, random: Random) -> None:
    for name, profile in list(world.profiles.items()):
        models = random.choice([(), (), ("a", ""), ("",)])
        world.profiles[name] = replace(profile, cpu=random.choice([0, 0, 1000]), models=models)
    for name, node in list(world.nodes.items()):
        world.nodes[name] = replace(node, model=random.choice(MODELS), cpu=random.choice([0, 0, 8000]))


def _lent_out() -> tuple[World, IncrementalEngine]:
    world = World().pool("p", nodes=3, gpus=2).team("a", reserved=6).profile("one", 1)
    world.jobs("j k l m n o", "a", "one")
    world.step()
    return world, IncrementalEngine(world.snapshot())


@pytest.mark.covers("F13")
def test_a_change_of_one_node_rebuilds_nothing() -> None:
    world, engine = _lent_out()
    engine.plan(world.now)
    cluster, others = engine.cluster, {n: s for n, s in engine.cluster.nodes.items() if n != "p-2"}
    for node in _lives_of_a_node(world.nodes["p-2"]):
        engine.change_nodes([node] if node else [], () if node else ["p-2"])
        engine.plan(world.now)
        assert engine.cluster is cluster
        assert {n: s for n, s in engine.cluster.nodes.items() if n != "p-2"} == others
    assert engine.plan(world.now) == schedule(world.snapshot())


def _lives_of_a_node(node: Node) -> Iterator[Node | None]:
    yield replace(node, cordoned=True)
    yield replace(node, ready=False)
    yield replace(node, foreign_gpus=500)
    yield None
    yield replace(node, gpus=8)
    yield node


@pytest.mark.covers("F13")
def test_workloads_of_a_node_that_left_are_found_again_when_it_returns() -> None:
    world, engine = _lent_out()
    engine.plan(world.now)
    before = {name: [p.node.node.name for p in item.parts] for name, item in engine.cluster.allocations.items()}
    engine.change_nodes((), ["p-1"])
    assert sum(not item.parts for item in engine.cluster.allocations.values()) == 2
    engine.change_nodes([world.nodes["p-1"]])
    assert {n: [p.node.node.name for p in item.parts] for n, item in engine.cluster.allocations.items()} == before
    assert not engine.cluster.absent


@pytest.mark.covers("F13")
def test_a_node_of_a_pool_that_the_snapshot_does_not_name_rebuilds_the_cluster() -> None:
    world, engine = _lent_out()
    cluster = engine.cluster
    extra = Node("x-1", "elsewhere", 4)
    engine.change_nodes([extra])
    assert engine.cluster is not cluster
    world.nodes["x-1"] = extra
    assert engine.plan(world.now) == schedule(world.snapshot())
    engine.change_nodes((), ["x-1"])
    del world.nodes["x-1"]
    assert engine.plan(world.now) == schedule(world.snapshot())


@pytest.mark.covers("F13")
@pytest.mark.parametrize("strategy", ["pack", "spread", "fill"])
def test_a_workload_is_not_placed_on_a_node_that_it_avoids(strategy: str) -> None:
    world = World().pool("p", nodes=3, gpus=2, strategy=strategy).team("a", reserved=6).profile("one", 1)
    world.profile("gang", 1, workers=3)
    world.jobs("j k", "a", "one").submit("g", "a", "gang")
    for name in "jkg":
        world.change(name, avoid=("p-1", "p-2"))
    starts = {start.id: {placed.node for placed in start.placement} for start in world.plan().start}
    assert starts == {"j": {"p-3"}, "k": {"p-3"}}, "the gang does not fit on the one node that is left"
    world.end("j", "k", state="cancelled").change("g", avoid=("p-1",))
    assert IncrementalEngine(world.snapshot()).plan(world.now) == world.plan()
    nodes = {start.id: {placed.node for placed in start.placement} for start in world.plan().start}
    assert nodes == {"g": {"p-2", "p-3"}}
