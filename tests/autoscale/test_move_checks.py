"""The engine is asked about the moves of all deployments together: their jobs may need the same room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoscale.test_moves import HOUR, POOL, shared
from makeway_quota.backends.base import NodeStatus
from makeway_quota.control.machines.cycle_demand import CycleDemand, JobFacts, cycle_demand
from makeway_quota.control.machines.machine_notices import moving
from makeway_quota.control.machines.move_checks import MoveCheck, drain_candidates, restartable
from makeway_quota.control.world.engine_view import as_workload
from makeway_quota.engine import snapshot as engine
from makeway_quota.engine.restarts import Restarts
from makeway_quota.engine.snapshot import GPU, Node, Pool, Profile, QuotaLine, Snapshot, TeamQuota
from makeway_quota.simulate.planner import placed
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Notice, Place

NAMES = ("a1", "a2", "b1", "b2")
START = shared(None).now


def job(name: str, node: str, devices: tuple[int, ...] = (0, 1), **fields: Any) -> Workload:
    """Return a job that runs on a node; those called j… are preemptible."""
    gpus = len(devices) * GPU
    made = initial_record(NewWorkload(name, "job", "rnd", "two", "ana", gpus=gpus), 0.0)
    place = Place(node, devices, (GPU,) * len(devices))
    values: dict[str, Any] = {"state": "running", "placement": (place,), "gpus": gpus, "grace": 60.0}
    values |= {"started_at": START - 10 * HOUR, "checkpoint_at": START - 10, "preemptible": name.startswith("j")}
    return made._replace(id=name, **values | fields)


JOBS = (job("ja", "a1"), job("xa", "a2"), job("jb", "b1"), job("xb", "b2"))
"""A job of two GPUs on each machine of four; those on the first machine of each deployment can be moved"""


@dataclass
class Two:
    """The machines of the deployments A and B for one pool, of which `lent_not` GPUs stay free for team own."""

    jobs: tuple[Workload, ...] = JOBS
    drains: frozenset[str] = frozenset()
    lent_not: int = 2
    machines: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        base = shared(None).rows[0].with_fields(state="ready", drain=None, reason="ready")
        self.machines = {
            name: replace(base, id=name, deployment=name[0].upper()).with_fields(
                **({"state": "draining", "drain": "move"} if name in self.drains else {})
            )
            for name in NAMES
        }
        self.questions = [
            MoveCheck(
                replace(POOL, name=one),
                [row for row in self.machines.values() if row.deployment == one],
                START - 2 * HOUR,
            )
            for one in ("A", "B")
        ]

    def asked(self) -> CycleDemand:
        """Return what a cycle knows after the engine was asked."""
        nodes = {name: NodeStatus(name, "gpu", (0, 1, 2, 3), cordoned=name in self.drains) for name in NAMES}
        facts = JobFacts(START, lambda row, at: None)
        known = cycle_demand(0.0, [], nodes, self.jobs, {name: name for name in NAMES}, {}, facts)
        snapshot = Snapshot(
            START,
            pools=(Pool("gpu", kind="autoscaled"),),
            nodes=tuple(Node(one.name, one.pool, 4, cordoned=one.cordoned) for one in nodes.values()),
            profiles=(Profile("two", 2 * GPU, pools=("gpu",), policies=(("rnd", "own"),)),),
            policies=(
                TeamQuota("own", (QuotaLine((), self.lent_not * GPU, lend=0),)),
                TeamQuota("rnd", (QuotaLine((), 0),)),
            ),
            workloads=tuple(as_workload(row, placed, None) for row in self.jobs),
        )
        return restartable(known, drain_candidates(known, self.questions, START), lambda: Restarts(snapshot))

    def noticed(self) -> frozenset[str]:
        """Return the machines whose jobs get their notices."""
        known = self.asked()
        demands = {one.deployment.name: known.of(one.machines, moves=True) for one in self.questions}
        rows = list(self.machines.values())
        named = {name: demand for name, demand in demands.items() if demand is not None}
        return moving([one.deployment for one in self.questions], rows, named)


def test_two_deployments_empty_no_machines_into_the_same_room() -> None:
    assert Two().asked().restartable == {"a1"}
    assert Two(lent_not=0).asked().restartable == {"a1", "b1"}, "there is room for both"


def test_of_two_machines_that_drain_for_the_same_room_only_one_moves_its_jobs() -> None:
    both = frozenset({"a1", "b1"})
    assert Two(drains=both).noticed() == {"a1"}
    assert Two(drains=both, lent_not=0).noticed() == both


def test_a_machine_that_drains_already_has_its_room_before_one_that_would() -> None:
    assert Two(drains=frozenset({"b1"})).asked().restartable == {"b1"}


def test_a_job_that_saves_for_a_move_keeps_the_room_that_it_moves_into() -> None:
    told = Notice("", START - 5, START + 55, "give_back")
    saves = (JOBS[0]._replace(state="checkpointing", notice=told), *JOBS[1:])
    drains = frozenset({"a1"})
    assert Two(saves, drains).asked().restartable == frozenset()
    assert Two(saves, drains, lent_not=0).asked().restartable == {"b1"}
    over = (saves[0]._replace(cancel_requested=True), *JOBS[1:])
    assert Two(over, drains).asked().restartable == {"b1"}, "a cancelled job does not come back"


def test_no_job_moves_onto_a_machine_whose_only_work_leaves() -> None:
    """It would end by itself, and stays with the job that comes."""
    told = Notice("", START - 5, START + 1795, "evict")
    leaves = job("xl", "b2", (0,), state="checkpointing", notice=told)
    jobs = (JOBS[0], job("xa", "a2", (0,)), job("xb", "b1", (0, 1, 2, 3)), leaves)
    jobs = (*jobs, leaves._replace(id="xm", placement=(Place("b2", (1,), (GPU,)),)))
    assert Two(jobs, lent_not=0).asked().restartable == frozenset(), "the engine starts it on the fuller one"
    stays = (*jobs[:-1], job("xr", "b2", (1,)))
    assert Two(stays, lent_not=0).asked().restartable == {"a1"}


# ── The engine ──────────────────────────────────────────────────────────────


def runs(name: str, profile: str, node: str) -> engine.Workload:
    where = (engine.Placed(0, node, (0,)),)
    return engine.Workload(name, "rnd", profile, state="running", started_at=START - 9e4, placement=where)


def several(*more: engine.Workload, nodes: tuple[Node, ...] = ()) -> Restarts:
    """Return the questions about two nodes with a job each, and about another pool where a job may have to make way."""
    both = (("rnd", "own"),)
    return Restarts(
        Snapshot(
            START,
            pools=(Pool("gpu"), Pool("other")),
            nodes=(Node("m1", "gpu", 4), Node("m2", "gpu", 4), Node("o1", "other", 1), *nodes),
            profiles=(
                Profile("one", GPU, pools=("gpu",), policies=both),
                Profile("small", GPU, pools=("other",), policies=both),
            ),
            policies=(TeamQuota("own", (QuotaLine(("other",), GPU),)), TeamQuota("rnd", (QuotaLine((), 0),))),
            workloads=(runs("ja", "one", "m1"), runs("jb", "one", "m2"), runs("v", "small", "o1"), *more),
        )
    )


WAITS = engine.Workload("p", "own", "small", submitted_at=START - 60)


def test_an_eviction_that_is_planned_anyway_keeps_no_job_from_moving() -> None:
    assert several().elsewhere({"m1"}, ["ja"]) == {"m2"}
    assert several(WAITS).elsewhere({"m1"}, ["ja"]) == {"m2"}


def test_a_question_leaves_nothing_behind_for_the_next_one() -> None:
    restarts = several(WAITS)
    assert [restarts.elsewhere({"m1"}, ["ja"]) for _ in range(2)] == [{"m2"}] * 2
    assert restarts.elsewhere({"m2"}, ["jb"]) == {"m1"}
    restarts.leave({"m1"}, ["ja"])
    assert restarts.elsewhere({"m2"}, ["jb"]) is None, "no node is left for both"
