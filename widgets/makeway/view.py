"""How jobs look, as text and as HTML: pure functions of what the service answered, everything from users escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape

from makeway_api.models import Attempt, Job, State

from .follow import why_leaving
from .looks import dressed
from .words import clock, count, duration, gpus, listed, number, plain, since, state_word, table

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


def why(job: Job, now: datetime) -> str:
    """The one sentence that matters about a job in its present state."""
    if job.state is State.CHECKPOINTING and job.notice:
        return f"makes way {why_leaving(job)}"
    if job.state is State.PENDING:
        text = job.reason.message if job.reason else "waits for the next decision"
        if job.reason and job.reason.not_before:
            text += f" Not before {clock(job.reason.not_before)}."
        return text
    if job.state is State.RUNNING:
        whose = f", borrowed from {listed(job.borrowed_from)}" if job.borrowed_from else ""
        over = f"over quota{whose}; {checkpoint(job, now)}" if job.over_quota else "in quota"
        return over
    said = job.reason.message if job.reason else ""
    return said or job.message if job.state is State.CANCELLED else job.message or said


def checkpoint(job: Job, now: datetime) -> str:
    """'last checkpoint: step 12, 4 min ago', or that there is none."""
    kept = job.checkpoint
    if kept is None or (kept.step is None and kept.saved_at is None):
        return "no checkpoint yet"
    parts = [f"step {kept.step}"] if kept.step is not None else []
    if kept.saved_at is not None:
        parts.append(f"{duration(since(kept.saved_at, now))} ago")
    return f"last checkpoint: {', '.join(parts)}"


def named(job: Job) -> str:
    """The name that somebody gave it, if anybody did."""
    return job.name if job.name != job.id else ""


def job_row(job: Job, now: datetime) -> tuple[str, ...]:
    """One line of the table of jobs."""
    word = f"{MARKS[job.state]} {state_word(job.state, job.preemptions, job.attempt)}"
    age = duration(since(job.submitted_at, now))
    return (job.id, named(job) or "–", word, number(job.gpus), job.owner, job.team, age, why(job, now))


def jobs_text(jobs: Sequence[Job], now: datetime, owner: bool = False) -> str:
    """Jobs as a plain table: with `owner` also whose they are."""
    shown = [n for n, head in enumerate(JOB_HEAD) if owner or head != "OWNER"]
    rows = [[job_row(job, now)[n] for n in shown] for job in jobs]
    return table([JOB_HEAD[n] for n in shown], rows, right=frozenset({3}))


def job_text(job: Job) -> str:
    """A job in a few lines of plain text."""
    now = datetime.now(job.submitted_at.tzinfo)
    title = f"Job {job.id}" + (f" {job.name!r}" if named(job) else "")
    lines = [f"{title}: {state_word(job.state, job.preemptions, job.attempt)}"]
    lines += [f"  {label:<12}{plain(text)}" for label, text in facts(job, now)]
    return "\n".join(lines)


def facts(job: Job, now: datetime) -> list[tuple[str, str]]:
    """Label and text of everything worth knowing."""
    virtual = " (virtual)" if job.virtual else ""
    workers = f" over {count(job.workers, 'worker')}" if job.workers > 1 else ""
    found = [("GPUs", f"{gpus(job.gpus)}{virtual}{workers}, profile {job.profile}, team {job.team}, owner {job.owner}")]
    if text := why(job, now):
        found.append(("Why", text))
    if job.placement and job.state.holds_gpus:
        found.append(
            (
                "Where",
                listed(
                    f"{g.node} (GPU {', '.join(map(str, g.devices))})" if g.devices else g.node for g in job.placement
                ),
            )
        )
    if job.attempt:
        made = f", made way {count(job.preemptions, 'time')}" if job.preemptions else ""
        failed = f", failed {count(job.failures, 'time')}" if job.failures else ""
        found.append(("Attempt", f"{job.attempt}{made}{failed}"))
    if job.checkpoint is not None:
        found.append(("Checkpoint", checkpoint(job, now).removeprefix("last checkpoint: ")))
    found.append(("Time", times(job, now)))
    return found


def times(job: Job, now: datetime) -> str:
    """Submitted, running since, ended after, and the limit."""
    text = f"submitted {duration(since(job.submitted_at, now))} ago"
    if job.ended_at and job.state.ended:
        took = duration(since(job.started_at or job.submitted_at, job.ended_at))
        text = f"took {took}, ended {duration(since(job.ended_at, now))} ago"
    elif job.started_at and job.state.holds_gpus:
        text += f", runs for {duration(since(job.started_at, now))}"
    return text + (f", limit {duration(job.time_limit)}" if job.time_limit else "")


# -- HTML --------------------------------------------------------------------------------------------------------


def chip(job: Job) -> str:
    """The state as a small label."""
    word = state_word(job.state, job.preemptions, job.attempt)
    return f'<span class="mw-chip mw-state-{job.state.value}">{MARKS[job.state]} {escape(word)}</span>'


def job_card(job: Job, now: datetime) -> str:
    """A job as a card that still reads right in a notebook saved a year ago."""
    virtual = ' <span class="mw-chip mw-virtual">virtual GPUs</span>' if job.virtual else ""
    name = escape(named(job) or "Job without a name")
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in facts(job, now))
    return dressed(
        f'<div class="mw-card"><div><b>{name}</b> {chip(job)}{virtual} '
        f'<span class="mw-soft mw-mono">{escape(job.id)}</span></div>'
        f"<table>{rows}</table>{_attempts(job)}"
        f'<div class="mw-soft">As of {now.astimezone():%Y-%m-%d %H:%M:%S}. '
        f"<span class=\"mw-mono\">makeway.job('{escape(job.id)}')</span> asks again.</div></div>"
    )


def jobs_table(jobs: Sequence[Job], now: datetime, more: bool = False, owner: bool = False) -> str:
    """Jobs as a table."""
    if not jobs:
        return dressed(
            '<div class="mw-soft">No jobs. <span class="mw-mono">%%train</span> at the top of a cell submits one.</div>'
        )
    older = '<div class="mw-soft">… and older ones: <span class="mw-mono">%jobs --limit N</span></div>' if more else ""
    return dressed(jobs_rows(jobs, now, owner) + older)


def jobs_rows(jobs: Iterable[Job], now: datetime, owner: bool = False) -> str:
    """The bare table: with `owner` also whose they are."""
    head = ["ID", "Name", "State", "GPUs", *(["Owner"] if owner else []), "Team", "Age", "Why"]
    body = "".join(_row(job, now, owner) for job in jobs)
    cells = "".join(f"<th{_right(h)}>{h}</th>" for h in head)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _row(job: Job, now: datetime, owner: bool) -> str:
    who = f"<td>{escape(job.owner)}</td>" if owner else ""
    return (
        f'<tr><td class="mw-mono">{escape(job.id)}</td><td>{escape(named(job) or "–")}</td><td>{chip(job)}</td>'
        f'<td class="mw-r">{number(job.gpus)}</td>{who}<td>{escape(job.team)}</td>'
        f'<td class="mw-r">{escape(duration(since(job.submitted_at, now)))}</td><td>{escape(why(job, now))}</td></tr>'
    )


def _attempts(job: Job) -> str:
    if len(job.attempts) < 2:
        return ""
    rows = "".join(f"<tr><td>{a.number}</td><td>{escape(_story(a))}</td></tr>" for a in job.attempts)
    return f"<details><summary>{count(len(job.attempts), 'attempt')}</summary><table>{rows}</table></details>"


def _story(attempt: Attempt) -> str:
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


def _right(head: str) -> str:
    return ' class="mw-r"' if head in ("GPUs", "Age") else ""
