"""Show jobs as text and as HTML: pure functions of the service's answers, all user input escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from makeway_api.durations import duration
from makeway_api.models import Attempt, Job, State
from makeway_api.quantities import count, gpus, listed, number
from markupsafe import Markup

from .follow import preempted_for
from .looks import styled
from .words import clock, day_clock, plain, since, state_word, table

JOB_HEAD = ("ID", "NAME", "STATE", "GPUS", "OWNER", "TEAM", "AGE", "WHY")
MARKS = {
    State.PENDING: "…",
    State.STARTING: "→",
    State.RUNNING: "▶",
    State.CHECKPOINTING: "⇥",
    State.SUCCEEDED: "✓",
    State.FAILED: "✗",
    State.CANCELLED: "–",
    State.STOPPED: "–",
}


def why(job: Job, now: datetime | None) -> str:
    """Return the one sentence that matters about a job in its present state; without `now` times are clock times."""
    if job.state is State.CHECKPOINTING and job.notice:
        return f"makes way {preempted_for(job)}"
    if job.state is State.PENDING:
        text = job.reason.message if job.reason else "waits for the scheduler"
        if job.reason and job.reason.ready_by:
            text += f" Ready by {clock(job.reason.ready_by)}."
        if job.reason and job.reason.not_before:
            text += f" {job.reason.before} {clock(job.reason.not_before)}."
        return text
    if job.state is State.RUNNING:
        lender = f", borrowed from {listed(job.borrowed_from)}" if job.borrowed_from else ""
        return f"over quota{lender}; {checkpoint(job, now)}" if job.over_quota else "in quota"
    reason = job.reason.message if job.reason else ""
    return reason or job.message if job.state is State.CANCELLED else job.message or reason


def checkpoint(job: Job, now: datetime | None) -> str:
    """Return the newest checkpoint and its age (`last checkpoint: step 12, 4 min ago`), or without `now` its time."""
    newest = job.checkpoint
    if newest is None or (newest.step is None and newest.saved_at is None):
        return "no checkpoint yet"
    parts = [f"step {newest.step}"] if newest.step is not None else []
    if newest.saved_at is not None:
        parts.append(f"{duration(since(newest.saved_at, now))} ago" if now else day_clock(newest.saved_at))
    return f"last checkpoint: {', '.join(parts)}"


def named(job: Job) -> str:
    """Return the name given at submission, or an empty string."""
    return job.name if job.name != job.id else ""


def job_row(job: Job, now: datetime) -> tuple[str, ...]:
    """Return one line of the table of jobs, in the order of JOB_HEAD."""
    word = f"{MARKS[job.state]} {state_word(job.state, job.preemptions, job.attempt)}"
    age = duration(since(job.submitted_at, now))
    return (job.id, named(job) or "–", word, number(job.gpus), job.owner, job.team, age, why(job, now))


def jobs_text(jobs: Sequence[Job], now: datetime, owner: bool = False) -> str:
    """Return jobs as a plain table, with their owners if asked for."""
    shown = [n for n, head in enumerate(JOB_HEAD) if owner or head != "OWNER"]
    rows = [[job_row(job, now)[n] for n in shown] for job in jobs]
    return table([JOB_HEAD[n] for n in shown], rows, right=frozenset({3}))


def job_text(job: Job) -> str:
    """Return a job in a few lines of plain text."""
    now = datetime.now(job.submitted_at.tzinfo)
    title = f"Job {job.id}" + (f" {job.name!r}" if named(job) else "")
    lines = [f"{title}: {state_word(job.state, job.preemptions, job.attempt)}"]
    lines += [f"  {label:<12}{plain(text)}" for label, text in facts(job, now)]
    return "\n".join(lines)


def facts(job: Job, now: datetime) -> list[tuple[str, str]]:
    """Return label and text of everything worth showing about a job."""
    virtual = " (virtual)" if job.virtual else ""
    workers = f" over {count(job.workers, 'worker')}" if job.workers > 1 else ""
    found = [("GPUs", f"{gpus(job.gpus)}{virtual}{workers}, profile {job.profile}, team {job.team}, owner {job.owner}")]
    if text := why(job, now):
        found.append(("Why", text))
    if job.placement and job.state.holds_gpus:
        nodes = (f"{g.node} (GPU {', '.join(map(str, g.devices))})" if g.devices else g.node for g in job.placement)
        found.append(("Where", listed(nodes)))
    if job.attempt:
        preempted = f", made way {count(job.preemptions, 'time')}" if job.preemptions else ""
        failed = f", failed {count(job.failures, 'time')}" if job.failures else ""
        found.append(("Attempt", f"{job.attempt}{preempted}{failed}"))
    if job.checkpoint is not None:
        found.append(("Checkpoint", checkpoint(job, now).removeprefix("last checkpoint: ")))
    found.append(("Time", times(job, now)))
    return found


def times(job: Job, now: datetime) -> str:
    """Return when a job was submitted, how long it runs or ran, and its limit."""
    text = f"submitted {duration(since(job.submitted_at, now))} ago"
    if job.ended_at and job.state.ended:
        took = duration(since(job.started_at or job.submitted_at, job.ended_at))
        text = f"took {took}, ended {duration(since(job.ended_at, now))} ago"
    elif job.started_at and job.state.holds_gpus:
        text += f", runs for {duration(since(job.started_at, now))}"
    return text + (f", limit {duration(job.time_limit)}" if job.time_limit else "")


# -- HTML --------------------------------------------------------------------------------------------------------

_CARD = Markup(
    '<div class="mw-card"><div><b>{name}</b> {chip}{virtual} <span class="mw-soft mw-mono">{id}</span></div>'
    '<table>{rows}</table>{attempts}<div class="mw-soft">As of {now}. '
    "<span class=\"mw-mono\">makeway.job('{id}')</span> shows its present state.</div></div>"
)
_ROW = Markup(
    '<tr><td class="mw-mono">{id}</td><td>{name}</td><td>{chip}</td><td class="mw-r">{gpus}</td>{owner}'
    '<td>{team}</td><td class="mw-r">{age}</td><td>{why}</td></tr>'
)
_NO_JOBS = Markup(
    '<div class="mw-soft">No jobs. <span class="mw-mono">%%train</span> at the top of a cell submits one.</div>'
)
_OLDER = Markup('<div class="mw-soft">… and older ones: <span class="mw-mono">%jobs --limit N</span></div>')


def chip(job: Job) -> Markup:
    """Return the state as a small label."""
    word = state_word(job.state, job.preemptions, job.attempt)
    return Markup('<span class="mw-chip mw-state-{}">{} {}</span>').format(job.state.value, MARKS[job.state], word)


def job_card(job: Job, now: datetime) -> Markup:
    """Return a job as a card that still reads right in a notebook saved a year ago."""
    row = Markup("<tr><th>{}</th><td>{}</td></tr>")
    return styled(
        _CARD.format(
            name=named(job) or "Job without a name",
            chip=chip(job),
            virtual=Markup(' <span class="mw-chip mw-virtual">virtual GPUs</span>') if job.virtual else "",
            id=job.id,
            rows=Markup("").join(row.format(label, text) for label, text in facts(job, now)),
            attempts=_attempts(job),
            now=f"{now.astimezone():%Y-%m-%d %H:%M:%S}",
        )
    )


def jobs_table(jobs: Sequence[Job], now: datetime, more: bool = False, owner: bool = False) -> Markup:
    """Return jobs as a styled table; `more` adds how to list older ones."""
    if not jobs:
        return styled(_NO_JOBS)
    return styled(jobs_rows(jobs, now, owner), _OLDER if more else Markup(""))


def jobs_rows(jobs: Iterable[Job], now: datetime | None, owner: bool = False) -> Markup:
    """Return the bare table, with the jobs' owners if asked for.

    Without `now` it has clock times: it is the same until something happens, however long it is shown.
    """
    heads = ["ID", "Name", "State", "GPUs", *(["Owner"] if owner else []), "Team", "Age" if now else "Since", "Why"]
    numeric = Markup(' class="mw-r"')
    cells = (
        Markup("<th{}>{}</th>").format(numeric if head in ("GPUs", "Age", "Since") else "", head) for head in heads
    )
    body = (_row(job, now, owner) for job in jobs)
    table = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>")
    return table.format(Markup("").join(cells), Markup("").join(body))


def _row(job: Job, now: datetime | None, owner: bool) -> Markup:
    return _ROW.format(
        id=job.id,
        name=named(job) or "–",
        chip=chip(job),
        gpus=number(job.gpus),
        owner=Markup("<td>{}</td>").format(job.owner) if owner else "",
        team=job.team,
        age=duration(since(job.submitted_at, now)) if now else day_clock(job.submitted_at),
        why=why(job, now),
    )


def _attempts(job: Job) -> Markup:
    if len(job.attempts) < 2:
        return Markup("")
    row = Markup("<tr><td>{}</td><td>{}</td></tr>")
    rows = Markup("").join(row.format(attempt.number, _history(attempt)) for attempt in job.attempts)
    return Markup("<details><summary>{}</summary><table>{}</table></details>").format(
        count(len(job.attempts), "attempt"), rows
    )


def _history(attempt: Attempt) -> str:
    ran = (
        f"ran {duration(since(attempt.started_at, attempt.ended_at))}"
        if attempt.ended_at
        else f"since {clock(attempt.started_at)}"
    )
    parts = [ran, attempt.outcome or "running"]
    if attempt.evicted_for:
        parts.append(f"for {attempt.evicted_for}")
    if attempt.checkpoint and attempt.checkpoint.step is not None:
        parts.append(f"saved at step {attempt.checkpoint.step}")
    if attempt.lost_seconds:
        parts.append(f"lost {duration(attempt.lost_seconds)}")
    return ", ".join(parts) + (f": {attempt.message}" if attempt.message else "")
