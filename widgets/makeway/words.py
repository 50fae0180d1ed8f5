"""Numbers, times, lists and tables in plain words: the same in text, HTML and on the command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from makeway_api.models import State

from .problems import Refused

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def number(value: float) -> str:
    """2 for 2.0, 0.5 for half."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def gpus(value: float) -> str:
    """'1 GPU', '2 GPUs', '0.5 GPU'."""
    return f"{number(value)} GPU{'' if 0 < value <= 1 else 's'}"


def count(n: int, noun: str) -> str:
    """'1 job', '2 jobs'."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """'0.4 s', '8 s', '4 min', '2 h 5 min', '3 d 4 h'."""
    if 0.05 <= seconds < 0.95:
        return f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole < 600 and whole % 60 else "")
    if whole < 86400:
        return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")
    return f"{whole // 86400} d" + (f" {whole % 86400 // 3600} h" if whole % 86400 // 3600 else "")


def seconds(text: str) -> int:
    """Read '90', '90s', '30m', '2h', '1h30m' or '1d'."""
    parts = re.fullmatch(r"(?:\d+[smhd])+|\d+", text.strip().lower().replace(" ", ""))
    if not parts:
        raise Refused(f"{text!r} is not a time; write it like 90s, 30m, 2h, 1h30m or 1d.")
    if parts.group().isdigit():
        total = int(parts.group())
    else:
        total = sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)([smhd])", parts.group()))
    if total == 0:
        raise Refused("a time limit of 0 would end the job before it starts; leave it out for no limit.")
    return total


def since(moment: datetime | None, now: datetime | None = None) -> float:
    """Seconds from `moment` until `now`."""
    if moment is None:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - moment).total_seconds()


def clock(moment: datetime) -> str:
    """The local time of day."""
    return moment.astimezone().strftime("%H:%M:%S")


def size(n: float) -> str:
    """'12 bytes', '3.4 kB', '50 MB'."""
    if n < 1000:
        return f"{int(n)} bytes"
    for unit in ("kB", "MB", "GB"):
        n /= 1000
        if n < 999.5 or unit == "GB":
            return f"{n:.1f} {unit}" if n < 9.95 else f"{n:.0f} {unit}"
    raise AssertionError


def listed(names: Iterable[str], joint: str = "and", most: int = 8) -> str:
    """'a, b and c'; a long list ends in '… and 4 more'."""
    items = list(names)
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} more"]
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {joint} {items[-1]}"


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """' Did you mean gpu2?', or nothing."""
    known = {name.lower(): name for name in names}
    close = difflib.get_close_matches(wrong.lower(), list(known), n=1, cutoff=0.6)
    return f" Did you mean {known[close[0]]}?" if close else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Columns in plain text; those in `right` are aligned to the right."""
    lines = [list(head), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def state_word(state: State, preemptions: int = 0, attempt: int = 0) -> str:
    """A state for people: a pending job that was preempted is 'waiting again'."""
    if state is State.PENDING:
        return "waiting again" if preemptions or attempt > 1 else "waiting"
    if state is State.CHECKPOINTING:
        return "making way"
    return str(state.value)


def plain(cell: str) -> str:
    """On one line and without control characters: safe for a terminal."""
    return "".join(c if c.isprintable() else " " for c in cell)
