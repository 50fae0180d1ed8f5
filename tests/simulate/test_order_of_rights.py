"""What work in quota gets first, where its pools grow: both engines with the sizing of machines, second by second.

Free GPUs, those of terminating victims, a machine that is ready before `reclaim_after` is over, GPUs of evicted work,
any machine on its way, and a machine to launch, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from makeway_quota.autoscale.deployment import Deployment, MachineType
from makeway_quota.engine import GPU, Node, Plan, Pool, Profile, QuotaLine, Snapshot, TeamQuota, reference, schedule
from makeway_quota.simulate import planner
from makeway_quota.simulate.cluster import SimulatedCluster
from makeway_quota.simulate.planner import FullPlanner
from makeway_quota.simulate.replay import Outcome, replay
from makeway_quota.simulate.trace import Arrival

BOOT, GRACE, SLACK = 100.0, 5.0, 3.0
ENGINES = {"fast": schedule, "reference": reference.schedule}
OWN, RND = TeamQuota("own", (QuotaLine((), 4 * GPU),)), TeamQuota("rnd", (QuotaLine((), 0),))
TYPE = MachineType("g2", "cloud", "big", gpus=2, max_machines=4, idle_timeout=30)


def cluster(
    patience: float = 0.0, nodes: int = 1, machine_type: MachineType = TYPE, **profile: int
) -> SimulatedCluster:
    """Return nodes of 2 GPUs and a deployment of machines of 2; team own has all of both reserved."""
    ranks = (("own", "rnd"),)
    lent = Profile("lent", 2 * GPU, pools=("lab",), policies=ranks, grace=GRACE)
    kept = Profile("kept", 2 * GPU, pools=("lab", "cloud"), policies=ranks, grace=GRACE, reclaim_after=patience)
    return SimulatedCluster(
        "rights",
        (Pool("lab"), Pool("cloud", kind="autoscaled", strategy="fill")),
        tuple(Node(f"lab-{at}", "lab", 2) for at in range(nodes)),
        (lent, replace(kept, **profile)),
        (OWN, RND),
        deployments=(Deployment("cloud", "memory", (machine_type,)),),
    )


@pytest.fixture(params=ENGINES)
def play(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    engine: Callable[[Snapshot], Plan] = ENGINES[request.param]
    monkeypatch.setattr(planner, "schedule", engine)

    def played(world: SimulatedCluster, *arrivals: Arrival, boot: float = BOOT) -> Outcome:
        return replay(world, arrivals, FullPlanner(world), boot=boot)

    return played


def lent(name: str = "lent", at: float = 0.0, seconds: float = 5000.0) -> Arrival:
    return Arrival(name, "rnd", 2 * GPU, at, seconds, profile="lent")


def own(name: str = "own", at: float = 1000.0, gpus: int = 2) -> Arrival:
    return Arrival(name, "own", gpus * GPU, at, 500.0, profile="kept")


def waited(outcome: Outcome, name: str = "own") -> float:
    (job,) = [job for job in outcome.meter.finished if job.id == name]
    return job.started - job.submit


def about(seconds: float) -> Any:
    """Return a time, give or take the seconds from a decision to what follows from it."""
    return pytest.approx(seconds, abs=SLACK)


def launched(outcome: Outcome) -> int:
    return sum(use.machines for use in outcome.machines)


@pytest.mark.covers("N23")
def test_free_gpus_come_before_everything(play: Callable[..., Outcome]) -> None:
    outcome = play(cluster(300.0), lent(seconds=900.0), own())
    assert (waited(outcome), outcome.meter.preemptions, launched(outcome)) == (0.0, {}, 0)


@pytest.mark.covers("N23")
def test_a_machine_that_is_ready_within_the_patience_comes_before_an_eviction(play: Callable[..., Outcome]) -> None:
    outcome = play(cluster(120.0), lent(), own())
    assert waited(outcome) == about(BOOT)
    assert outcome.meter.preemptions == {}
    assert launched(outcome) == 1


@pytest.mark.covers("N23")
@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_an_eviction_comes_before_a_machine_that_is_ready_later(play: Callable[..., Outcome], patience: float) -> None:
    outcome = play(cluster(patience), lent(), own())
    assert outcome.meter.preemptions == {("rnd", "own"): 1}
    assert waited(outcome) == about(patience + GRACE)
    assert launched(outcome) == bool(patience), "without patience none is launched"


@pytest.mark.covers("N23")
def test_patience_runs_from_the_submission_though_the_first_boot_fails(play: Callable[..., Outcome]) -> None:
    """The first machine is given up after 60 s, and the next one would be ready after the 120 s of patience."""
    outcome = play(cluster(120.0, machine_type=replace(TYPE, spin_up_timeout=60)), lent(), own())
    assert outcome.meter.preemptions == {("rnd", "own"): 1}
    assert waited(outcome) == about(120.0 + GRACE)


@pytest.mark.covers("N23")
def test_gpus_that_are_released_meanwhile_come_before_the_machine(play: Callable[..., Outcome]) -> None:
    outcome = play(cluster(120.0), lent(seconds=1030.0), own())
    assert (waited(outcome), outcome.meter.preemptions) == (about(30.0), {})


@pytest.mark.covers("N23")
def test_any_machine_comes_where_no_eviction_helps(play: Callable[..., Outcome]) -> None:
    """Without patience, but what runs is within the reservation: nothing may be evicted."""
    world = cluster()
    outcome = play(replace(world, policies=(OWN, replace(RND, quotas=OWN.quotas))), lent(), own())
    assert (waited(outcome), outcome.meter.preemptions, launched(outcome)) == (about(BOOT), {}, 1)


@pytest.mark.covers("N23")
def test_a_gang_evicts_nothing_where_all_of_its_machines_are_ready_in_time(play: Callable[..., Outcome]) -> None:
    """The GPUs of one node are lent: two machines are launched, and no third one."""
    outcome = play(cluster(120.0, workers=2), lent(), own(gpus=4))
    assert (waited(outcome), outcome.meter.preemptions, launched(outcome)) == (about(BOOT), {}, 2)
