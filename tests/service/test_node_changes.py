"""Changes of nodes and rows, one by one, give the engine the same input as a full read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from makeway_quota import policy
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase, WorkloadPod
from makeway_quota.backends.versions import MAX_REMOVALS, ChangeTracker, ObservationTracker
from makeway_quota.control.world import engine_view
from makeway_quota.control.world.engine_view import EngineChanges
from makeway_quota.control.world.observation import Observed
from makeway_quota.control.world.pool_assignment import divide
from makeway_quota.control.world.world import World
from makeway_quota.store.records import NewWorkload, PastRun, Workload
from makeway_quota.store.rows import changed, initial_record
from makeway_quota.values import Place
from memory_rows import Rows

DOCUMENTS = [
    policy.read_policy(
        f"""
version: 1
settings: {{history_half_life: 3600}}
pools:
  - {{name: h100, nodes: {{local: {{gpus: {gpus}}}}}}}
  - {{name: metal, nodes: {{local: {{gpus: all}}}}}}
  - {{name: cloud, nodes: {{labels: {{kind: cloud}}}}}}
profiles:
  - {{name: gpu2, gpus: 2, pools: [metal, h100, cloud], policies: [[dev, research]]}}
  - {{name: gpu1, gpus: 1, pools: [cloud, metal], policies: [[dev, research]]}}
  - {{name: none, gpus: 0, pools: [h100, metal], policies: [[dev, research]]}}
policies:
  - {{name: dev, groups: [rnd], quotas: [{{reserved: 2}}]}}
  - {{name: research, groups: [devops], quotas: [{{reserved: 2}}]}}
"""
    )
    for gpus in ("[0, 1]", "[2, 3]", "[8]")
]


NAMES = ("n1", "n2")
PAST = [PastRun("dev", "ana", "gpu2", 100.0)] * 3


def node(random: Random, name: str) -> NodeStatus:
    """Return a node of this host, of a cluster that knows its pools, or with labels."""
    devices = tuple(range(random.choice([2, 4])))
    facts = {"ready": random.random() < 0.9, "cordoned": random.random() < 0.1, "model": random.choice(["", "x"])}
    foreign = {0: random.choice([250, 1000])} if random.random() < 0.2 else {}
    labels = {"kind": "cloud"} if random.random() < 0.3 else {}
    pool = random.choice(["", "", "cloud"])
    return NodeStatus(name, pool, devices, cpu=8000, foreign=foreign, labels=labels, **facts)  # type: ignore[arg-type]


def next_row(random: Random, rows: Rows, number: int, now: float) -> None:
    """Submit, start, move or end a workload."""
    if random.random() < 0.5 or not rows.found:
        profile, gpus = random.choice([("gpu2", 2000), ("gpu1", 1000), ("none", 0)])
        team = random.choice(["dev", "research"])
        new = NewWorkload(f"j-{number:08x}", "job", team, profile, random.choice(["ana", "bo"]), gpus=gpus)
        rows.put(initial_record(new, now))
        return
    row = random.choice(list(rows.found.values()))
    if row.state == "pending" or random.random() < 0.3:
        first = random.choice([0, 1, 2])
        devices = tuple(range(first, first + row.gpus // 1000))
        place = Place(random.choice("abc"), devices, (1000,) * len(devices))
        rows.put(changed(row, {"state": "running", "attempt": 1, "placement": (place,), "started_at": now}))
    else:
        rows.put(changed(row, {"state": "succeeded", "placement": (), "ended_at": now, "ran": 50.0}))


@pytest.mark.covers("F02", "F12")
@pytest.mark.parametrize("seed", range(15))
def test_incremental_changes_give_the_engine_the_state_of_a_full_read(seed: int) -> None:
    asyncio.run(_live_through(Random(seed)))


async def _live_through(random: Random) -> None:
    rows, now, version, changes = Rows(PAST), 1e6, 1, ObservationTracker()
    nodes = {name: node(random, name) for name in "ab"}
    world = World(rows, DOCUMENTS[0], version, lambda: now)  # type: ignore[arg-type]
    world.observe(changes.observation(nodes, {}, None))
    shown: dict[str, object] = {}
    shown_nodes: dict[str, object] = {}
    rarely: tuple[dict[str, object], dict[str, object]] = {}, {}
    for step in range(60):
        now += random.choice([0.0, 1.0, 40.0])
        for _ in range(random.randint(0, 3)):
            next_row(random, rows, step * 10 + random.randint(0, 9), now)
        if random.random() < 0.5:
            name = random.choice("abc")
            nodes.pop(name, None) if random.random() < 0.3 else nodes.__setitem__(name, node(random, name))
            world.observe(changes.observation(nodes, {}, world.since if random.random() < 0.9 else None))
        if random.random() < 0.1:
            version += 1
            world.use(random.choice(DOCUMENTS), version)
        result = await world.rows()
        take(world.changes(result, now), shown, shown_nodes)
        fresh = World(rows, world.document, 1, lambda now=now: now)  # type: ignore[arg-type]
        fresh.observe(Observation(tuple(nodes.values())))
        fresh.durations = world.durations
        whole = fresh.snapshot(dict(result), now)
        assert shown == {item.id: item for item in whole.workloads}
        assert shown_nodes == {item.name: item for item in whole.nodes}
        if step % 7 == 0:
            take(world.changes(result, now, reader="rarely"), *rarely)
            assert rarely == (shown, shown_nodes), "each reader is told what changed since it was told last"
        assert world.assignment.parts == divide(nodes.values(), world.document).parts
        assert world.accounting.over() == (await _over(fresh)), "what is over quota follows nodes and rows"


def take(new: EngineChanges, workloads: dict[str, object], nodes: dict[str, object]) -> None:
    """Apply changes to what a reader knows."""
    for item in new.snapshot.workloads if new.whole else new.changed:
        workloads[item.id] = item
    for one in new.snapshot.nodes if new.whole else new.nodes:
        nodes[one.name] = one
    for gone in new.gone:
        workloads.pop(gone, None)
    for gone in new.gone_nodes:
        nodes.pop(gone, None)


def test_a_reader_that_was_away_too_long_is_told_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_view, "MAX_UNREAD", 3)

    async def read() -> None:
        rows = Rows(PAST)
        world = World(rows, DOCUMENTS[0], 1, lambda: 2.0)  # type: ignore[arg-type]
        assert world.changes(await world.rows(), 2.0, reader="away").whole
        for at in range(5):
            rows.put(initial_record(NewWorkload(f"j-{at:08x}", "job", "dev", "gpu1", "ana", gpus=1000), 1.0))
            new = world.changes(await world.rows(), 2.0)
            assert new.whole == (at == 0)
        late = world.changes(await world.rows(), 2.0, reader="away")
        assert late.whole
        assert len(late.snapshot.workloads) == 5
        assert not world.changes(await world.rows(), 2.0, reader="away").whole

    asyncio.run(read())


async def _over(world: World) -> object:
    await world.rows()
    return world.accounting.over()


def test_a_change_of_one_node_converts_no_row_again() -> None:
    async def change() -> None:
        rows, changes = Rows(PAST), ObservationTracker()
        nodes = {f"n{at}": NodeStatus(f"n{at}", "cloud", (0, 1)) for at in range(5)}
        for at in range(5):
            row = initial_record(NewWorkload(f"j-{at:08x}", "job", "dev", "gpu1", "ana", gpus=1000), 1.0)
            rows.put(row._replace(state="running", started_at=1.0, placement=(Place(f"n{at}", (0,), (1000,)),)))
        world = World(rows, DOCUMENTS[0], 1, lambda: 2.0)  # type: ignore[arg-type]
        world.observe(changes.observation(nodes, {}, None))
        assert world.changes(await world.rows(), 2.0).whole
        before = world.assignment
        nodes["n3"] = replace(nodes["n3"], cordoned=True)
        world.observe(changes.observation(nodes, {}, world.since))
        new = world.changes(await world.rows(), 2.0)
        assert ([item.name for item in new.nodes], new.changed, new.gone, new.whole) == (["n3"], [], [], False)
        assert world.assignment is not before
        world.observe(changes.observation(nodes, {}, world.since))
        world.observe(Observation(tuple(nodes.values())))
        assert not world.changes(await world.rows(), 2.0).nodes, "a full list of the same changes nothing"

    asyncio.run(change())


def held(world: World, rows: Mapping[str, Workload], now: float = 2.0) -> list[tuple[tuple[int, ...], float]]:
    """Return what ended attempts hold on node n1, and until when."""
    (node,) = [item for item in world.snapshot(rows, now).nodes if item.name == "n1"]
    assert not node.foreign_gpus
    return [(item.devices, item.deadline) for item in node.terminating]


def test_the_pod_of_an_ended_session_holds_its_gpus_until_it_is_gone() -> None:
    async def change() -> None:
        rows, changes = Rows(PAST), ObservationTracker()
        new = NewWorkload("s-1", "session", "dev", "gpu2", "ana", gpus=2000)
        running = initial_record(new, 1.0)._replace(state="running", placement=(Place("n1", (0, 1), (1000, 1000)),))
        rows.put(running)
        pods = (
            WorkloadPod("s-1", gpus=2000, cpu=500, memory=64),
            WorkloadPod("s-0", gpus=1000, ends_at=30.0, grace=60),
        )
        nodes = {name: NodeStatus(name, "cloud", (0, 1, 2, 3), pods=pods if name == "n1" else ()) for name in NAMES}
        world = World(rows, DOCUMENTS[0], 1, lambda: 2.0)  # type: ignore[arg-type]
        world.observe(changes.observation(nodes, {}, None))
        assert held(world, await world.rows()) == [((2,), 30.0)], "s-0 ended before this service was started"
        assert world.changes(await world.rows(), 2.0).whole
        rows.put(changed(running, {"state": "stopped", "placement": ()}))
        (node,) = world.changes(await world.rows(), 2.0).nodes
        assert [(item.workload, item.devices) for item in node.terminating if item.devices] == [
            ("s-1", (0,)),
            ("s-1", (1,)),
            ("s-0", (2,)),
        ]
        assert [(item.cpu, item.memory) for item in node.terminating if item.cpu] == [(500, 64)]
        nodes["n1"] = replace(nodes["n1"], pods=())
        world.observe(changes.observation(nodes, {}, world.since))
        assert [item.name for item in world.changes(await world.rows(), 2.0).nodes] == ["n1"]
        assert held(world, await world.rows()) == []

    asyncio.run(change())


def test_the_pod_of_an_earlier_attempt_holds_its_gpus_until_it_is_gone() -> None:
    """As on a node that came back, or where a process cannot be killed; a start on its devices counts once."""

    async def change() -> None:
        rows, changes = Rows(PAST), ObservationTracker()
        new = NewWorkload("j-1", "job", "dev", "gpu2", "ana", gpus=2000)
        here = (Place("n1", (0, 1), (1000, 1000)),)
        first = initial_record(new, 1.0)._replace(state="running", attempt=1, placement=here)
        rows.put(first)
        pod = WorkloadPod("j-1", gpus=2000, attempt=1, worker=0)
        nodes = {"n1": NodeStatus("n1", "cloud", (0, 1, 2, 3), pods=(pod,))}
        world = World(rows, DOCUMENTS[0], 1, lambda: 2.0)  # type: ignore[arg-type]
        world.observe(changes.observation(nodes, {}, None))
        assert held(world, await world.rows()) == [], "it is the pod of the attempt that holds them"
        requeued = changed(first, {"state": "pending", "placement": ()})
        rows.put(requeued)
        assert held(world, await world.rows()) == [((0,), 2.0), ((1,), 2.0)]
        elsewhere = (Place("n1", (2, 3), (1000, 1000)),)
        again = changed(requeued, {"state": "starting", "attempt": 2, "placement": elsewhere})
        rows.put(again)
        assert held(world, await world.rows()) == [((0,), 2.0), ((1,), 2.0)]
        rows.put(changed(again, {"placement": here}))
        assert held(world, await world.rows()) == [], "the new pod waits for the old one"
        nodes["n1"] = replace(nodes["n1"], pods=())
        world.observe(changes.observation(nodes, {}, world.since))
        assert held(world, await world.rows()) == []

    asyncio.run(change())


def test_a_service_that_was_restarted_takes_what_is_nominated_for_free_if_anything_is() -> None:
    async def change() -> None:
        rows = Rows(PAST)
        waiting = initial_record(NewWorkload("j-2", "job", "dev", "gpu1", "ana", gpus=1000), 1.0)
        rows.put(waiting._replace(nomination=(Place("n1", (0,), (1000,)),)))
        pod = WorkloadPod("j-1", gpus=1000, attempt=1, worker=0, ends_at=9.0, grace=30)
        world = World(rows, DOCUMENTS[0], 1, lambda: 2.0)  # type: ignore[arg-type]
        world.observe(Observation((NodeStatus("n1", "cloud", (0, 1), pods=(pod,)),)))
        assert held(world, await world.rows()) == [((1,), 9.0)]

    asyncio.run(change())


@pytest.mark.parametrize(
    ("pods", "foreign"),
    [
        ((WorkloadPod("s-1", gpus=1000),), 0),
        ((WorkloadPod("s-1", gpus=8000),), 7000),
        ((WorkloadPod("s-1", gpus=1000), WorkloadPod("s-1", gpus=8000)), 8000),
        (
            (WorkloadPod("j-1", gpus=1000, attempt=1, worker=0), WorkloadPod("j-1", gpus=4000, attempt=1, worker=0)),
            4000,
        ),
        ((WorkloadPod("j-1", gpus=1000, attempt=1, worker=7),), 1000),
    ],
    ids=["its own", "more than planned", "a second pod", "a second pod of a worker", "a worker that is not there"],
)
def test_labels_of_a_workload_hide_no_more_than_it_holds(pods: tuple[WorkloadPod, ...], foreign: int) -> None:
    async def change() -> None:
        rows = Rows(PAST)
        for id, kind in (("s-1", "session"), ("j-1", "job")):
            new = initial_record(NewWorkload(id, kind, "dev", "gpu1", "ana", gpus=1000), 1.0)  # type: ignore[arg-type]
            rows.put(new._replace(state="running", attempt=1, placement=(Place("n1", (int(id == "j-1"),), (1000,)),)))
        world = World(rows, DOCUMENTS[0], 1, lambda: 2.0)  # type: ignore[arg-type]
        world.observe(Observation((NodeStatus("n1", "cloud", tuple(range(16)), pods=pods),)))
        (node,) = world.snapshot(await world.rows(), 2.0).nodes
        assert (node.foreign_gpus, node.terminating) == (foreign, ())

    asyncio.run(change())


def test_versions_tell_what_changed_and_what_is_gone_since() -> None:
    versions: ChangeTracker[str, int] = ChangeTracker()
    assert versions.update({"a": 1, "b": 2}, 1)
    assert not versions.update({"a": 1, "b": 2}, 2)
    assert versions.update({"a": 1, "b": 3, "c": 4}, 2)
    assert versions.since(0) == ([1, 3, 4], [])
    assert versions.since(1) == ([3, 4], [])
    assert versions.update({"c": 4}, 3)
    result = versions.since(2)
    assert result is not None
    assert (result[0], set(result[1])) == ([], {"a", "b"})
    assert versions.update({"c": 4, "a": 1}, 4)
    assert versions.since(3) == ([1], [])


def test_an_observer_that_knows_too_little_gets_a_full_list() -> None:
    changes = ObservationTracker()
    nodes = {str(at): NodeStatus(str(at), "p", ()) for at in range(MAX_REMOVALS + 2)}
    first = changes.observation(nodes, {}, None)
    second = changes.observation({}, {}, first.version)
    assert second.whole, "more is gone than is remembered"
    third = changes.observation({"1": nodes["1"]}, {}, second.version)
    assert (third.whole, third.nodes) == (False, (nodes["1"],))
    assert changes.observation({}, {}, third.version + 5).whole, "a version of another backend"


def test_absence_from_a_list_that_is_not_complete_means_nothing() -> None:
    observed = Observed()
    nodes = (NodeStatus("a", "p", (0,)), NodeStatus("b", "p", (0,)))
    attempt = AttemptStatus("j", 1, Phase.RUNNING)
    observed.merge(Observation(nodes, (attempt,), synced=True))
    assert observed.merge(Observation((), (), synced=False))[:2] == ((), ())
    assert (set(observed.nodes), set(observed.attempts)) == ({"a", "b"}, {("j", 1)})
    assert observed.merge(Observation(nodes[:1], ()))[:2] == ((), ("b",))
    assert (set(observed.attempts), observed.changed) == (set(), {("j", 1)})
