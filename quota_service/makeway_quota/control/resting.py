"""Return jobs to the queue that their backend has no room for at the moment, and let them rest before the next try.

Used by `Actuator`, which is refused, and by `EngineView`: the engine does not see a job that rests, so that its GPUs go
to others, and the reason that it is shown with stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from makeway_api.durations import duration

from ..store.records import Change, NewDecision, Workload
from ..wording import outcomes
from .change_set import decide

CODE = "no_room"
FIRST, LONGEST = 60.0, 900.0
"""Seconds between two tries, which double from the first to the longest: others may have to make way for each."""


class Rests:
    """Counts in a row how often each job was refused; another process begins anew."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}

    def started(self, id: str) -> None:
        """Forget the refusals of a job that was started."""
        self.refused.pop(id, None)

    def committed(self, rows: Sequence[Workload]) -> None:
        """Forget the refusals of jobs that are over; called by the thread that wrote."""
        for row in rows if self.refused else ():
            if not row.live:
                self.refused.pop(row.id, None)

    def requeue(self, row: Workload, job: str, cause: str, now: float) -> tuple[Change, NewDecision]:
        """Return the change by which a job returns to the queue and rests, and the decision about it.

        The try is no attempt: there may be 96 of them a day.
        """
        times = self.refused[row.id] = self.refused.get(row.id, 0) + 1
        rest = min(LONGEST, FIRST * 2.0 ** min(times - 1, 10))
        message = outcomes.rests(job, cause, duration(rest))
        fields: dict[str, object] = {
            "state": "pending",
            "placement": (),
            "nomination": (),
            "reason_code": CODE,
            "reason_message": message,
            "reason_numbers": {},
            "not_before": now + rest,
            "over_quota": False,
            "borrowed_from": (),
        }
        # Not where it was cancelled meanwhile: only a job that is admitted is ended by that request.
        change = Change(row.id, fields, row.version, expect_states=("starting",), drop_attempt=True)
        return change, decide(row, "requeue", CODE, message, attempt=row.attempt)


def rests_until(row: Workload, now: float) -> float | None:
    """Return until when a job rests, in Unix seconds; None if it does not (any more)."""
    if row.state != "pending" or row.reason_code != CODE or row.not_before is None:
        return None
    return row.not_before if now < row.not_before <= now + LONGEST else None
