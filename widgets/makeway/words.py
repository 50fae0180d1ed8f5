"""Write times and states in plain words: the same in text, HTML and on the command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from makeway_api.durations import parse_duration
from makeway_api.models import State

from .problems import Refused

_MAGIC = re.compile(r"%(jobs?|logs|cancel|move|quota|delete)\b")
_shell = False


def seconds(text: str) -> int:
    """Return the seconds of a time limit such as `90s`, `30m` or `1h30m`; Refused if it is none, or 0."""
    try:
        total = parse_duration(text)
    except ValueError as error:
        raise Refused(str(error)) from None
    if total == 0:
        raise Refused("a time limit of 0 would end the job before it starts; leave it out for no limit.")
    return total


def since(moment: datetime | None, now: datetime | None = None) -> float:
    """Return the seconds from `moment` until `now` (default: the present); 0 without a moment."""
    if moment is None:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - moment).total_seconds()


def clock(moment: datetime) -> str:
    """Return the local time of day with its zone, because the reader's may be another one: `14:20:05 UTC`."""
    local = _local(moment)
    return f"{local:%H:%M:%S} {_zone(local)}"


def day_clock(moment: datetime) -> str:
    """Return the local day and time of day, which stays true however long it is shown: `25 Nov 14:20 UTC`."""
    local = _local(moment)
    return f"{local:%d %b %H:%M} {_zone(local)}"


def full_clock(moment: datetime) -> str:
    """Return a moment as it reads in a notebook saved a year ago: `2026-11-25 14:20:05 UTC`."""
    local = _local(moment)
    return f"{local:%Y-%m-%d %H:%M:%S} {_zone(local)}"


def _local(moment: datetime) -> datetime:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone()


def _zone(local: datetime) -> str:
    """Return the name of a zone, or its distance from UTC where it has none: `CET`, `UTC+03`."""
    name = local.tzname() or ""
    return f"UTC{name}" if name[:1] in "+-" else name


@contextmanager
def speaking_shell() -> Iterator[None]:
    """Use the shell's commands instead of magics in every message: around a run of `makeway`."""
    global _shell
    before, _shell = _shell, True
    try:
        yield
    finally:
        _shell = before


def typed(text: str, id: str = "") -> str:
    """Return a message with its commands as people type them here: `%job`, or in a shell `makeway job` with the id."""
    if not _shell:
        return text
    text = text.replace("`%%train` at the top of a cell submits one", "`makeway submit train.py` submits one")
    return _MAGIC.sub(lambda result: f"makeway {result[1]}", text.replace("`%job`", f"`%job {id}`"))


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return ` Did you mean gpu2?`, or an empty string if no name is close."""
    known = {name.lower(): name for name in names}
    close = difflib.get_close_matches(wrong.lower(), list(known), n=1, cutoff=0.6)
    return f" Did you mean {known[close[0]]}?" if close else ""


def state_word(state: State, preemptions: int = 0, attempt: int = 0) -> str:
    """Return a state for users: `waiting again` for a pending job that was preempted."""
    if state is State.PENDING:
        return "waiting again" if preemptions or attempt > 1 else "waiting"
    if state is State.CHECKPOINTING:
        return "making way"
    return str(state.value)
