"""Show jobs as text and as outputs of a notebook: pure functions of the service's answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from makeway_api.durations import duration
from makeway_api.models import Attempt, Job, State
from makeway_api.quantities import count, gpus, listed, number
from makeway_api.tables import Column, plain
from markupsafe import Markup

from .blocks import (
    Banner,
    Block,
    Bold,
    Cell,
    Chip,
    Code,
    Facts,
    Inline,
    Line,
    Soft,
    Table,
    bundle,
    html,
    line,
    tabulate,
    text_of,
)
from .follow import preempted_for
from .job_progress import progress_blocks, progress_cell
from .words import clock, day_clock, full_clock, since, state_word, typed

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
TONES = {State.RUNNING: "good", State.SUCCEEDED: "good", State.FAILED: "bad", State.CHECKPOINTING: "warn"}
NO_JOBS = "No jobs. `%%train` at the top of a cell submits one."
OLDER = "… and older ones: %jobs --limit N"
_SHOWN_ATTEMPTS = 8


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
        lender = f", borrowed from {listed(job.lenders)}" if job.borrowed_from else ""
        return f"over quota{lender}; {checkpoint(job, now)}" if job.over_quota else "in quota"
    reason = job.reason.message if job.reason else ""
    return reason or job.message if job.state is State.CANCELLED else job.message or reason


def sentences(first: str, *others: str) -> str:
    """Return sentences one after the other; a single one stays as it is."""
    return " ".join([f"{first.rstrip('.')}." if first and others else first, *others]).strip()


def checkpoint(job: Job, now: datetime | None) -> str:
    """Return the newest checkpoint and its age (`last checkpoint: step 12, 4 min ago`), or without `now` its time."""
    newest = job.checkpoint
    if newest is None or (newest.step is None and newest.saved_at is None):
        return "no checkpoint yet"
    parts = [f"step {newest.step}"] if newest.step is not None else []
    if newest.saved_at is not None:
        parts.append(f"{duration(since(newest.saved_at, now))} ago" if now else day_clock(newest.saved_at))
    return f"last checkpoint: {', '.join(parts)}"


def given_name(job: Job) -> str:
    """Return the name given at submission, or an empty string."""
    return job.name if job.name != job.id else ""


def chip(job: Job) -> Chip:
    """Return the state as a small label."""
    word = state_word(job.state, job.preemptions, job.attempt)
    return Chip(f"{MARKS[job.state]} {word}", TONES.get(job.state, ""))


# -- tables --------------------------------------------------------------------------------------------------------


def columns(now: datetime | None, owner: bool = False) -> list[Column[Job, Cell]]:
    """Return the columns of a table of jobs, which are the same in outputs, in text and on the command line.

    Without `now` it has clock times: it is the same until something happens, however long it is shown.
    """
    age: Column[Job, Cell] = Column("Since", lambda job: day_clock(job.submitted_at), right=True)
    if now:
        age = Column("Age", lambda job: duration(since(job.submitted_at, now)), right=True)
    owners: list[Column[Job, Cell]] = [Column("Owner", lambda job: job.owner)] if owner else []
    return [
        Column("ID", lambda job: Code(job.id)),
        Column("Name", lambda job: given_name(job) or "–"),
        Column("State", chip),
        Column("Progress", progress_cell, optional=True),
        Column("GPUs", lambda job: number(job.gpus), right=True),
        *owners,
        Column("Team", lambda job: job.title(job.team)),
        age,
        Column("Why", lambda job: sentences(why(job, now), *job.warnings)),
    ]


def jobs_block(jobs: Sequence[Job], now: datetime | None, owner: bool = False) -> Table:
    """Return jobs as a table, with their owners if asked for; `now` as for the columns."""
    return tabulate(columns(now, owner), jobs)


def jobs_blocks(jobs: Sequence[Job], now: datetime, more: bool = False, owner: bool = False) -> list[Block]:
    """Return jobs as an output, as they were at `now`; `more` adds how to list older ones."""
    if not jobs:
        return [line(Soft(typed(NO_JOBS)))]
    older: list[Block] = [line(Soft(OLDER))] if more else []
    return [jobs_block(jobs, now, owner), *older, line(Soft(f"State of {full_clock(now)}."))]


def jobs_bundles(
    jobs: Sequence[Job],
    known_at: datetime,
    more: bool = False,
    owner: bool = False,
    problem: str = "",
    followed: bool = False,
) -> list[dict[str, str]]:
    """Return the two parts of a table in every format: the jobs, and of which time they are.

    `problem` says why nothing newer is known, `followed` that the output is kept up to date.
    """
    older: list[Block] = [line(Soft(OLDER))] if more else []
    state: tuple[Inline, ...] = (Soft(f"State of {full_clock(known_at)};"), *_follow_hint("%jobs", "them", followed))
    if problem:
        state = (Bold(problem), *state)
    elif all(job.state.ended for job in jobs):
        state = (Soft(f"Final states, read at {full_clock(known_at)}."),)
    return [bundle([jobs_block(jobs, None, owner), *older]), bundle([Line(state)])]


def jobs_text(jobs: Sequence[Job], now: datetime, owner: bool = False) -> str:
    """Return jobs as a plain table, with their owners if asked for."""
    return text_of([jobs_block(jobs, now, owner)])


def jobs_table(jobs: Sequence[Job], now: datetime, more: bool = False, owner: bool = False) -> Markup:
    """Return jobs as a table in HTML."""
    return html(jobs_blocks(jobs, now, more, owner))


# -- one job -------------------------------------------------------------------------------------------------------


def job_text(job: Job, now: datetime | None = None) -> str:
    """Return a job in a few lines of plain text, as it was at `now` (default: the present)."""
    now = now or datetime.now(job.submitted_at.tzinfo)
    progress = [("Progress", text)] if (text := progress_cell(job)) else []
    warnings = [("Warning", warning) for warning in job.warnings]
    rows = [*facts(job, now), *warnings, *progress, ("As of", full_clock(now))]
    return "\n".join([_title(job), text_of([Facts(rows)])])


def _title(job: Job) -> str:
    title = f"Job {job.id}" + (f" {job.name!r}" if given_name(job) else "")
    return plain(f"{title}: {state_word(job.state, job.preemptions, job.attempt)}")


def job_parts(
    job: Job, known_at: datetime, problem: str = "", idle: bool = False, followed: bool = False
) -> list[list[Block]]:
    """Return the two parts of a job's card: what it is, and how far it is, which changes more often.

    `known_at` is when the service said so, `problem` why nothing newer is known, `idle` that progress is not followed,
    `followed` that the output is kept up to date.
    """
    virtual: list[Inline] = [Chip("virtual GPUs", dashed=True)] if job.virtual else []
    head: list[Block] = [
        line(Bold(given_name(job) or "Job without a name"), chip(job), *virtual, Code(job.id), space=6)
    ]
    head += [Facts(steady_facts(job, None)), *_attempts(job)]
    state = line(*_state_of(job, known_at, problem, idle, followed))
    warnings = [Banner(warning, status=False) for warning in job.warnings]
    return [head, [Facts(changing_facts(job, None)), *warnings, *progress_blocks(job, known_at), state]]


def job_bundles(
    job: Job, known_at: datetime, problem: str = "", idle: bool = False, followed: bool = False
) -> list[dict[str, str]]:
    """Return the parts of a job's card in every format."""
    head, rest = job_parts(job, known_at, problem, idle, followed)
    return [bundle(head, "\n".join([_title(job), text_of(head[1:])])), bundle(rest)]


def job_card(job: Job, now: datetime) -> Markup:
    """Return the whole card in HTML."""
    return Markup("").join(html(part) for part in job_parts(job, now))


def _state_of(job: Job, known_at: datetime, problem: str, idle: bool, followed: bool) -> tuple[Inline, ...]:
    present = _follow_hint(f"%job {job.id}", "it", followed)
    if problem:
        return (Bold(problem), f"State of {full_clock(known_at)};", *present)
    if job.state.ended:
        return (Soft(f"Final state, read at {full_clock(known_at)}."),)
    if idle:
        paused = "Progress is not followed after an hour without a cell; run any cell to go on."
        return (Soft(f"{paused} State of {full_clock(known_at)};"), *present)
    return (Soft(f"State of {full_clock(known_at)};"), *present)


def _follow_hint(command: str, what: str, followed: bool) -> tuple[Inline, ...]:
    """Return how to go on from an output that nothing follows: as one that is `followed`, once it is only saved."""
    if not followed:
        return Soft("run"), Code(command), Soft(f"to follow {what}.")
    return Soft("after a reload"), Code(command), Soft(f"follows {what} again.")


def facts(job: Job, now: datetime | None) -> list[tuple[str, Cell]]:
    """Return label and text of everything worth showing about a job; without `now` times are clock times."""
    first, *others = steady_facts(job, now)
    return [first, *changing_facts(job, now), *others]


def steady_facts(job: Job, now: datetime | None) -> list[tuple[str, Cell]]:
    """Return what stays the same while a job is in one state."""
    virtual = " (virtual)" if job.virtual else ""
    workers = f" over {count(job.workers, 'worker')}" if job.workers > 1 else ""
    owner = f"profile {job.profile}, team {job.title(job.team)}, owner {job.owner}"
    result: list[tuple[str, Cell]] = [("GPUs", f"{gpus(job.gpus)}{virtual}{workers}, {owner}")]
    if job.placement and job.state.holds_gpus:
        nodes = (f"{g.node} (GPU {', '.join(map(str, g.devices))})" if g.devices else g.node for g in job.placement)
        result.append(("Where", listed(nodes)))
    if job.attempt:
        preempted = f", made way {count(job.preemptions, 'time')}" if job.preemptions else ""
        failed = f", failed {count(job.failures, 'time')}" if job.failures else ""
        result.append(("Attempt", f"{job.attempt}{preempted}{failed}"))
    return [*result, ("Time", times(job, now))]


def changing_facts(job: Job, now: datetime | None) -> list[tuple[str, Cell]]:
    """Return the reason of a job's state, and its newest checkpoint unless the reason names it."""
    text = why(job, now)
    result: list[tuple[str, Cell]] = [("Why", text)] if text else []
    saved = checkpoint(job, now)
    if job.checkpoint is not None and saved not in text:
        result.append(("Checkpoint", saved.removeprefix("last checkpoint: ")))
    return result


def times(job: Job, now: datetime | None) -> str:
    """Return when a job was submitted, how long it runs or ran, and its limit; without `now` as clock times."""

    def at(moment: datetime) -> str:
        return f"{duration(since(moment, now))} ago" if now else day_clock(moment)

    text = f"submitted {at(job.submitted_at)}"
    if job.ended_at and job.state.ended:
        took = duration(since(job.started_at or job.submitted_at, job.ended_at))
        text = f"took {took}, ended {at(job.ended_at)}"
    elif job.started_at and job.state.holds_gpus:
        runs = "starts" if job.state is State.STARTING else "runs"
        text += f", {runs} " + (
            f"for {duration(since(job.started_at, now))}" if now else f"since {day_clock(job.started_at)}"
        )
    return text + (f", limit {duration(job.time_limit)}" if job.time_limit else "")


def _attempts(job: Job) -> list[Block]:
    if len(job.attempts) < 2:
        return []
    newest = job.attempts[-_SHOWN_ATTEMPTS:]
    title = count(len(job.attempts), "attempt")
    earlier = f"; the last {len(newest)}" if len(newest) < len(job.attempts) else ""
    return [line(f"{title}{earlier}:", space=4), tabulate(ATTEMPT_COLUMNS, newest)]


def _attempt_outcome(attempt: Attempt) -> str:
    ran = (
        f"took {duration(since(attempt.started_at, attempt.ended_at))}"
        if attempt.ended_at
        else f"since {clock(attempt.started_at)}"
    )
    parts = [ran, attempt.outcome or "running"]
    if attempt.checkpoint and attempt.checkpoint.step is not None:
        saved = f"saved at step {attempt.checkpoint.step}"
        parts += [] if attempt.message.startswith(saved) else [saved]
    if attempt.lost_seconds:
        parts.append(f"lost {duration(attempt.lost_seconds)}")
    return ", ".join(parts) + (f": {attempt.message}" if attempt.message else "")


ATTEMPT_COLUMNS: Sequence[Column[Attempt, Cell]] = (
    Column("Attempt", lambda attempt: str(attempt.number)),
    Column("What became of it", _attempt_outcome),
)
