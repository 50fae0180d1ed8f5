"""Remember the teams whose newest job could not keep checkpoints, for those who are about to submit another one.

Kept by `World` from commit to commit, read by dry runs and submissions. A job of the team that runs ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...store.records import Workload
from ...values import CHECKPOINT_STORAGE

PASSES = 86_400.0
"""Seconds after which a failure says nothing any more: no job of the team was tried since"""
STARTED = ("running", "succeeded")
"""States of a job whose folder of checkpoints took a file"""


class CheckpointFailures:
    """The newest failure of each team. Thread-safe: a commit replaces or removes one entry."""

    def __init__(self) -> None:
        self._by_team: dict[str, tuple[str, float]] = {}
        """the sentence about its job, and when that was tried last, in Unix seconds"""

    def committed(self, rows: Sequence[Workload]) -> None:
        """Take the jobs that were committed, or read at the start."""
        for row in rows:
            if row.kind != "job" or row.team is None:
                continue
            if row.reason_code == CHECKPOINT_STORAGE:
                self._by_team[row.team] = row.reason_message, row.not_before or 0.0
            elif row.state in STARTED:
                self._by_team.pop(row.team, None)

    def of(self, team: str, now: float) -> str:
        """Return the sentence about the newest job of a team, if that could keep no checkpoints; "" if not."""
        message, at = self._by_team.get(team, ("", 0.0))
        return message if now < at + PASSES else ""
