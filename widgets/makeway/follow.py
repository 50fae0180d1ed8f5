"""Follow a job: its changes as they happen, its log as it grows; interrupting never disturbs the job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from makeway_api.durations import duration
from makeway_api.errors import MakewayError
from makeway_api.models import Attempt, Job, LogChunk, State
from makeway_api.quantities import count, listed, size
from makeway_api.tables import plain
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from .connection import client, explain
from .pacing import Output
from .problems import Refused, WatchStopped
from .words import clock, since, state_word, typed

T = TypeVar("T")

POLL_SECONDS = 20.0
"""Seconds of one long poll."""
RETRY_SECONDS = 300.0
"""Seconds without an answer after which waiting gives up; the service may restart meanwhile."""
FIRST_PAUSE = 0.5
MAX_PAUSE = 10.0
CHUNK = 262_144
"""Bytes of a log that are read at once, and printed of a longer one."""
NUMBERS_INTERVAL = 60.0
"""Seconds after which a state is printed again of which only numbers have changed."""


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
        remaining = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
        if remaining <= 0:
            return
        newer = _job(id, remaining, data.version, deadline)
        if newer.version != data.version:
            data = newer
            yield data


class Reporter:
    """Prints what happens to a job: each state and each new reason at once, numbers that change once a minute."""

    def __init__(self, output: Output | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output or Output()
        self._clock = clock
        self._state: tuple[State, int] | None = None
        self._reported: dict[str, tuple[float, str]] = {}
        """When each reason was printed in this state, and how"""

    def report(self, data: Job) -> None:
        """Print the state, unless that would only repeat what was printed."""
        text, code, now = progress(data), data.reason.code if data.reason else "", self._clock()
        if (data.state, data.attempt) != self._state:
            self._state, self._reported = (data.state, data.attempt), {}
        at, before = self._reported.get(code, (None, ""))
        if text == before or (at is not None and now - at < NUMBERS_INTERVAL):
            return
        self._reported[code] = now, text
        self._output.line(plain(f"{clock(datetime.now(UTC))}  {data.name or data.id}: {text}"))


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
    if tail is not None:
        return _newest_part(id, attempt, tail).text
    chunk = _chunk(id, attempt, 0)
    parts = [chunk.text]
    while chunk.text:
        chunk = _chunk(id, chunk.attempt, chunk.next_offset)
        parts.append(chunk.text)
    return "".join(parts)


def print_newest(id: str, attempt: int | None = None, tail: int | None = None, all: bool = False) -> None:
    """Print what a job's log has so far: its newest part, its last `tail` lines, or `all`."""
    _check_attempt(id, attempt)
    output = Output()
    with leaving_alone(id, "printing its log"):
        if all and tail is None:
            offset, chunk = 0, None
            while chunk is None or chunk.text:
                chunk = _chunk(id, attempt if chunk is None else chunk.attempt, offset)
                _write(output, chunk)
                offset = chunk.next_offset
            printed = offset > 0
        else:
            part = _newest_part(id, attempt, tail)
            if tail is None:
                _mark_omitted(output, id, part)
            output.write(part.text)
            printed = bool(part.text)
        if not printed:
            output.write("The log is empty so far.\n")
        output.end_line()


def print_log(id: str, attempt: int | None = None, tail: int | None = None, all: bool = False) -> None:
    """Print a job's log as it grows, attempt after attempt, until the job (or the one attempt) has ended.

    What is there already is printed from its newest part on, from its last `tail` lines on, or `all` of it.
    """
    _check_attempt(id, attempt)
    output = Output()
    with leaving_alone(id, "following"):
        data = _job(id, 0.0, None, None)
        number = attempt or data.attempt
        if number == 0:
            data = _wait_for_first_attempt(data, output)
            number = data.attempt
        offset = 0
        if number and (tail is not None or not all):
            part = _newest_part(id, number, tail)
            if tail is None:
                _mark_omitted(output, id, part)
            output.write(part.text)
            offset = part.end
        while number:
            _print_attempt(id, number, offset, output)
            data = _job(id, 0.0, None, None)
            if attempt or (data := _wait_for_next_attempt(data, number, output)).attempt <= number:
                break
            output.mark(f"attempt {number} {_outcome(data, number)}; attempt {data.attempt} continues")
            number, offset = data.attempt, 0
        if not attempt:
            message = f" ({data.message})" if data.message else ""
            output.mark(f"job {id} {state_word(data.state)}{message}")


def _check_attempt(id: str, attempt: int | None) -> None:
    if attempt is not None and attempt > (newest := _job(id, 0.0, None, None).attempt):
        raise Refused(f"job {id} has no attempt {attempt}; it was started {count(newest, 'time')}.")


def _print_attempt(id: str, number: int, offset: int, output: Output) -> None:
    while True:
        chunk = _chunk(id, number, offset, wait=POLL_SECONDS)
        _write(output, chunk)
        offset = chunk.next_offset
        if chunk.eof:
            return


def _write(output: Output, chunk: LogChunk) -> None:
    if chunk.truncated:
        output.mark("a part of the log was not kept")
    if chunk.text:
        output.write(chunk.text)


@dataclass(frozen=True)
class _Part:
    """The newest part of a log: its text, and in bytes where it ends and what is before it."""

    text: str
    end: int
    omitted: int


def _newest_part(id: str, attempt: int | None, lines: int | None) -> _Part:
    """Return the last lines of a log, whole ones however long they are; without a number the newest CHUNK bytes."""
    chunk = _chunk(id, attempt, -CHUNK)
    start, end, texts = chunk.offset, chunk.next_offset, [chunk.text]
    if lines is None:
        omitted, text = start, chunk.text
        first, newline, rest = text.partition("\n")
        if start and newline and rest:  # begin with a whole line
            omitted, text = start + len(f"{first}\n".encode()), rest
        return _Part(text, end, omitted)
    newlines = chunk.text.removesuffix("\n").count("\n")
    while start > 0 and newlines < lines:
        begin = max(0, start - CHUNK)
        between, offset = [], begin
        while offset < start:
            chunk = _chunk(id, chunk.attempt, offset, limit=start - offset)
            if not chunk.text:
                break
            between.append(chunk.text)
            offset = chunk.next_offset
        texts.insert(0, "".join(between))
        start, newlines = begin, newlines + texts[0].count("\n")
    text = "".join(texts)
    kept = _last_lines(text, lines)
    return _Part(kept, end, start + len(text[: len(text) - len(kept)].encode()))


def _mark_omitted(output: Output, id: str, part: _Part) -> None:
    if part.omitted:
        output.mark(
            f"{size(part.omitted)} before this are left out: `%logs {id} --all` prints everything, "
            f'makeway.job("{id}").logs() returns it as text'
        )


def _last_lines(text: str, lines: int) -> str:
    """Return the last lines of a text; only a newline ends one, as in a file."""
    at = len(text) - text.endswith("\n")
    for _ in range(lines):
        at = text.rfind("\n", 0, at)
        if at < 0:
            return text
    return text[at + 1 :]


def _wait_for_first_attempt(data: Job, output: Output) -> Job:
    reporter = Reporter(output)
    for newer in changes(data.id):
        if newer.attempt or newer.state.ended:
            return newer
        reporter.report(newer)
    return data


def _wait_for_next_attempt(data: Job, number: int, output: Output) -> Job:
    """Return the job as soon as it has ended or a later attempt has started."""
    reporter = Reporter(output)
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


def _nodes(data: Job) -> str:
    nodes = listed(dict.fromkeys(worker.node for worker in data.placement))
    return f" on {nodes}" if nodes else ""


def _chunk(id: str, attempt: int | None, offset: int, wait: float | None = None, limit: int = CHUNK) -> LogChunk:
    def request() -> LogChunk:
        chunk: LogChunk = client().logs(id, attempt=attempt, offset=offset, limit=limit, wait=wait)
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
    unreachable service after RETRY_SECONDS seconds or at the `deadline` (monotonic), are raised as Refused.
    """
    retrying = Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, MakewayError) and error.code == "unreachable"),
        wait=wait_random_exponential(multiplier=FIRST_PAUSE, max=MAX_PAUSE),
        stop=lambda state: (state.seconds_since_start or 0.0) > RETRY_SECONDS or _is_past(state, deadline),
        before_sleep=_warn_once,
        reraise=True,
    )
    try:
        return retrying(request)
    except MakewayError as error:
        raise explain(error) from None


def _is_past(state: RetryCallState, deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() + state.upcoming_sleep >= deadline


def _warn_once(state: RetryCallState) -> None:
    if state.attempt_number == 1:
        print("The quota service does not answer; retrying. The job is not affected.", file=sys.stderr)
