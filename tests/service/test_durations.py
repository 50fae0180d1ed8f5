"""Run times of past work: what is expected from them, and forecasts in reasons."""

from __future__ import annotations

from pathlib import Path

from makeway_quota.application import Application
from makeway_quota.engine.snapshot import Workload as EngineWorkload
from makeway_quota.history.durations import KEPT, KINDS, Durations, low
from makeway_quota.store.records import NewWorkload, PastRun, Workload
from makeway_quota.store.rows import initial_record
from running import running


def past(*seconds: float, owner: str = "ana", team: str = "rnd", profile: str = "gpu3") -> list[PastRun]:
    return [PastRun(team, owner, profile, item) for item in seconds]


def row(**fields: object) -> Workload:
    made = initial_record(NewWorkload("j1", "job", "rnd", "gpu3", "ana"), 0.0)
    return made._replace(**{"state": "running", "started_at": 100.0, "attempt": 1, **fields})


def test_a_low_quantile_is_given() -> None:
    assert low([50.0, 30.0, 40.0], 0.1) == 30, "of three, the shortest"
    assert low(range(1, 20), 0.1) == 2, "of nineteen, the second: the next is below it with a chance of 2 in 20"
    assert low(range(1, 19), 0.1) == 1
    assert low(range(1, 51), 0.1) == 5
    assert low(range(1, 51), 0.5) == 25


def test_the_owners_own_runs_come_before_the_teams() -> None:
    known = Durations(past(500, 600))
    assert known.expected("rnd", "ana", "gpu3") is None, "two are too few"
    known.add(past(50, owner="bo"))
    assert known.expected("rnd", "ana", "gpu3") == known.expected("rnd", "cy", "gpu3") == 50, "three of the team"
    known.add(past(700))
    assert known.expected("rnd", "ana", "gpu3") == 500, "three of ana"
    assert known.expected("rnd", "bo", "gpu3") == 50
    assert known.expected("devops", "ana", "gpu3") is known.expected("rnd", "ana", "gpu1") is None


def test_only_the_last_runs_are_remembered() -> None:
    known = Durations(past(*[1.0] * 100))
    known.add(past(*[9.0] * KEPT))
    assert known.expected("rnd", "ana", "gpu3") == 9
    for number in range(KINDS):
        known.add(past(1.0, team=f"t{number}"))
    assert known.expected("rnd", "ana", "gpu3") is None


def test_a_restarted_job_has_its_earlier_attempts_behind_it() -> None:
    known = Durations(past(3600, 4000, 5000))
    assert known.remaining(row(), 0.0) == 3600
    assert known.remaining(row(attempt=2, ran=1000.0), 0.0) == 2600
    assert known.remaining(row(attempt=2, ran=9000.0), 0.0) is None, "nothing known took as long"
    assert known.remaining(row(state="pending"), 0.0) is None
    assert known.remaining(row(kind="session"), 0.0) is None


def test_a_job_beyond_its_expected_run_time_is_compared_with_longer_runs_only() -> None:
    known = Durations(past(3600, 4000, 5000))
    assert known.remaining(row(started_at=100.0), 3699.0) == 3600
    assert known.remaining(row(started_at=100.0), 3700.0) == 4000
    assert known.remaining(row(started_at=100.0), 4200.0) == 5000
    assert known.remaining(row(started_at=100.0), 5200.0) is None
    assert known.remaining(row(started_at=100.0, attempt=2, ran=1000.0), 3000.0) == 3000


class _LearnsWhenCompared(float):
    """A run during whose comparison another run ends, as where a thread reads while the event loop learns."""

    learns: Durations | None = None

    def __gt__(self, other: float) -> bool:
        if self.learns is not None:
            known, self.learns = self.learns, None
            known.add(past(*[5000.0] * KEPT))
        return super().__gt__(other)


def test_an_estimate_can_be_read_while_runs_are_added() -> None:
    run = _LearnsWhenCompared(200.0)
    known = Durations(past(10, run, 20))
    assert known.expected("rnd", "ana", "gpu3") == 10
    run.learns = known
    assert known.remaining(row(), 200.0) == 200, "of the runs that were known when it was asked"
    assert known.remaining(row(), 200.0) == 5000


def test_what_ended_teaches_and_what_never_ran_does_not() -> None:
    known = Durations()
    learnt = [known.learn(row(state=state, ran=float(at))) for at, state in enumerate(["cancelled", "failed"])]
    learnt.append(known.learn(row(state="succeeded", ran=2.0)))
    learnt += [known.learn(row(ran=9.0)), known.learn(row(kind="session", state="stopped", ran=9.0))]
    assert learnt == [False] * 5, "two runs are too few; the others do not count"
    assert known.learn(row(state="succeeded", owner="bo", ran=3.0))
    assert known.expected("rnd", "ana", "gpu3") == 1
    assert known.learn(row(state="succeeded", ran=3.0)), "now the owner is known"
    assert not known.learn(row(state="succeeded", ran=3.0))


async def test_the_engine_gets_the_run_times_of_past_work(tmp_path: Path) -> None:
    """Three jobs end one after the other; the fourth is expected to run as long as the shortest of them at least."""
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.2) as run:
        for at in range(3):
            job = await run.submit("ana", "train", profile="gpu3")
            await run.job(job.id, "running")
            held = await shown(run.service, job.id)
            assert held.expected is None, f"only {at} are known"
            await run.client("ana").cancel(job.id)
            await run.job(job.id, "cancelled")
        # For when it has outrun the others.
        run.service.components.world.durations.add([PastRun("rnd", "ana", "gpu3", 3600.0)])
        job = await run.submit("ana", "train", profile="gpu3")
        await run.job(job.id, "running")
        held = await shown(run.service, job.id)
        ran = [item.seconds for item in run.service.components.store.past_runs()]
        assert len(ran) == 3
        assert held.expected in (*ran, 3600.0)


async def shown(service: Application, id: str) -> EngineWorkload:
    rows = await service.components.world.rows()
    return next(w for w in service.components.world.snapshot(rows, 0.0).workloads if w.id == id)
