"""Keep how far each job is: one row a job, which its newest report replaces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, insert, select, update

from .. import rows
from ..database.database import Database
from ..statements import MAX_KEYS, BulkStatement
from ..tables import progress, workloads

P = progress.c
LAG = 60.0
"""Seconds: a report that is older than the stored one by less came late, by another replica, and is ignored; by more,
the clock of its process was set back"""
REPLACE = BulkStatement(update(progress).where(P.workload == bindparam("one")))


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """How far a job is: `report` as its process gave it, `at` when that changed, in Unix seconds."""

    workload: str
    attempt: int
    at: float
    reached: int | None
    report: Mapping[str, Any]


class ProgressRows:
    """The progress of jobs, until they are removed. Each part of a write is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, ids: Sequence[str]) -> dict[str, ProgressRow]:
        """Return the progress of these jobs by id; those that reported none are left out."""
        result: dict[str, ProgressRow] = {}
        clean = [rows.clean(id) for id in dict.fromkeys(ids)]
        with self._database.read() as connection:
            for begin in range(0, len(clean), MAX_KEYS):
                query = select(progress).where(P.workload.in_(clean[begin : begin + MAX_KEYS]))
                result |= {row.workload: _read(row) for row in connection.execute(query)}
        return result

    def write(self, reports: Mapping[str, tuple[int, Mapping[str, Any]]], at: float) -> None:
        """Replace the progress of jobs by id with (attempt, report); one of an attempt before the newest is dropped."""
        given = sorted(reports.items())
        for begin in range(0, len(given), MAX_KEYS):
            part = dict(given[begin : begin + MAX_KEYS])
            with self._database.write(quiet=True) as connection:
                known = {
                    row.workload: _read(row)
                    for row in connection.execute(select(progress).where(P.workload.in_(list(part))))
                }
                new = [id for id in part if id not in known]
                there = set(connection.execute(select(workloads.c.id).where(workloads.c.id.in_(new))).scalars())
                changed, added = [], []
                for id, (attempt, report) in part.items():
                    before = known.get(id)
                    if before is None:
                        if id in there:
                            added.append(_values(ProgressRow(id, attempt, at, None, report)))
                    elif (row := _after(before, attempt, report, at)) is not None:
                        changed.append({"one": id, **_values(row)})
                if added:
                    connection.execute(insert(progress), added)
                REPLACE.run(connection, changed)


def _after(before: ProgressRow, attempt: int, report: Mapping[str, Any], at: float) -> ProgressRow | None:
    """Return the row that follows another one; None where nothing changed, or the report is of an earlier attempt."""
    if report.get("save_seconds") is None:  # until its first save, an attempt is expected to save as the one before
        kept = {key: before.report[key] for key in ("save_seconds", "save_killed") if key in before.report}
        report = {**report, **kept}
    if attempt < before.attempt or (attempt == before.attempt and _is_known(before.report, report)):
        return None
    reached = before.reached
    if attempt > before.attempt:
        reached = max(filter(None, (before.reached, _step(before.report))), default=None)
    step = _step(report)
    if reached is not None and (step is None or step >= reached or report.get("stage") != before.report.get("stage")):
        reached = None
    return ProgressRow(before.workload, attempt, at, reached, report)


def _is_known(before: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether a report tells nothing new: it is the same, or came later than one that its process made after it."""
    at, newest = report.get("at"), before.get("at")
    if isinstance(at, int | float) and isinstance(newest, int | float) and 0 < newest - at < LAG:
        return True
    return dict(report) == dict(before)


def _step(report: Mapping[str, Any]) -> int | None:
    """Return the step of a report as it is stored, which may be damaged."""
    step = report.get("step")
    return step if isinstance(step, int) else None


def _read(row: Any) -> ProgressRow:
    try:
        report = json.loads(row.progress)
    except (ValueError, RecursionError):
        report = {}
    return ProgressRow(row.workload, row.attempt, row.at, row.reached, report if isinstance(report, dict) else {})


def _values(row: ProgressRow) -> dict[str, Any]:
    return {
        "workload": row.workload,
        "attempt": row.attempt,
        "at": row.at,
        "reached": row.reached,
        "progress": rows.to_json(row.report),
    }
