"""Read a recorded trace from a table: when each job arrived, for which team, with how many GPUs, for how long."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..engine.snapshot import GPU

REQUIRED = ("submit_s", "team", "num_gpu", "duration_s")
OPTIONAL = ("id", "owner", "profile")


class TraceInvalid(ValueError):
    """The trace cannot be read; the message names the file, the line and what was expected."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One job: milli-GPUs in all, submitted at `submit` seconds, with `duration` seconds of work.

    `until`: it leaves at this moment whether it ran or not (observed demand, not work to be done); `duration` does not
    count then. `profile` empty: the one for its number of GPUs. `time_limit`: the most seconds that it runs, as is
    known before; at least `duration`.
    """

    id: str
    team: str
    gpus: int
    submit: float
    duration: float
    owner: str = ""
    profile: str = ""
    until: float | None = None
    time_limit: float | None = None


def read_trace(file: Path) -> list[Arrival]:
    """Read a CSV table (.gz too): submit_s, team, num_gpu, duration_s, and optionally id, owner, profile."""
    try:
        with gzip.open(file, "rt", newline="") if file.suffix == ".gz" else file.open(newline="") as text:
            reader = csv.DictReader(text)
            _check_header(file, reader.fieldnames or ())
            result = [_arrival(file, line, row) for line, row in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise TraceInvalid(f"{file}: cannot be read: {error}") from None
    if not result:
        raise TraceInvalid(f"{file}: no jobs below the header line")
    if len({arrival.id for arrival in result}) < len(result):
        raise TraceInvalid(f"{file}: the column id names a job twice")
    return sorted(result, key=lambda a: (a.submit, a.id))


def _check_header(file: Path, names: Iterable[str]) -> None:
    missing = [name for name in REQUIRED if name not in set(names)]
    if missing:
        raise TraceInvalid(f"{file}:1: the header line lacks {', '.join(missing)}; it needs {', '.join(REQUIRED)}")


def _arrival(file: Path, line: int, row: Mapping[str, str | None]) -> Arrival:
    numbers = []
    for name in ("submit_s", "num_gpu", "duration_s"):
        try:
            value = float(row[name] or "")
        except ValueError:
            raise TraceInvalid(f"{file}:{line}: {name} must be a number, not {row[name]!r}") from None
        if not 0 <= value < 1e12 or (name == "num_gpu" and not value):
            raise TraceInvalid(f"{file}:{line}: {name} must be {'above' if name == 'num_gpu' else 'at least'} 0")
        numbers.append(value)
    submit, gpus, duration = numbers
    team = (row["team"] or "").strip()
    if not team:
        raise TraceInvalid(f"{file}:{line}: team is empty")
    id = (row.get("id") or f"j{line - 1:07}").strip()
    return Arrival(
        id,
        team,
        round(gpus * GPU),
        submit,
        duration,
        (row.get("owner") or team).strip(),
        (row.get("profile") or "").strip(),
    )
