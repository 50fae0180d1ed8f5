"""Follow a job: its changes as they happen, its log as it grows; interrupting never disturbs the job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from makeway_api.durations import duration
from makeway_api.errors import MakewayError
from makeway_api.models import Attempt, Job, LogChunk, State
from makeway_api.quantities import count, listed
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from .connection import client, explain
from .problems import Refused, WatchStopped
from .words import clock, plain, since, state_word, typed

T = TypeVar("T")

POLL = 20.0
"""Seconds of one long poll."""
PATIENCE = 300.0
"""Seconds without an answer after which waiting gives up; the service may restart meanwhile."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 10.0
CHUNK = 262_144
"""Bytes of a log that are read at once."""


@contextmanager
def leaving_alone(id: str, doing: str) -> Iterator[None]:
    """Turn Ctrl-C (or the stop button) into a message: only the watching stops, the job continues."""
    try:
        yield
    except KeyboardInterrupt:
        raise WatchStopped(
            typed(
                f"Stopped {doing}. Job {id} continues; "
                f"`%job {id}` shows it, `%logs -f {id}` follows it, `%cancel {id}` ends it."
            )
        ) from None


def changes(id: str, deadline: float | None = None) -> Iterator[Job]:
    """Yield the job now and after each change, until it has ended or the `deadline` (monotonic) has passed."""
    data = _job(id, 0.0, None, deadline)
    yield data
    while not data.state.ended:
        left = POLL if deadline is None else min(POLL, deadline - time.monotonic())
        if left <= 0:
            return
        newer = _job(id, left, data.version, deadline)
        if newer.version != data.version:
            data = newer
            yield data


class Reporter:
    """Prints the state of a job, each state once."""

    def __init__(self) -> None:
        self._last = ""

    def report(self, data: Job) -> None:
        """Print the state, unless it was the last line printed."""
        text = progress(data)
        if text != self._last:
            self._last = text
            print(plain(f"{time.strftime('%H:%M:%S')}  {data.name or data.id}: {text}"), flush=True)


def progress(data: Job) -> str:
    """Return state, nodes and reason of a job in one line."""
    text = state_word(data.state, data.preemptions, data.attempt)
    if data.state in (State.STARTING, State.RUNNING):
        text += f", attempt {data.attempt}{_nodes(data)}"
    if data.state is State.CHECKPOINTING and data.notice:
        text += f": {preempted_for(data)}"
    elif data.state is State.PENDING and data.reason:
        text += f": {data.reason.message}"
    elif data.state.ended:
        text += f" after {duration(since(data.submitted_at, data.ended_at))}" if data.ended_at else ""
        text += f": {data.message}" if data.message else ""
    return text


def preempted_for(data: Job) -> str:
    """Return for which team a terminating job makes way, and until when it may save."""
    notice = data.notice
    if notice is None:
        return ""
    until = f"it may save until {clock(notice.deadline)}"
    if notice.preempt_test:
        return f"for your test of preemption; {until}"
    name = data.title(notice.by_team)
    team = f"{name} ({notice.by_owner})" if name and notice.by_owner else name
    return f"{f'for {team}' if team else notice.reason}; {until}"


def read_log(id: str, attempt: int | None = None, tail: int | None = None) -> str:
    """Return the log of one attempt (default: the newest), or its last `tail` lines."""
    _check_attempt(id, attempt)
    chunk = _chunk(id, attempt, -CHUNK if tail is not None else 0)
    text = chunk.text
    while chunk.text and tail is None:
        chunk = _chunk(id, chunk.attempt, chunk.next_offset)
        text += chunk.text
    return text if tail is None else _last_lines(text, tail)


def print_log(id: str, attempt: int | None = None, tail: int | None = None) -> None:
    """Print a job's log as it grows, attempt after attempt, until the job (or the one attempt) has ended."""
    _check_attempt(id, attempt)
    with leaving_alone(id, "following"):
        data = _job(id, 0.0, None, None)
        number = attempt or data.attempt
        if number == 0:
            data = _until_started(data)
            number = data.attempt
        offset = -CHUNK if tail is not None else 0
        while number:
            _print_attempt(id, number, offset, tail)
            data = _job(id, 0.0, None, None)
            if attempt or (data := _until_after(data, number)).attempt <= number:
                break
            _print_mark(f"attempt {number} {_outcome(data, number)}; attempt {data.attempt} continues")
            number, offset, tail = data.attempt, 0, None
        if not attempt:
            message = f" ({data.message})" if data.message else ""
            _print_mark(f"job {id} {state_word(data.state)}{message}")


def _check_attempt(id: str, attempt: int | None) -> None:
    if attempt is not None and attempt > (made := _job(id, 0.0, None, None).attempt):
        raise Refused(f"job {id} has no attempt {attempt}; it was started {count(made, 'time')}.")


def _print_attempt(id: str, number: int, offset: int, tail: int | None) -> None:
    while True:
        chunk = _chunk(id, number, offset, wait=POLL)
        text = chunk.text if tail is None else _last_lines(chunk.text, tail)
        if text:
            print(text, end="", flush=True)
        offset, tail = chunk.next_offset, None
        if chunk.eof:
            return


def _last_lines(text: str, tail: int) -> str:
    return "".join(text.splitlines(keepends=True)[-tail:] if tail else [])


def _until_started(data: Job) -> Job:
    reporter = Reporter()
    for newer in changes(data.id):
        if newer.attempt or newer.state.ended:
            return newer
        reporter.report(newer)
    return data


def _until_after(data: Job, number: int) -> Job:
    """Return the job as soon as it has ended or a later attempt has started."""
    reporter = Reporter()
    for newer in changes(data.id):
        if newer.state.ended or newer.attempt > number:
            return newer
        if newer.state is State.PENDING:
            reporter.report(newer)
    return data


def _outcome(data: Job, number: int) -> str:
    attempt = next((a for a in data.attempts if a.number == number), None)
    if attempt is None or attempt.outcome is None:
        return "ended"
    return {"preempted": "made way", "moved": "moved to other GPUs", "lost": "was lost"}.get(
        attempt.outcome, attempt.outcome
    ) + _saved(attempt)


def _saved(attempt: Attempt) -> str:
    if attempt.checkpoint is None or attempt.checkpoint.step is None:
        return ", no checkpoint" if attempt.outcome == "preempted" else ""
    return f", saved at step {attempt.checkpoint.step}"


def _print_mark(text: str) -> None:
    print(f"── {text}", file=sys.stdout, flush=True)


def _nodes(data: Job) -> str:
    nodes = listed(dict.fromkeys(grant.node for grant in data.placement))
    return f" on {nodes}" if nodes else ""


def _chunk(id: str, attempt: int | None, offset: int, wait: float | None = None) -> LogChunk:
    def request() -> LogChunk:
        chunk: LogChunk = client().logs(id, attempt=attempt, offset=offset, limit=CHUNK, wait=wait)
        return chunk

    return _retrying(request, None)


def _job(id: str, wait: float, version: int | None, deadline: float | None) -> Job:
    def request() -> Job:
        data: Job = client().job(id, wait=wait or None, version=version)
        return data

    return _retrying(request, deadline)


def _retrying(request: Callable[[], T], deadline: float | None) -> T:
    """Return the service's answer, retried with growing, random pauses while it is unreachable.

    Random, so that a thousand kernels do not return at once to a service that restarts. Other errors, and an
    unreachable service after PATIENCE seconds or at the `deadline` (monotonic), are raised as Refused.
    """
    retrying = Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, MakewayError) and error.code == "unreachable"),
        wait=wait_random_exponential(multiplier=FIRST_PAUSE, max=LONGEST_PAUSE),
        stop=lambda state: (state.seconds_since_start or 0.0) > PATIENCE or _too_late(state, deadline),
        before_sleep=_warn_once,
        reraise=True,
    )
    try:
        return retrying(request)
    except MakewayError as error:
        raise explain(error) from None


def _too_late(state: RetryCallState, deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() + state.upcoming_sleep >= deadline


def _warn_once(state: RetryCallState) -> None:
    if state.attempt_number == 1:
        print("The quota service does not answer; retrying. The job is not affected.", file=sys.stderr)
