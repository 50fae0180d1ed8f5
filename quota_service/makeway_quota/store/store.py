"""Read and write the service's records: each public method is exactly one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from ..artifacts.base import Artifacts
from ..artifacts.folder import ArtifactFolder
from ..values import File
from . import pages, reads, rows, submission_keys, writes
from .accounts import Accounts
from .database.database import Database, parse
from .database.postgres_check import check_server
from .database.reserve import Reserve
from .database.space import allow_give_back, free_bytes, keep_room_inside
from .errors import StoreError
from .machines.documents import Deployments
from .machines.log import MachineLog
from .machines.machines import StoredMachines
from .machines.pruning import MachinePruning
from .machines.reports import MachineReports
from .migrate import upgrade
from .people import KnownPeople
from .policy_versions import PolicyVersions
from .records import (
    Attempt,
    ByteLimits,
    Cap,
    Change,
    Decision,
    Event,
    NewDecision,
    NewWorkload,
    PastRun,
    SharedFiles,
    Submission,
    SubmissionKey,
    Workload,
)
from .replicas import replicas
from .replicas.known_rows import KnownRows
from .replicas.leader_lock import LeaderLock, leader_lock
from .replicas.replicas import Followed, Notifications
from .reports.progress import ProgressRows
from .reports.worker_reports import WorkerReports
from .storage.contents import MIN_ARTIFACT_BYTES, Contents
from .storage.growth import Growth
from .storage.job_sizes import JobSizes
from .storage.outputs import Outputs
from .storage.pruning import Pruning
from .storage.sealed_secrets import SealedSecrets


def open_store(
    url: str, artifacts: Artifacts | None = None, min_artifact_bytes: int = MIN_ARTIFACT_BYTES, *, durable: bool = False
) -> Store:
    """Open the database at `url` and bring its tables up to date; raise StoreError where that cannot be done.

    Files of `min_artifact_bytes` or more are in `artifacts`; without it: a folder beside an SQLite file, or PostgreSQL.
    `durable`: every commit survives a power cut, not only those that a person is told of.
    """
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite":  # on a full disk not even the log of the database can be made
        Reserve(Path(parsed.database or "").parent).before_write()
    else:
        check_server(parsed)
    upgrade(parsed)
    allow_give_back(parsed)
    if artifacts is None and parsed.get_backend_name() == "sqlite":
        artifacts = ArtifactFolder(Path(parsed.database or "").with_name("artifacts"))
    database = Database(parsed, durable=durable)
    try:
        return Store(database, Contents(database, artifacts, min_artifact_bytes).set_up())
    except BaseException:
        database.close()
        raise


class Store:
    """The service's records. Blocking and thread-safe: call it through `asyncio.to_thread`.

    Errors: StoreError when the database cannot be used, Conflict when another request was faster, LeadershipLost when
    another service leads, ValueError for arguments that no caller should give.
    """

    def __init__(self, database: Database, contents: Contents) -> None:
        self._database = database
        self.contents = contents
        self._notifications = Notifications(database)
        self.pruning = Pruning(database)
        self.policies = PolicyVersions(database)
        self.people = KnownPeople(database)
        self.worker_reports = WorkerReports(database)
        self.outputs = Outputs(database, contents)
        self.progress = ProgressRows(database)
        self.accounts = Accounts(database)
        self.job_sizes = JobSizes(database)
        self.growth = Growth(database)
        self.deployments = Deployments(database)
        self.secrets = SealedSecrets(database)
        self.machines = StoredMachines(database)
        self.machine_log = MachineLog(database)
        self.machine_reports = MachineReports(database)
        self.machine_pruning = MachinePruning(database)
        self._known = KnownRows()
        self.damaged: dict[str, Sequence[str]] = {}
        """the fields of live rows that could not be read the last time, by id"""
        database.on_commit(self._known.add)

    def close(self) -> None:
        """Close the connections to the database."""
        self._notifications.close()
        self._database.close()

    def identity(self) -> str:
        """Return what tells this database from all others, and from its copies; it is the same for all replicas."""
        return self._database.identity()

    def on_commit(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every commit that wrote something; return how to end that.

        It is called in the thread that wrote, by one thread at a time, and must not write itself.
        """
        return self._database.on_commit(lambda _: callback(), last=True)

    def on_change(self, callback: Callable[[Sequence[Workload]], None], last: bool = False) -> Callable[[], None]:
        """Call `callback` after every commit with the workloads that it changed, as `active` would return them then.

        Commits of this process and those that `follow` reads come in the order of each row's versions; a commit that
        changes no workload is left out. `last`: after all other callbacks, to wake readers. As `on_commit` otherwise.
        """
        return self._database.on_commit(lambda changed: callback(changed) if changed else None, last=last)

    # -- workloads

    def add_workload(
        self,
        new: NewWorkload,
        files: Sequence[tuple[str, bytes, bool]] = (),
        decision: NewDecision | None = None,
        cap: Cap | None = None,
        key: SubmissionKey | None = None,
        *,
        now: float,
    ) -> Workload:
        """Add a submission, or return what its key submitted before; KeyReused and Removed by its key.

        Conflict if its id is taken or its owner's server has a live session, TooMany by a cap.
        """
        [answer] = self.add_workloads([(new, files, decision, cap, key)], now=now)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def add_workloads(
        self, submissions: Sequence[Submission | tuple[Any, ...]], *, now: float
    ) -> list[Workload | ValueError | StoreError]:
        """Add many submissions in one transaction; one that is refused does not hinder the others.

        They are a microsecond apart, so that their order stays. Each is a Submission or a tuple of its fields. One
        whose key has submitted a workload before is answered with that workload, as it is now.
        """
        answers: list[Workload | ValueError | StoreError] = []
        able: dict[int, writes.Checked] = {}
        for at, given in enumerate(submissions):
            new, files, decision, cap, key, kept = Submission(*given)
            try:
                first = rows.initial_record(new, now + at / 1e6)
                if isinstance(files, SharedFiles):
                    able[at] = writes.Checked(first, {}, decision, cap, files.workload, key, kept=kept)
                else:
                    contents = writes.digests(files)
                    outside = self.contents.placed(contents)
                    able[at] = writes.Checked(first, contents, decision, cap, key=key, outside=outside, kept=kept)
                answers.append(first)
            except (ValueError, StoreError) as error:
                answers.append(error)
        if not able:
            return answers
        changed: list[Workload] = []
        with self._database.write(changed, durable=True) as connection:
            earlier = writes.add_workloads(connection, list(able.values()), now)
            for (at, submission), answer in zip(able.items(), earlier, strict=True):
                if answer is None:
                    changed.append(rows.without_large_fields(submission.workload))
                else:
                    answers[at] = answer
            added = {workload.id for workload in changed}
            decided = [s.decision for s in able.values() if s.decision is not None and s.workload.id in added]
            writes.log(connection, changed, decided, now)
        return answers

    def submitted(self, keys: Sequence[SubmissionKey]) -> list[Workload] | None:
        """Return what requests with these keys submitted, None if one is new; KeyReused, Removed as `add_workload`."""
        with self._database.read() as connection:
            return submission_keys.earlier(connection, keys)

    def workload(self, id: str) -> Workload | None:
        """Return one workload with its command, environment and source, or None."""
        with self._database.read() as connection:
            return reads.workload(connection, id)

    def whole_workloads(self, ids: Sequence[str]) -> dict[str, Workload]:
        """Return these workloads by id with command and environment; ids that do not exist are missing."""
        with self._database.read() as connection:
            return reads.whole_workloads(connection, ids)

    def names(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the names of workloads by id, ended ones too; those without a name are missing."""
        with self._database.read() as connection:
            return reads.names(connection, ids)

    def active(self) -> list[Workload]:
        """Return all live workloads, first submitted first, without command, environment and source."""
        self.damaged = {}
        with self._database.read() as connection:
            result = reads.active(connection, self.damaged)
        self._known.add_read(result)
        return result

    def read_again(self, ids: Sequence[str]) -> dict[str, Sequence[str]]:
        """Read rows again that were damaged, and call the listeners with them; return those that still are."""
        damaged: dict[str, Sequence[str]] = {}

        def read(connection: Connection) -> list[Workload]:
            read_rows = pages.by_id(connection, ids, damaged)
            return [row for row in read_rows.values() if row.id not in damaged]

        self._database.follow(read)
        return damaged

    def workloads(
        self,
        kind: str | None = None,
        owner: str | None = None,
        teams: Sequence[str] | None = None,
        states: Sequence[str] | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> tuple[list[Workload], str | None]:
        """Return one page, newest submission first, without what is large, and the cursor of the next page."""
        with self._database.read() as connection:
            return pages.workload_page(connection, kind, owner, teams, states, limit, cursor)

    def files(self, id: str) -> tuple[File, ...]:
        """Return the files of a submission, by path; FileUnreadable (gone or damaged) and FilesUnavailable name one."""
        return self.contents.files(id)

    def attempts(self, id: str) -> list[Attempt]:
        """Return the attempts of a workload, first one first."""
        with self._database.read() as connection:
            return reads.attempts_of(connection, id)

    def with_attempts(self, id: str) -> tuple[Workload, list[Attempt]] | None:
        """Return a workload with its command, environment, source and attempts as they are at one moment, or None."""
        with self._database.read() as connection:
            workload = reads.workload(connection, id)
            return None if workload is None else (workload, reads.attempts_of(connection, id))

    def commit(
        self, changes: Sequence[Change], decisions: Sequence[NewDecision] = (), *, now: float, term: int | None = None
    ) -> frozenset[str]:
        """Apply changes and log decisions; return the ids whose change was applied.

        A change whose expectation fails is skipped, and so is one that opens an attempt on a machine of a deployment
        that is not ready any more, with the decisions about the same workload; all others commit together. At most one
        change for each workload. A field that does not exist is a ValueError. Without a `term` it is a person's
        request, whose answer has to survive a power cut.
        """
        committed: list[Workload] = []
        with self._database.write(committed, durable=term is None) as connection:
            if term is not None:
                writes.require_term(connection, term)
            changed = writes.change(connection, changes, self._known.live, now)
            applied = frozenset(workload.id for workload in changed)
            skipped = {change.workload for change in changes} - applied
            writes.log(connection, changed, [d for d in decisions if d.workload not in skipped], now)
            committed += changed
        return applied

    def move(
        self,
        change: Change,
        decisions: Sequence[NewDecision],
        env: Mapping[str, str] | None = None,
        kept: ByteLimits | None = None,
        *,
        now: float,
    ) -> Workload | None:
        """Apply a change that moves a job to another queue; return the job, None where the expectation fails.

        `env` replaces its environment. What is kept of the job is counted for its new team: StorageLimitExceeded where
        that exceeds what may be kept for the team, or for the owner in it.
        """
        changed: list[Workload] = []
        with self._database.write(changed, durable=True) as connection:
            moved = writes.move(connection, change, env, kept, self._known.live, now)
            if moved is not None:
                writes.log(connection, [moved], decisions, now)
                changed.append(moved)
        return moved

    # -- decisions and events

    def decisions(
        self,
        workload: str | None = None,
        teams: Sequence[str] | None = None,
        limit: int = 100,
        before: int | None = None,
        owner: str | None = None,
    ) -> list[Decision]:
        """Return decisions, newest first; `before` is the last id of the page before.

        With `owner`, decisions about the owner's workloads count too, in any team or none.
        """
        with self._database.read() as connection:
            return pages.decision_page(connection, workload, teams, owner, limit, before)

    def events(self, after: int, limit: int = 500) -> list[Event]:
        """Return the events after event `after`, oldest first."""
        with self._database.read() as connection:
            return reads.events_after(connection, after, limit)

    def last_event_id(self) -> int:
        """Return the newest event's id, 0 before the first."""
        with self._database.read() as connection:
            return reads.event_range(connection)[1]

    def oldest_event_id(self) -> int:
        """Return the id of the oldest event that is kept: a reader behind its id − 1 has to read everything again."""
        with self._database.read() as connection:
            return reads.event_range(connection)[0]

    def add_event(self, kind: str, team: str | None, owner: str | None, data: Mapping[str, Any], now: float) -> Event:
        """Add one message to the live stream."""
        with self._database.write() as connection:
            id = writes.add_event(connection, kind, team, owner, data, now)
        return Event(id, now, kind, team, owner, None, data)

    def past_runs(self, limit: int = 20_000) -> list[PastRun]:
        """Return how long the last `limit` jobs that are over ran, first submitted first (for forecasts)."""
        with self._database.read() as connection:
            return reads.past_runs(connection, limit)

    def histories(self) -> tuple[dict[str, float], float]:
        """Return the decayed over-quota use of every policy (milli-GPUs), and when it was written (0: never)."""
        with self._database.read() as connection:
            return reads.histories(connection)

    def keep_histories(self, milli: Mapping[str, float], *, now: float, term: int | None = None) -> None:
        """Replace the decayed over-quota use of every policy."""
        with self._database.write() as connection:
            if term is not None:
                writes.require_term(connection, term)
            writes.keep_histories(connection, milli, now)

    # -- replicas

    def leader_lock(self, deadline: float) -> LeaderLock:
        """Return the lock that only one replica holds; a holder that is silent for `deadline` seconds loses it."""
        return leader_lock(self._database, deadline)

    def take_term(self, holder: str, now: float) -> int:
        """Begin the next term: older ones can no longer commit. Call it with the leader's lock held."""
        with self._database.write() as connection:
            return writes.take_term(connection, holder, now)

    @property
    def shared(self) -> bool:
        """Whether other replicas may write to this database."""
        return not self._database.sqlite

    def wait_for_commit(self, timeout: float) -> bool:
        """Wait until another replica has committed; False when time is up, or where that cannot be known."""
        return self._notifications.wait(timeout)

    def follow(self, after: int) -> Followed:
        """Read what changed after event `after`, and call the listeners with what this process does not know yet."""
        result = Followed(after)

        def read(connection: Connection) -> list[Workload] | None:
            nonlocal result
            result = replicas.changed_after(connection, after, self._known)
            return result.rows if result.last > after else None

        self._database.follow(read)
        return result

    def renew_leases(self, ids: Collection[str], until: float) -> None:
        """Write that these sessions were renewed; neither their version nor their state changes."""
        with self._database.write() as connection:
            replicas.renew_leases(connection, ids, until)

    def lease_times(self) -> dict[str, float | None]:
        """Return when the lease of each live session ends, as it was last written."""
        with self._database.read() as connection:
            return replicas.lease_times(connection)

    @property
    def folders(self) -> list[Path]:
        """The folders of this machine that data is in: of the database, and of large files."""
        own = [] if self.shared else [Path(self._database.url.database or "").parent]
        return own + self.contents.folders

    def fill_reserve(self) -> None:
        """Take room on the disk for small writes again where there is enough."""
        if self._database.reserve is not None and self._database.reserve.fill():
            keep_room_inside(self._database)

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
        self.contents.probe()
        self._database.probe(older_than)
