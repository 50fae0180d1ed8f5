"""Delay jobs whose start was refused or of which nothing ran.

Used by `Actuator` (the backend has no room), `reconcile` (nothing of the attempt ran) and `EngineView`, which hides
jobs in backoff from the engine, so that their GPUs go to others and the reason that is shown stays. It also shows the
engine which nodes a job avoids for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from makeway_api.durations import duration

from ..store.records import Change, NewDecision, Workload
from ..wording import outcomes
from .change_set import decide

NO_ROOM = "no_room"
"""The reason code of a job for which its backend has no room, as in a quota of its namespace"""
START_DEFERRED = "start_deferred"
"""The reason code of a job that did not start on its GPUs for another reason, as its pod could not run"""
FIRST, LONGEST = 60.0, 900.0
"""Seconds between two tries, which double from the first to the longest: others may have to make way for each."""
FIRST_AVOIDED, AVOIDED = 120.0, 1800.0
"""Seconds for which a job avoids a node that did not start it, its delay included, which double from the first to the
longest: a device that is not free yet is there a moment later, and others need not make way elsewhere."""

Refusals = tuple[tuple[str, float], ...]
"""Nodes that a job avoids, each until a time in Unix seconds."""


class StartBackoff:
    """Counts in a row how often each job was refused, and remembers by which nodes; another process begins anew."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        self._refusals: dict[str, Refusals] = {}

    def committed(self, rows: Sequence[Workload]) -> None:
        """Forget the refusals of jobs that run or are over; called by the thread that wrote."""
        for row in rows if self.refused or self._refusals else ():
            if not row.live or row.state == "running":
                self.refused.pop(row.id, None)
                self._refusals.pop(row.id, None)

    def avoid(self, id: str, nodes: Iterable[str], now: float) -> None:
        """Remember the nodes that a job avoids from now on, instead of those that it avoided before."""
        before = dict(self.avoided(id, now))
        until = now + min(AVOIDED, FIRST_AVOIDED * 2.0 ** min(self.refused.get(id, 0), 10))
        self._refusals[id] = tuple((node, before.get(node, until)) for node in sorted(nodes))

    def avoided(self, id: str, now: float) -> Refusals:
        """Return the nodes that a job avoids at the moment."""
        return tuple((node, until) for node, until in self._refusals.get(id, ()) if now < until)

    def requeue(self, row: Workload, job: str, cause: str, now: float, code: str) -> tuple[Change, NewDecision]:
        """Return the change by which a job returns to the queue, with a delay, and the decision about it.

        `code` is NO_ROOM or START_DEFERRED. The try is no attempt: there may be 96 of them a day.
        """
        times = self.refused[row.id] = self.refused.get(row.id, 0) + 1
        delay = min(LONGEST, FIRST * 2.0 ** min(times - 1, 10))
        message = outcomes.start_delayed(job, cause, duration(delay))
        fields: dict[str, object] = {
            "state": "pending",
            "placement": (),
            "nomination": (),
            "reason_code": code,
            "reason_message": message,
            "reason_numbers": {},
            "not_before": now + delay,
            "over_quota": False,
            "borrowed_from": (),
        }
        # Not where it was cancelled meanwhile: only a job that is admitted is ended by that request.
        change = Change(row.id, fields, row.version, expect_states=("starting",), drop_attempt=True)
        return change, decide(row, "requeue", code, message, attempt=row.attempt)


def backoff_until(row: Workload, now: float) -> float | None:
    """Return until when a job is in backoff, in Unix seconds; None if it is not (any more)."""
    if row.state != "pending" or row.reason_code not in (NO_ROOM, START_DEFERRED) or row.not_before is None:
        return None
    return row.not_before if now < row.not_before <= now + LONGEST else None
