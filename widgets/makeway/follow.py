"""Watching a job: its changes as they happen, its log as it grows; leaving never disturbs the job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from makeway_api.errors import MakewayError
from makeway_api.models import Attempt, Job, LogChunk, State

from .connection import client, explain
from .problems import Left, Refused
from .words import clock, count, duration, listed, plain, since, state_word

T = TypeVar("T")

POLL = 20.0
"""Seconds of one long poll."""
PATIENCE = 300.0
"""Seconds without an answer after which waiting gives up; the service may restart meanwhile."""
FIRST_PAUSE = 0.5
CHUNK = 262_144


@contextmanager
def leaving_alone(id: str, doing: str) -> Iterator[None]:
    """Turn Ctrl-C (or the stop button) into a sentence: the job goes on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Left(
            f"Stopped {doing}. Job {id} goes on; "
            f"`%job {id}` shows it, `%logs -f {id}` follows it, `%cancel {id}` ends it."
        ) from None


def changes(id: str, deadline: float | None = None) -> Iterator[Job]:
    """The job now and after each change, until it has ended or `deadline` (monotonic) is there."""
    data = _patiently(id, 0.0, None, deadline)
    yield data
    while not data.state.ended:
        left = POLL if deadline is None else min(POLL, deadline - time.monotonic())
        if left <= 0:
            return
        newer = _patiently(id, left, data.version, deadline)
        if newer.version != data.version:
            data = newer
            yield data


class Teller:
    """Prints where a job is, each thing once."""

    def __init__(self) -> None:
        self._said = ""

    def tell(self, data: Job) -> None:
        """Print the state, unless that was the last thing printed."""
        text = where_it_is(data)
        if text != self._said:
            self._said = text
            print(plain(f"{time.strftime('%H:%M:%S')}  {data.name or data.id}: {text}"), flush=True)


def where_it_is(data: Job) -> str:
    """State, place and reason in one line."""
    text = state_word(data.state, data.preemptions, data.attempt)
    if data.state in (State.STARTING, State.RUNNING):
        text += f", attempt {data.attempt}{_where(data)}"
    if data.state is State.CHECKPOINTING and data.notice:
        text += f": {why_leaving(data)}"
    elif data.state is State.PENDING and data.reason:
        text += f": {data.reason.message}"
    elif data.state.ended:
        text += f" after {duration(since(data.submitted_at, data.ended_at))}" if data.ended_at else ""
        text += f": {data.message}" if data.message else ""
    return text


def why_leaving(data: Job) -> str:
    """For whom a noticed job makes way, and until when it may save."""
    notice = data.notice
    if notice is None:
        return ""
    if notice.rehearsal:
        return f"a rehearsal of yours; it may save until {clock(notice.deadline)}"
    who = f"{notice.by_team} ({notice.by_owner})" if notice.by_team and notice.by_owner else notice.by_team
    return f"{f'for {who}' if who else notice.reason}; it may save until {clock(notice.deadline)}"


def read_log(id: str, attempt: int | None = None, tail: int | None = None) -> str:
    """The log of one attempt (default: the newest), or its last `tail` lines."""
    _check_attempt(id, attempt)
    chunk = _chunk(id, attempt, -CHUNK if tail is not None else 0)
    text = chunk.text
    while chunk.text and tail is None:
        chunk = _chunk(id, chunk.attempt, chunk.next_offset)
        text += chunk.text
    return text if tail is None else "".join(text.splitlines(keepends=True)[-tail:] if tail else [])


def print_log(id: str, attempt: int | None = None, tail: int | None = None) -> None:
    """Print a job's log as it grows, attempt after attempt, until the job (or the one attempt) has ended."""
    _check_attempt(id, attempt)
    with leaving_alone(id, "following"):
        data = _patiently(id, 0.0, None, None)
        number = attempt or data.attempt
        if number == 0:
            data = _until_started(data)
            number = data.attempt
        offset = -CHUNK if tail is not None else 0
        while number:
            _print_attempt(id, number, offset, tail)
            data = _patiently(id, 0.0, None, None)
            if attempt or (data := _until_after(data, number)).attempt <= number:
                break
            _say(f"attempt {number} {_outcome(data, number)}; attempt {data.attempt} goes on")
            number, offset, tail = data.attempt, 0, None
        if not attempt:
            tell = f" ({data.message})" if data.message else ""
            _say(f"job {id} {state_word(data.state)}{tell}")


def _check_attempt(id: str, attempt: int | None) -> None:
    if attempt is not None and attempt > (made := _patiently(id, 0.0, None, None).attempt):
        raise Refused(f"job {id} has no attempt {attempt}; it was started {count(made, 'time')}.")


def _print_attempt(id: str, number: int, offset: int, tail: int | None) -> None:
    while True:
        chunk = _chunk(id, number, offset, wait=POLL)
        text = chunk.text if tail is None else "".join(chunk.text.splitlines(keepends=True)[-tail:] if tail else [])
        if text:
            print(text, end="", flush=True)
        offset, tail = chunk.next_offset, None
        if chunk.eof:
            return


def _until_started(data: Job) -> Job:
    teller = Teller()
    for newer in changes(data.id):
        if newer.attempt or newer.state.ended:
            return newer
        teller.tell(newer)
    return data


def _until_after(data: Job, number: int) -> Job:
    """The job as soon as it has ended or a later attempt has begun."""
    teller = Teller()
    for newer in changes(data.id):
        if newer.state.ended or newer.attempt > number:
            return newer
        if newer.state is State.PENDING:
            teller.tell(newer)
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


def _say(text: str) -> None:
    print(f"── {text}", file=sys.stdout, flush=True)


def _where(data: Job) -> str:
    nodes = listed(dict.fromkeys(grant.node for grant in data.placement))
    return f" on {nodes}" if nodes else ""


def _chunk(id: str, attempt: int | None, offset: int, wait: float | None = None) -> LogChunk:
    def ask() -> LogChunk:
        chunk: LogChunk = client().logs(id, attempt=attempt, offset=offset, limit=CHUNK, wait=wait)
        return chunk

    return _retrying(ask, None)


def _patiently(id: str, wait: float, version: int | None, deadline: float | None) -> Job:
    def ask() -> Job:
        data: Job = client().job(id, wait=wait or None, version=version)
        return data

    return _retrying(ask, deadline)


def _retrying(call: Callable[[], T], deadline: float | None) -> T:
    """Ask again while the service is away, with growing pauses; other errors are said at once."""
    begun, pause = time.monotonic(), FIRST_PAUSE
    while True:
        try:
            return call()
        except MakewayError as error:
            gone = time.monotonic() - begun
            late = deadline is not None and time.monotonic() + pause >= deadline
            if error.code != "unreachable" or gone > PATIENCE or late:
                raise explain(error) from None
            if pause == FIRST_PAUSE:
                print("The quota service does not answer; still trying. The job is not affected.", file=sys.stderr)
            time.sleep(pause)
            pause = min(pause * 2, 10.0)
