"""Planning goes on without the workloads, nodes, teams, pools and profiles with which the engine fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from makeway_quota.control.world.engine_view import EngineChanges
from makeway_quota.control.world.isolation import (
    Faulty,
    Item,
    Unplannable,
    changes_without,
    followed,
    plan_without_faulty,
    without,
)
from makeway_quota.engine.incremental import IncrementalEngine
from makeway_quota.engine.plan import Plan
from makeway_quota.engine.snapshot import Node, Placed, Pool, Profile, QuotaLine, Snapshot, TeamQuota, Workload

TEAMS = ("dept", "rnd", "devops", "lab")


def world(jobs: int = 4) -> Snapshot:
    """Two pools of two nodes with 4 GPUs each; three teams of a department and one beside it, each with jobs."""
    pools = tuple(Pool(name) for name in ("a", "b"))
    nodes = tuple(Node(f"{pool.name}{at}", pool.name, 4) for pool in pools for at in (1, 2))
    profiles = tuple(Profile(f"gpu{n}", 1000 * n, pools=("a", "b"), policies=(TEAMS[1:],)) for n in (1, 2))
    policies = (
        TeamQuota("dept", (QuotaLine(reserved=8000, limit=12_000),)),
        *(TeamQuota(name, (QuotaLine(reserved=4000),), parent="dept") for name in ("rnd", "devops")),
        TeamQuota("lab", (QuotaLine(reserved=4000),)),
    )
    pending = tuple(
        Workload(f"{team}-{at}", team, f"gpu{1 + at % 2}", owner=team, submitted_at=float(at))
        for team in TEAMS[1:]
        for at in range(jobs)
    )
    running = tuple(
        Workload(f"{team}-runs", team, "gpu1", state="running", started_at=0.0, placement=(Placed(0, node, (0,)),))
        for team, node in (("rnd", "a1"), ("devops", "a2"), ("lab", "b1"))
    )
    return Snapshot(100.0, pools=pools, nodes=nodes, profiles=profiles, policies=policies, workloads=pending + running)


class Faults:
    """An engine that fails with some things, and counts its plans."""

    def __init__(self, *bad: Item, error: type[Exception] = IndexError) -> None:
        self.bad = set(bad)
        self.error = error
        self.plans = 0

    def __call__(self, snapshot: Snapshot) -> tuple[IncrementalEngine, Plan]:
        self.plans += 1
        there = {("workload", item.id) for item in snapshot.workloads}
        there |= {("profile of work", item.profile) for item in snapshot.workloads}
        there |= {("team of work", item.team) for item in snapshot.workloads}
        there |= {("node", item.name) for item in snapshot.nodes} | {("pool", item.name) for item in snapshot.pools}
        there |= {("team", item.name) for item in snapshot.policies}
        there |= {("profile", item.name) for item in snapshot.profiles}
        if self.bad & there or ("anything", "") in self.bad:
            raise self.error("gone")
        engine = IncrementalEngine(snapshot)
        return engine, engine.plan(snapshot.now)


BAD: list[tuple[Item, ...]] = [
    (("workload", "rnd-1"),),
    (("workload", "rnd-runs"),),
    (("workload", "rnd-1"), ("workload", "devops-2"), ("workload", "lab-runs")),
    (("node", "a1"),),
    (("node", "a1"), ("node", "b2"), ("workload", "lab-0")),
    (("team", "rnd"),),
    (("team", "dept"),),
    (("pool", "a"),),
    (("profile", "gpu2"),),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: " ".join(name for _, name in bad))
def test_only_what_is_faulty_is_left_out_and_the_rest_is_planned_as_without_it(bad: tuple[Item, ...]) -> None:
    snapshot = world()
    _, plan, faulty = plan_without_faulty(snapshot, Faults(*bad))
    remaining = set(faulty.reasons)
    children = {("team", "rnd"), ("team", "devops")} if ("team", "dept") in bad else set()
    assert remaining == set(bad) | children
    assert {start.id for start in plan.start}, "others start"
    for start in plan.start:
        assert faulty.of(next(w for w in snapshot.workloads if w.id == start.id)) is None
    held = {(place.node, device) for w in snapshot.workloads for place in w.placement for device in place.devices}
    given = [(place.node, device) for start in plan.start for place in start.placement for device in place.devices]
    assert not held.intersection(given), "what a workload holds that is left out is given to no other"
    assert {eviction.id for eviction in plan.evict}.isdisjoint(name for kind, name in bad if kind == "workload")


@pytest.mark.parametrize(
    ("bad", "left"),
    [
        (("team of work", "lab"), {("team", "lab"), ("queue", "lab/gpu1"), ("queue", "lab/gpu2")}),
        (("profile of work", "gpu2"), {("profile", "gpu2"), *(("queue", f"{team}/gpu2") for team in TEAMS)}),
    ],
)
def test_many_faulty_workloads_of_one_queue_team_or_profile_are_left_out_together(bad: Any, left: set[Item]) -> None:
    snapshot, engine = world(jobs=60), Faults(bad)
    _, plan, faulty = plan_without_faulty(snapshot, engine)
    assert {item for item in faulty.reasons if item[0] != "workload"} <= left
    assert len(faulty.reasons) <= 8
    assert plan.start
    assert engine.plans < 160


def test_what_was_left_out_stays_out_and_is_tried_again_one_by_one_when_it_is_due() -> None:
    snapshot, two = world(), (("workload", "rnd-1"), ("workload", "lab-1"))
    _, _, first = plan_without_faulty(snapshot, Faults(*two))
    engine = Faults(*two)
    _, _, second = plan_without_faulty(snapshot, engine, first.reasons)
    assert (set(second.reasons), engine.plans) == (set(two), 1), "one plan a cycle"
    _, _, third = plan_without_faulty(snapshot, Faults(two[1]), first.reasons, two)
    assert set(third.reasons) == {two[1]}
    _, _, healed = plan_without_faulty(snapshot, Faults(), first.reasons, two)
    assert healed.reasons == {}


def test_without_a_fault_nothing_is_copied_and_one_plan_is_made() -> None:
    snapshot, engine = world(), Faults()
    _, plan, faulty = plan_without_faulty(snapshot, engine)
    assert (engine.plans, faulty.reasons) == (1, {})
    assert without(snapshot, Faulty()) is snapshot
    assert plan.start


def test_a_search_ends_in_time_and_goes_on_in_the_next_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tuple(("workload", f"{team}-0") for team in TEAMS[1:])
    now = [0.0]

    def clock() -> float:
        now[0] += 8.0
        return now[0]

    with pytest.raises(Unplannable) as ended:
        plan_without_faulty(world(), Faults(*bad), clock=clock)
    result = ended.value.faulty.reasons
    assert 0 < len(result) < 3
    _, _, faulty = plan_without_faulty(world(), Faults(*bad), result)
    assert set(faulty.reasons) == set(bad)
    with pytest.raises(Unplannable):
        plan_without_faulty(world(), Faults(("anything", "")))  # type: ignore[arg-type]


def large(nodes: int) -> tuple[Snapshot, Faults]:
    """Many nodes with a job on each that no plan can be made with, in any form, and one that waits for a GPU."""
    there = tuple(Node(f"a{at}", "a", 1) for at in range(nodes))
    jobs = tuple(
        Workload(f"lab-{at}", "lab", "gpu1", state="running", started_at=0.0, placement=(Placed(0, f"a{at}", (0,)),))
        for at in range(nodes)
    )
    waits = Workload("lab-waits", "lab", "gpu1")
    snapshot = replace(world(), nodes=there, workloads=(*jobs, waits))
    return snapshot, Faults(*(("workload", item.id) for item in jobs))


def bare(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, nodes=(), workloads=())


def test_only_the_nodes_of_an_ended_workload_that_was_left_out_are_shown_again() -> None:
    snapshot, faults = large(2)
    engine, plan, faulty = plan_without_faulty(snapshot, faults)
    assert (plan.start, sorted(faulty.taken)) == ((), ["lab-0", "lab-1"])
    noticed = replace(snapshot.workloads[1], last_checkpoint_at=50.0)
    same = followed(EngineChanges(bare(snapshot), False, changed=[noticed]), faulty)
    assert same is not None
    assert (same[0].nodes, same[1].taken) == ((), faulty.taken), "it holds what it held"
    result = followed(EngineChanges(bare(snapshot), False, gone=["lab-1"]), faulty)
    assert result is not None
    changes, now = result
    assert [node.name for node in changes.nodes] == ["a1"]
    assert sorted(now.taken) == ["lab-0"]
    part = changes_without(changes, now)
    engine.change_nodes(part.nodes, part.gone_nodes)
    engine.change(part.changed, part.gone)
    [start] = engine.plan(101.0).start
    assert (start.id, start.placement[0].node) == ("lab-waits", "a1")
    assert sorted(faulty.taken) == ["lab-0", "lab-1"], "other threads read what was left out before"


def test_a_node_that_changes_meanwhile_is_shown_as_it_is_now() -> None:
    snapshot, _ = large(2)
    faulty = Faulty({("workload", item.id): ValueError() for item in snapshot.workloads[:2]})
    faulty.taken = {item.id: item for item in snapshot.workloads[:2]}
    faulty.nodes = {node.name: node for node in snapshot.nodes}
    cordoned = replace(snapshot.nodes[0], cordoned=True)
    result = followed(EngineChanges(bare(snapshot), False, nodes=[cordoned]), faulty)
    assert result is not None
    result = followed(EngineChanges(bare(snapshot), False, gone=["lab-0"]), result[1])
    assert result is not None
    assert result[0].nodes == [cordoned]
    gone = followed(EngineChanges(bare(snapshot), False, gone=["lab-1"], gone_nodes=["a1"]), result[1])
    assert gone is not None
    assert gone[0].nodes == [], "a node that is gone is shown no more"


def test_a_workload_that_was_left_out_and_holds_something_else_is_chosen_for_anew() -> None:
    snapshot, _ = large(2)
    first = snapshot.workloads[0]
    elsewhere = replace(first, placement=(Placed(0, "a1", (0,)),))
    reasons = {("workload", first.id): ValueError()}
    for faulty in (Faulty(reasons, taken={first.id: first}), Faulty(reasons, stand_ins={first.id: first})):
        assert followed(EngineChanges(bare(snapshot), False, changed=[elsewhere]), faulty) is None
    assert followed(EngineChanges(bare(snapshot), False, gone=[first.id]), Faulty(reasons, {first.id: first})) is None
    assert (
        followed(EngineChanges(bare(snapshot), False, gone=["other"]), Faulty(reasons, {first.id: first})) is not None
    )
