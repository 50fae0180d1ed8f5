"""Return jobs to the queue that their backend has no room for at the moment, and let them rest before the next try.

Used by `Actuator`, which is refused, and by `EngineView`: the engine does not see a job that rests, so that its GPUs go
to others, and the reason that it is shown with stays.
"""

from __future__ import annotations

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
        self._refused: dict[str, int] = {}

    def started(self, id: str) -> None:
        """Forget the refusals of a job that was started."""
        self._refused.pop(id, None)

    def requeue(self, row: Workload, job: str, cause: str, now: float) -> tuple[Change, NewDecision]:
        """Return the change by which a job returns to the queue and rests, and the decision about it."""
        times = self._refused[row.id] = self._refused.get(row.id, 0) + 1
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
        close = {"ended_at": now, "outcome": "lost", "message": cause}
        change = Change(row.id, fields, expect_states=("starting",), close_attempt=close)
        return change, decide(row, "requeue", CODE, message, attempt=row.attempt)


def rests_until(row: Workload, now: float) -> float | None:
    """Return until when a job rests, in Unix seconds; None if it does not (any more)."""
    if row.state != "pending" or row.reason_code != CODE or row.not_before is None:
        return None
    return row.not_before if now < row.not_before <= now + LONGEST else None
