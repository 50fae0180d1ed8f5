"""Convert rows of the store to the models of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from makeway_api.models import (
    Attempt,
    Checkpoint,
    Job,
    JobProgress,
    Kind,
    Notice,
    Priority,
    Reason,
    Session,
    State,
    WorkerPlacement,
)
from makeway_api.models.progress import read_progress

from ..store.records import Attempt as AttemptRow
from ..store.records import Workload
from ..store.reports.progress import ProgressRow
from ..values import Notice as NoticeRow
from ..values import Place, ordinal
from ..wording import gpus, outcomes
from .answer_size import MAX_PLACEMENTS, newest_attempts, shown_text, shown_words
from .times import to_datetime, to_optional_datetime


def gpu(milli: int | float) -> float:
    """Return milli-GPUs as devices."""
    return milli / 1000


def worker_placements(placement: Sequence[Place]) -> list[WorkerPlacement]:
    """Return a placement, one entry for each worker, of a very large gang for the first MAX_PLACEMENTS."""
    return [
        WorkerPlacement(node=p.node, devices=[ordinal(device) for device in p.devices], gpus=gpu(sum(p.milli)))
        for p in placement[:MAX_PLACEMENTS]
    ]


RECLAIMING = "reclaiming"
"""The code of a nomination: GPUs are reserved while its victims terminate."""


UNOBSERVED = "unobserved"
"""The code of all work that is pending while nothing is decided, as nodes and jobs cannot be read."""


def reason(row: Workload, problem: str | None = None) -> Reason | None:
    """Return why the workload is in its state, or None; `problem`: what comes before that (`World.problem_of`)."""
    if problem:
        return unobserved(problem)
    if not row.reason_code:
        return None
    ready = row.reason_code == RECLAIMING  # then the time is the deadline of its victims
    return Reason(
        code=row.reason_code,
        message=row.reason_message,
        not_before=None if ready else to_optional_datetime(row.not_before),
        ready_by=to_optional_datetime(row.not_before) if ready else None,
        numbers=dict(row.reason_numbers),
    )


def unobserved(problem: str) -> Reason:
    """Return why all pending work waits while the backend has this problem, in a sentence."""
    return Reason(code=UNOBSERVED, message=problem)


def notice(row: NoticeRow | None) -> Notice | None:
    """Return the notice of an eviction, or None."""
    if row is None:
        return None
    return Notice(
        reason=row.reason,
        by_team=row.by_team,
        by_owner=row.by_owner,
        by_workload=row.by_workload,
        at=to_datetime(row.at),
        deadline=to_datetime(row.deadline),
        preempt_test=row.kind == "preempt_test",
    )


def checkpoint(step: int | None, saved_at: float | None) -> Checkpoint | None:
    """Return the newest checkpoint, or None."""
    return None if saved_at is None and step is None else Checkpoint(step=step, saved_at=to_optional_datetime(saved_at))


STALLED_SECONDS = 60.0
"""Seconds without a step, and at least ten steps' time, after which a job has no rate any more"""


def progress_model(row: ProgressRow | None, now: float, *, running: bool, whole: bool = True) -> JobProgress | None:
    """Return how far a job is, None if it reported nothing; its rate only while it runs and takes steps.

    Not `whole`, as in lists: of its metrics only that of the curve, and no curve.
    """
    if row is None or (report := read_progress(row.report)) is None or not report.shown:
        return None
    rate = report.rate
    if rate is not None and (not running or now - row.at > max(STALLED_SECONDS, 10 / rate)):
        rate = None
    remaining = None
    first = report.curve.name if report.curve else next(iter(report.metrics), "")
    metrics = report.metrics if whole else {name: report.metrics[name] for name in (first,) if name in report.metrics}
    if rate is not None and report.step is not None and report.total is not None:
        remaining = min(max(0, report.total - report.step) / rate, 1e9)
    return JobProgress(
        step=report.step,
        total=report.total,
        rate=rate,
        remaining_seconds=remaining,
        updated_at=to_datetime(row.at),
        stage=report.stage,
        reached=row.reached,
        metrics=metrics,
        curve=report.curve if whole else None,
    )


def job(
    row: Workload,
    *,
    virtual: bool,
    durable: bool,
    attempts: Sequence[AttemptRow] = (),
    now: float = 0.0,
    problem: str | None = None,
) -> Job:
    """Return a job; `now` (Unix seconds) gives the age of its checkpoint, `durable`: the next attempt finds it.

    `problem`: why nothing starts at the moment.
    """
    return Job(
        id=row.id,
        name=row.name,
        owner=row.owner,
        team=row.team or "",
        profile=row.profile,
        gpus=gpu(row.size),
        workers=len(row.placement) or row.workers,
        priority=Priority(row.priority),
        state=State(row.state),
        reason=_job_reason(row, now, durable, problem),
        over_quota=row.over_quota,
        borrowed_from=list(row.borrowed_from),
        attempt=row.attempt,
        preemptions=row.preemptions,
        failures=row.failures,
        submitted_at=to_datetime(row.submitted_at),
        started_at=to_optional_datetime(row.started_at),
        ended_at=to_optional_datetime(row.ended_at),
        time_limit=None if row.time_limit is None else round(row.time_limit),
        exit_code=row.exit_code,
        message=row.message,
        checkpoint=checkpoint(row.checkpoint_step, row.checkpoint_at),
        notice=notice(row.notice),
        placement=worker_placements(row.placement),
        attempts=[attempt_model(a) for a in newest_attempts(attempts)],
        command=shown_words(row.command),
        source=shown_text(row.source),
        clone_of=row.clone_of,
        image=row.image,
        virtual=virtual,
        durable_checkpoints=durable,
        version=row.version,
    )


def slow_save(row: ProgressRow | None, grace: float) -> str:
    """Return that the newest save of a job takes long for a grace in seconds, "" if it does not."""
    report = None if row is None else read_progress(row.report)
    return outcomes.slow_save(report.save_seconds, grace, report.save_killed) if report and report.save_seconds else ""


def teams_of(job: Job) -> set[str]:
    """Return the id of every team that a job names: its own, its lenders, and the one that it makes way for."""
    teams = (job.team, *job.borrowed_from, job.notice.by_team if job.notice else None)
    return {team for team in teams if team}


def _job_reason(row: Workload, now: float, durable: bool, problem: str | None) -> Reason | None:
    """Return a running job's risk: whether it may be evicted, and how much work that would cost (F44).

    `problem` comes before it.
    """
    if problem or row.state != "running":
        return reason(row, problem)
    if not row.over_quota:
        return Reason(code="running", message=f"Runs on {gpus(row.size)} within the team's reservation.")
    age = now - row.checkpoint_at if row.checkpoint_at else None
    return Reason(code="running_over_quota", message=outcomes.over_quota_risk(row.size, durable, age))


def attempt_model(row: AttemptRow) -> Attempt:
    """Return one run of a job."""
    return Attempt(
        number=row.number,
        started_at=to_datetime(row.started_at),
        ended_at=to_optional_datetime(row.ended_at),
        placement=worker_placements(row.placement),
        outcome=row.outcome,
        exit_code=row.exit_code,
        message=row.message,
        checkpoint=checkpoint(row.checkpoint_step, row.checkpoint_at),
        lost_seconds=row.lost_seconds,
        evicted_for=row.evicted_for,
    )


def session(
    row: Workload, *, virtual: bool, url: str, titles: tuple[str, str] = ("", ""), problem: str | None = None
) -> Session:
    """Return a session and its lease as the API shows it; `titles` are those of its profile and its team.

    `problem`: why nothing starts at the moment. What its pod needs of the cluster is not in it.
    """
    return Session(
        id=row.id,
        user=row.owner,
        server=row.server,
        profile=row.profile,
        team=row.team,
        gpus=gpu(row.gpus * row.workers),
        cpu=row.cpu / 1000,
        memory=row.memory,
        profile_title=titles[0],
        team_title=titles[1],
        preemptible=row.preemptible,
        state=State(row.state),
        phase=phase(row),
        reason=reason(row, problem),
        placement=worker_placements(row.placement),
        image=row.image,
        env=session_env(row, virtual, url) if row.state in ("starting", "running", "checkpointing") else {},
        virtual=virtual,
        submitted_at=to_datetime(row.submitted_at),
        started_at=to_optional_datetime(row.started_at),
        ended_at=to_optional_datetime(row.ended_at),
        expires_at=to_optional_datetime(row.expires_at),
        notice=notice(row.notice),
        version=row.version,
    )


def phase(row: Workload) -> str:
    """Return how far a session is: admission, reclaim, node, granted, running or over."""
    if not row.live:
        return "over"
    if row.state == "pending":
        return {RECLAIMING: "reclaim", "waiting_for_node": "node"}.get(row.reason_code, "admission")
    return "running" if row.server_started else "granted"


def session_env(row: Workload, virtual: bool, url: str) -> Mapping[str, str]:
    """Return the environment of the notebook: its devices, team and session."""
    devices = [str(ordinal(index)) for place in row.placement for index in place.devices]
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "NVIDIA_VISIBLE_DEVICES": ",".join(devices) or "none",
        "MAKEWAY_URL": url,
        "MAKEWAY_SESSION": row.id,
        "MAKEWAY_PROFILE": row.profile,
        "MAKEWAY_TEAM": row.team or "",
        "MAKEWAY_GPUS": f"{gpu(row.gpus * row.workers):g}",
    }
    if virtual:
        env["MAKEWAY_VIRTUAL_GPUS"] = "1"
    return env


def kind(row: Workload) -> Kind:
    """Return the kind of a row."""
    return Kind(row.kind)
