"""A clock that is set forward or back changes no decision: what runs and waits is timed as without that."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from makeway_quota.application import Application
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.world.clock_steps import ClockSteps
from makeway_quota.control.world.corrected_times import CorrectedTimes
from makeway_quota.settings import ServiceSettings
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import changed, initial_record
from makeway_quota.values import Notice, Place
from simulated_pods import Habits, SimulatedBackend, SimulatedCluster, Site

HOUR = 3600.0
STEPS = [HOUR, -HOUR, 30 * HOUR, -30 * HOUR, 90.0, -90.0]

POLICY = """
version: 1
settings: {yields_after: 300s}
pools: [{name: p}]
profiles:
  - {name: one, gpus: 1, pools: [p], policies: [[rnd, devops]], grace: 30, min_runtime: 60s}
  - {name: two, gpus: 2, pools: [p], policies: [[rnd, devops]], grace: 30}
  - {name: patient, gpus: 1, pools: [p], policies: [[rnd, devops]], grace: 30, reclaim_after: 45s}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [p], reserved: 0}]}
  - {name: devops, groups: [devops], quotas: [{pools: [p], reserved: 2}]}
"""


class SteppedSite(Site):
    """A service whose clock is set forward and back; that of its cluster goes on."""

    ahead = 0.0

    async def opened(self, settings: ServiceSettings, backend: SimulatedBackend) -> Application:
        """Return the service with a clock of its own."""
        backend._clock = self.clock
        return await Application.open(settings, backend, clock=self.clock, monotonic=lambda: self.cluster.now)

    def clock(self) -> float:
        return self.cluster.now + self.ahead

    def submit(self, id: str, team: str, profile: str = "one", **more: Any) -> None:
        """Submit a job by the service's clock."""
        store = self.service.components.store
        wanted = {"kind": "job", "owner": team, "gpus": 1000, "command": ("train",), "grace": 30.0} | more
        store.add_workload(NewWorkload(id, team=team, profile=profile, name=id, **wanted), now=self.clock())


def read_notices(site: SteppedSite) -> None:
    """Have launchers read their notices as they do: by how long they may save, whatever the clock of the service."""
    cluster, notice = site.cluster, site.cluster.notice

    def by_duration(row: Workload) -> None:
        assert row.notice is not None
        notice(row._replace(notice=Notice("", 0, cluster.now + row.notice.deadline - row.notice.at)))

    cluster.notice = by_duration  # type: ignore[method-assign]


async def history(folder: Path, seed: int, steps: dict[int, float]) -> list[object]:
    """Return the states of all jobs, once a second, of one history in which the clock is set at some seconds."""
    random = Random(seed)
    site = SteppedSite(SimulatedCluster({"n1": 2, "n2": 2}, Random(seed), lag=0.0), folder, POLICY)
    await site.start()
    read_notices(site)
    result: list[object] = []
    for second in range(240):
        if second in steps:
            site.ahead += steps[second]
        if random.random() < 0.2:
            id, team = f"j{second:03}", random.choice(("rnd", "devops"))
            profile = random.choice(("one", "one", "two", "patient"))
            site.cluster.habits[id] = Habits(
                saves=random.choice([0.0, 4.0, 25.0, 50.0]),
                lingers=random.choice([0.0, 0.0, 20.0]),
                stuck=random.random() < 0.1,
            )
            site.submit(id, team, profile, gpus=2000 if profile == "two" else 1000)
        if random.random() < 0.02:
            node = random.choice(("n1", "n2"))
            site.cluster.set_ready(node, False)
            site.cluster.at(random.choice([5.0, 20.0, 100.0]), lambda node=node: site.cluster.set_ready(node, True))  # type: ignore[misc]
        if random.random() < 0.1:
            running = sorted(row.id for row in (await site.rows()).values() if row.state == "running")
            theirs = [id for id in running if (await site.rows())[id].team == "devops"]
            if running:
                site.cluster.finish(random.choice(theirs or running))
        await site.run(1.0)
        rows = await site.rows()
        result.append(
            sorted((r.id, r.state, r.attempt, r.preemptions, round(r.ran), r.placement) for r in rows.values())
        )
    await site.stop()
    return result


@pytest.mark.covers("N33", "F20")
@pytest.mark.parametrize("seed", range(6))
async def test_no_decision_changes_where_the_clock_is_set(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    steps = {random.randrange(10, 230): random.choice(STEPS) for _ in range(4)}
    as_usual = await history(tmp_path / "usual", seed, {})
    stepped = await history(tmp_path / "stepped", seed, steps)
    for second, (one, other) in enumerate(zip(as_usual, stepped, strict=True)):
        assert one == other, f"after {second} s, with {steps}"
    assert any("checkpointing" in str(item) for item in as_usual), "something is evicted, too"


def row_at(started: float, **more: Any) -> Workload:
    row = initial_record(NewWorkload("j", "job", "rnd", "one", "ana", gpus=1000), started)
    here = (Place("n1", (0,), (1000,)),)
    return changed(row, {"state": "running", "attempt": 1, "placement": here, "started_at": started} | more)


class Clocks:
    """A clock that can be set, and one that goes on."""

    def __init__(self) -> None:
        self.passed, self.ahead = 0.0, 1_000_000.0
        self.steps = ClockSteps(self.now, lambda: self.passed)

    def now(self) -> float:
        return self.passed + self.ahead


@pytest.mark.parametrize("step", STEPS)
def test_how_long_a_job_ran_does_not_change_where_the_clock_is_set(step: float) -> None:
    clocks = Clocks()
    times = CorrectedTimes(clocks.steps)
    row = row_at(clocks.now())
    clocks.passed += 200
    row = row._replace(checkpoint_at=clocks.now(), checkpoint_step=7)
    clocks.ahead += step
    times.stepped([row], clocks.steps.observe())
    clocks.passed += 50
    ended = AttemptStatus("j", 1, Phase.LOST, ended_at=clocks.now(), step=7, checkpoint_at=row.checkpoint_at)
    seen = Observation((NodeStatus("n1", "p", (0,)),), (ended,))
    change_set = reconcile({"j": row}, seen, now=clocks.now(), max_infra_failures=3, times=times)
    (change,) = change_set.changes
    assert change.fields["ran"] == 250
    assert change.close_attempt is not None
    assert change.close_attempt["lost_seconds"] == 50


@pytest.mark.parametrize("first", [HOUR, -HOUR])
@pytest.mark.parametrize("second", [HOUR, -HOUR, 2 * HOUR])
def test_what_comes_after_a_step_keeps_its_own_times(first: float, second: float) -> None:
    clocks = Clocks()
    times = CorrectedTimes(clocks.steps)
    old = row_at(clocks.now())
    clocks.passed += 100
    clocks.ahead += first
    recent = row_at(clocks.now())._replace(id="r")
    times.stepped([old, recent], clocks.steps.observe(), {"r"})
    assert (times.of(old).started_at, times.of(recent).started_at) == (clocks.now() - 100, clocks.now())
    again = changed(old, {"attempt": 2, "started_at": clocks.now()})
    assert times.of(again).started_at == clocks.now(), "the next attempt"
    clocks.passed += 100
    clocks.ahead += second
    times.stepped([again, recent], clocks.steps.observe())
    assert times.of(again).started_at == times.of(recent).started_at == clocks.now() - 100
    assert times.of(again).submitted_at == clocks.now() - 200
    assert old.started_at == old.submitted_at == 1_000_000.0, "the rows stay as they were written"


@pytest.mark.parametrize("off", [-30 * HOUR, -HOUR, 0.0, HOUR, 30 * HOUR])
def test_a_process_that_starts_with_another_clock_grants_the_time_to_save(off: float) -> None:
    clocks = Clocks()
    notice = Notice("", clocks.now() - off, clocks.now() - off + 120)
    row = row_at(clocks.now() - off - 500, state="checkpointing", notice=notice)
    times = CorrectedTimes(clocks.steps)
    shown = times.of(row).notice
    assert shown is not None
    assert 0 <= shown.deadline - clocks.now() <= 120
    clocks.passed += 10_000
    assert times.of(row).notice == shown, "it passes once"
    started = times.of(row).started_at
    assert started is not None
    assert started <= clocks.now()


def test_clocks_that_drift_do_not_step() -> None:
    clocks = Clocks()
    for _ in range(1000):
        clocks.passed += 1
        clocks.ahead += 0.0005
        assert clocks.steps.observe() == 0
    clocks.ahead += 2
    assert clocks.steps.observe() == pytest.approx(2.5)
    assert clocks.steps.now() == pytest.approx(clocks.now())
