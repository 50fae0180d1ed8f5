"""Every read and write of the service's memory: each public method is exactly one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import pages, reads, rows, writes
from .database import Database, parse
from .errors import Conflict, TooMany
from .migrate import upgrade
from .pruning import Pruning
from .records import (
    Attempt,
    Cap,
    Change,
    Decision,
    Event,
    File,
    FilesOf,
    NewDecision,
    NewWorkload,
    PastRun,
    PolicyVersion,
    Submission,
    Workload,
)
from .space import allow_give_back, free_bytes


def open_store(url: str) -> Store:
    """Open the database at `url` and bring its tables up to date; raise StoreError where that cannot be done."""
    parsed = parse(url)
    upgrade(parsed)
    allow_give_back(parsed)
    return Store(Database(parsed))


class Store:
    """The service's memory. Blocking and thread-safe: call it through `asyncio.to_thread`.

    Errors: StoreError when the database cannot be used, Conflict when somebody was faster, Deposed when another
    service leads, ValueError for arguments that no caller should give.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.pruning = Pruning(database)
        self._known: dict[str, Workload] = {}

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def on_commit(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every commit that wrote something; the answer ends that.

        It is called in the thread that wrote, by one thread at a time, and must not write itself.
        """
        return self._database.on_commit(lambda _: callback())

    def on_change(self, callback: Callable[[Sequence[Workload]], None]) -> Callable[[], None]:
        """Call `callback` after every commit with the workloads that it changed, as `active` would show them then.

        Commits are told in their order. As `on_commit` otherwise.
        """
        return self._database.on_commit(callback)

    # -- workloads

    def add_workload(
        self,
        new: NewWorkload,
        files: Sequence[tuple[str, bytes, bool]] = (),
        decision: NewDecision | None = None,
        cap: Cap | None = None,
        *,
        now: float,
    ) -> Workload:
        """Add a submission; Conflict if its id is taken or its owner's server has a live session, TooMany by a cap."""
        [answer] = self.add_workloads([(new, files, decision, cap)], now=now)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def add_workloads(
        self,
        submissions: Sequence[Submission | tuple[Any, ...]],
        *,
        now: float,
    ) -> list[Workload | ValueError | Conflict | TooMany]:
        """Add many submissions in one transaction; one that is refused does not hinder the others.

        They are a microsecond apart, so that their order stays. Each is a Submission or a tuple of its fields.
        """
        answers: list[Workload | ValueError | Conflict | TooMany] = []
        able: dict[int, writes.Checked] = {}
        for at, given in enumerate(submissions):
            new, files, decision, cap = Submission(*given)
            try:
                first = rows.submitted(new, now + at / 1e6)
                if isinstance(files, FilesOf):
                    able[at] = writes.Checked(first, {}, decision, cap, files.workload)
                else:
                    able[at] = writes.Checked(first, writes.digests(files), decision, cap)
                answers.append(first)
            except ValueError as error:
                answers.append(error)
        if not able:
            return answers
        changed: list[Workload] = []
        with self._database.write(changed) as connection:
            refusals = writes.add_workloads(connection, list(able.values()))
            for (at, submission), refusal in zip(able.items(), refusals, strict=True):
                if refusal is None:
                    changed.append(submission.workload._replace(source=""))
                else:
                    answers[at] = refusal
            added = {workload.id for workload in changed}
            writes.tell_workloads(connection, changed, now)
            said = [s.decision for s in able.values() if s.decision is not None and s.workload.id in added]
            writes.decide(connection, said, now)
        self._know(changed)
        return answers

    def workload(self, id: str) -> Workload | None:
        """Read one workload with its source."""
        with self._database.read() as connection:
            return reads.workload(connection, id)

    def active(self) -> list[Workload]:
        """Read all that have not ended, first submitted first, without `source`."""
        with self._database.read() as connection:
            return reads.active(connection)

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
        with self._database.read() as connection:
            return pages.workload_page(connection, kind, owner, teams, states, limit, cursor)

    def files(self, id: str) -> tuple[File, ...]:
        """Read the files that came with a submission, by path."""
        with self._database.read() as connection:
            return reads.files_of(connection, id)

    def attempts(self, id: str) -> list[Attempt]:
        """Read the runs of a workload, first one first."""
        with self._database.read() as connection:
            return reads.attempts_of(connection, id)

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
        told: list[Workload] = []
        with self._database.write(told) as connection:
            if term is not None:
                writes.lead(connection, term)
            changed = writes.change(connection, changes, self._known)
            applied = frozenset(workload.id for workload in changed)
            skipped = {change.workload for change in changes} - applied
            writes.tell_workloads(connection, changed, now)
            writes.decide(connection, [d for d in decisions if d.workload not in skipped], now)
            told += changed
        self._know(changed)
        return applied

    def _know(self, changed: Sequence[Workload]) -> None:
        """Remember live rows, so that the next change of one need not read it; its version tells if it is still so."""
        for workload in changed:
            if workload.live:
                self._known[workload.id] = workload
            else:
                self._known.pop(workload.id, None)

    # -- decisions and events

    def decisions(
        self,
        workload: str | None = None,
        teams: Sequence[str] | None = None,
        limit: int = 100,
        before: int | None = None,
        owner: str | None = None,
    ) -> list[Decision]:
        """Read the decision log, newest first; `before` is the last id of the page before.

        With `owner`, decisions about what is theirs count too, in whatever team or in none.
        """
        with self._database.read() as connection:
            return pages.decision_page(connection, workload, teams, owner, limit, before)

    def events(self, after: int, limit: int = 500) -> list[Event]:
        """Read what happened after event `after`, oldest first."""
        with self._database.read() as connection:
            return reads.events_after(connection, after, limit)

    def last_event_id(self) -> int:
        """Tell the newest event's id, 0 before the first."""
        with self._database.read() as connection:
            return reads.event_range(connection)[1]

    def oldest_event_id(self) -> int:
        """Tell the oldest event that is still kept: who saw less than its id − 1 has to read everything anew."""
        with self._database.read() as connection:
            return reads.event_range(connection)[0]

    def add_event(self, kind: str, team: str | None, owner: str | None, data: Mapping[str, Any], now: float) -> Event:
        """Add one message to the live stream."""
        with self._database.write() as connection:
            id = writes.add_event(connection, kind, team, owner, data, now)
        return Event(id, now, kind, team, owner, None, data)

    def past_runs(self, limit: int = 20_000) -> list[PastRun]:
        """Tell how long the jobs ran that are over, first submitted first; the last `limit` of them (for forecasts)."""
        with self._database.read() as connection:
            return reads.past_runs(connection, limit)

    def histories(self) -> tuple[dict[str, float], float]:
        """Read every policy's decayed over-quota use (milli-GPUs), and when it was written (0: never)."""
        with self._database.read() as connection:
            return reads.histories(connection)

    def keep_histories(self, milli: Mapping[str, float], *, now: float, term: int | None = None) -> None:
        """Write every policy's decayed over-quota use in place of what was known."""
        with self._database.write() as connection:
            if term is not None:
                writes.lead(connection, term)
            writes.keep_histories(connection, milli, now)

    # -- policy

    def policy_current(self) -> PolicyVersion | None:
        """Read the version in force."""
        with self._database.read() as connection:
            return reads.policy(connection, None)

    def policy_version(self, n: int) -> PolicyVersion | None:
        """Read one version."""
        with self._database.read() as connection:
            return reads.policy(connection, n)

    def policy_history(self, limit: int = 100) -> list[PolicyVersion]:
        """Read the versions, newest first."""
        with self._database.read() as connection:
            return reads.policy_history(connection, limit)

    def add_policy(self, document: str, author: str, comment: str, base: int | None, now: float) -> PolicyVersion:
        """Put a new version in force; Conflict unless `base` is the current one (0: none yet, None: whichever)."""
        with self._database.write() as connection:
            added = writes.add_policy(connection, PolicyVersion(0, now, author, comment, document), base)
            told = {"version": added.version, "author": author, "comment": comment}
            writes.add_event(connection, "policy", None, author, told, now)
        return added

    # -- keeping house

    def take_term(self, holder: str, now: float) -> int:
        """Begin to lead: the newest term wins, all older ones can no longer commit."""
        with self._database.write() as connection:
            return writes.take_term(connection, holder, now)

    def size(self) -> int:
        """Return the bytes that the database takes on disk."""
        return self._database.size()

    def free_bytes(self) -> int:
        """Return the bytes of an SQLite file that new rows can use before it grows (0 on PostgreSQL)."""
        return free_bytes(self._database)

    def failure(self) -> str | None:
        """Return what is wrong with the last write (None: nothing); it waits for no lock and no database."""
        return self._database.failure()

    def probe(self, older_than: float = 10.0) -> None:
        """Begin and end an empty write, unless one succeeded in the last `older_than` seconds, for `failure`."""
        self._database.probe(older_than)
