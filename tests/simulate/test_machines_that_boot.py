"""A gang's places on machines that are ready are kept while its last machine boots, second by second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from makeway_quota.autoscale.deployment import Deployment, MachineType
from makeway_quota.engine import GPU, Plan, Pool, Profile, QuotaLine, Snapshot, TeamQuota, reference, schedule
from makeway_quota.simulate import planner
from makeway_quota.simulate.cluster import SimulatedCluster
from makeway_quota.simulate.planner import FullPlanner
from makeway_quota.simulate.replay import Outcome, replay
from makeway_quota.simulate.trace import Arrival

BOOT, GRACE, SLACK = 100.0, 5.0, 4.0
ENGINES: dict[str, Callable[[Snapshot], Plan]] = {"fast": schedule, "reference": reference.schedule}
TYPE = MachineType("g2", "cloud", "big", gpus=2, max_machines=2, idle_timeout=300, spin_up_timeout=300)


def cluster(kind: MachineType = TYPE, reserved: int = 6) -> SimulatedCluster:
    """Return a deployment of machines of 2 GPUs, of which team own has all reserved."""
    common = {"pools": ("cloud",), "policies": (("own", "rnd"),), "grace": GRACE}
    return SimulatedCluster(
        "boots",
        (Pool("cloud", kind="autoscaled", strategy="fill"),),
        (),
        (Profile("one", GPU, **common), Profile("two", 2 * GPU, **common), Profile("gang", 2 * GPU, 2, **common)),
        (TeamQuota("own", (QuotaLine((), reserved * GPU),)), TeamQuota("rnd", (QuotaLine((), 0),))),
        deployments=(Deployment("cloud", "memory", (kind,)),),
    )


@pytest.fixture(params=ENGINES)
def play(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.setattr(planner, "schedule", ENGINES[request.param])

    def played(world: SimulatedCluster, *arrivals: Arrival) -> Outcome:
        return replay(world, arrivals, FullPlanner(world), boot=BOOT)

    return played


def waited(outcome: Outcome, name: str) -> float:
    (job,) = [job for job in outcome.meter.finished if job.id == name]
    return job.started - job.submit


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=SLACK)


def steady(team: str, profile: str, gpus: int, begin: int, end: int) -> list[Arrival]:
    """Return jobs of a team that come every 5 s and run for 40 s."""
    return [Arrival(f"{team}-{at}", team, gpus * GPU, float(at), 40.0, profile=profile) for at in range(begin, end, 5)]


@pytest.mark.covers("N23")
def test_a_gang_waits_no_longer_than_its_last_machine_boots(play: Callable[..., Outcome]) -> None:
    """Its first machine is ready 60 s before its second one, among steady work over quota and smaller work in quota."""
    first = Arrival("first", "own", 2 * GPU, 0.0, 10.0, profile="two")
    gang = Arrival("gang", "own", 4 * GPU, 60.0, 500.0, profile="gang")
    later, over = steady("own", "one", 1, 61, 400), steady("rnd", "two", 2, 61, 400)
    outcome = play(cluster(), first, gang, *later, *over)
    assert waited(outcome, "first") == about(BOOT)
    assert waited(outcome, "gang") == about(BOOT)
    assert sum(use.machines for use in outcome.machines) == 2, "its need counts once"


@pytest.mark.covers("N23")
def test_nothing_is_held_where_no_machine_comes(play: Callable[..., Outcome]) -> None:
    """No second machine may be launched: the smaller work starts where the gang cannot."""
    kind = replace(TYPE, max_machines=1)
    gang = Arrival("gang", "own", 4 * GPU, 60.0, 500.0, profile="gang")
    first = Arrival("first", "own", 2 * GPU, 0.0, 10.0, profile="two")
    later = Arrival("later", "own", GPU, 61.0, 40.0, profile="one")
    outcome = play(cluster(kind), first, gang, later)
    assert waited(outcome, "later") == about(BOOT + 10.0 - 61.0)
