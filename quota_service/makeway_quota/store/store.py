"""Every read and write of the service's memory: each public method is exactly one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .records import (
    Attempt,
    Change,
    Decision,
    Event,
    File,
    NewDecision,
    NewWorkload,
    PolicyVersion,
    Pruned,
    Workload,
)

DAY = 86_400.0


def open_store(url: str) -> Store:
    """Open the database at `url` and bring its tables up to date; raise StoreError where that cannot be done."""
    raise NotImplementedError(url)


class Store:
    """The service's memory. Blocking and thread-safe: call it through `asyncio.to_thread`.

    Errors: StoreError when the database cannot be used, Conflict when somebody was faster, Deposed when another
    service leads, ValueError for arguments that no caller should give.
    """

    def close(self) -> None:
        """Let go of the database."""
        raise NotImplementedError

    def on_commit(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every commit that wrote something, in the writing thread; returns how to stop that."""
        raise NotImplementedError

    # -- workloads

    def add_workload(
        self,
        new: NewWorkload,
        files: Sequence[tuple[str, bytes, bool]] = (),
        decision: NewDecision | None = None,
        *,
        now: float,
    ) -> Workload:
        """Remember a submission; Conflict if its id is taken or its owner's server has a live session."""
        raise NotImplementedError

    def workload(self, id: str) -> Workload | None:
        """Read one workload with its source."""
        raise NotImplementedError

    def active(self) -> list[Workload]:
        """Read all that have not ended, first submitted first, without `source`."""
        raise NotImplementedError

    def workloads(
        self,
        kind: str | None = None,
        owner: str | None = None,
        teams: Sequence[str] | None = None,
        states: Sequence[str] | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> tuple[list[Workload], str | None]:
        """Read one page, newest submission first, without `source`; the second value is the next page's cursor."""
        raise NotImplementedError

    def files(self, id: str) -> tuple[File, ...]:
        """Read the files that came with a submission, by path."""
        raise NotImplementedError

    def attempts(self, id: str) -> list[Attempt]:
        """Read the runs of a workload, first one first."""
        raise NotImplementedError

    def commit(
        self,
        changes: Sequence[Change],
        decisions: Sequence[NewDecision] = (),
        *,
        now: float,
        term: int | None = None,
    ) -> frozenset[str]:
        """Apply changes and log decisions; answer the ids whose change was applied.

        A change whose expectation fails is skipped, and the decisions about the same workload with it; all others
        commit together. At most one change for each workload. A field that does not exist is a ValueError.
        """
        raise NotImplementedError

    # -- decisions and events

    def decisions(
        self,
        workload: str | None = None,
        teams: Sequence[str] | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> list[Decision]:
        """Read the decision log, newest first; `before` is the last id of the page before."""
        raise NotImplementedError

    def events(self, after: int, limit: int = 500) -> list[Event]:
        """Read what happened after event `after`, oldest first."""
        raise NotImplementedError

    def last_event_id(self) -> int:
        """Tell the newest event's id, 0 before the first."""
        raise NotImplementedError

    def oldest_event_id(self) -> int:
        """Tell the oldest event that is still kept: who saw less than its id − 1 has to read everything anew."""
        raise NotImplementedError

    def add_event(self, kind: str, team: str | None, owner: str | None, data: Mapping[str, Any], now: float) -> Event:
        """Add one message to the live stream."""
        raise NotImplementedError

    def durations(self, team: str | None, profile: str, owner: str | None = None, limit: int = 50) -> list[float]:
        """Tell how many seconds the last attempts that succeeded took, newest first (for forecasts)."""
        raise NotImplementedError

    # -- policy

    def policy_current(self) -> PolicyVersion | None:
        """Read the version in force."""
        raise NotImplementedError

    def policy_version(self, n: int) -> PolicyVersion | None:
        """Read one version."""
        raise NotImplementedError

    def policy_history(self, limit: int = 100) -> list[PolicyVersion]:
        """Read the versions, newest first."""
        raise NotImplementedError

    def add_policy(self, document: str, author: str, comment: str, base: int | None, now: float) -> PolicyVersion:
        """Put a new version in force; Conflict unless `base` is the current one (0: none yet, None: whichever)."""
        raise NotImplementedError

    # -- keeping house

    def take_term(self, holder: str, now: float) -> int:
        """Begin to lead: the newest term wins, all older ones can no longer commit."""
        raise NotImplementedError

    def prune(
        self,
        now: float,
        keep_events_seconds: float = 7 * DAY,
        keep_decisions_seconds: float = 365 * DAY,
        keep_workloads_seconds: float | None = None,
    ) -> Pruned:
        """Forget what is older, at most some thousands per call; workloads (None: keep all) by their end."""
        raise NotImplementedError

    def size(self) -> int:
        """Tell how many bytes the database takes."""
        raise NotImplementedError

    def healthy(self) -> bool:
        """Say whether a write could be made now."""
        raise NotImplementedError
