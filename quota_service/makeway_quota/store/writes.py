"""Insert and update records; called by `store.py` within a transaction. Removals are in `pruning.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sqlalchemy import Connection, Text, bindparam, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from ..values import File
from . import accounts, reads, rows, submission_keys
from .errors import Conflict, KeyReused, LeadershipLost, Removed, StorageLimitExceeded, TooMany
from .records import ENDED, Attempt, ByteLimits, Cap, Change, NewDecision, PolicyVersion, SubmissionKey, Workload
from .statements import BulkStatement, KeyLookup
from .tables import attempts, blobs, decisions, events, files, histories, machines, policies, sources, terms, workloads

A = attempts.c
ADD_WORKLOADS = BulkStatement(insert(workloads))
ADD_ATTEMPTS = BulkStatement(insert(attempts))
ADD_DECISIONS = BulkStatement(insert(decisions))
ADD_EVENT = insert(events)
ADD_EVENTS = BulkStatement(ADD_EVENT)
SET_WORKLOADS = BulkStatement(update(workloads).where(workloads.c.id == bindparam("one")))
CLOSE_ATTEMPTS = BulkStatement(
    update(attempts).where(
        A.workload == bindparam("one"),
        A.number
        == select(func.max(A.number)).where(A.workload == bindparam("one"), A.ended_at.is_(None)).scalar_subquery(),
    )
)
DROP_ATTEMPT = delete(attempts).where(A.workload == bindparam("one"), A.ended_at.is_(None))
NUMBERS = KeyLookup(A.workload, A.workload, A.number)
MACHINE_STATES = KeyLookup(machines.c.id, machines.c.id, machines.c.state)
SHARE_FILES = insert(files).from_select(
    ["workload", "path", "executable", "blob"],
    select(bindparam("new", type_=Text), files.c.path, files.c.executable, files.c.blob).where(
        files.c.workload == bindparam("old")
    ),
)
DECISION_FIELDS = tuple(f.name for f in fields(NewDecision))
MAX_NAMED = 10
"""Workloads that the refusal of one too many brings along."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A submission whose values can be stored: its first row, and its files with the digests of their content."""

    workload: Workload
    blobs: Mapping[File, str]
    decision: NewDecision | None = None
    cap: Cap | None = None
    files_of: str | None = None
    """the workload that it shares its files with, instead of having `blobs`"""
    key: SubmissionKey | None = None
    outside: frozenset[str] = frozenset()
    """digests of the contents that are kept outside the database"""
    kept: ByteLimits | None = None


Refused = Conflict | TooMany | StorageLimitExceeded | KeyReused | Removed


def add_workloads(
    connection: Connection, submissions: Sequence[Checked], now: float
) -> list[Refused | Workload | None]:
    """Insert submissions with their sources, files and keys.

    Return for each None, or why it was refused, or the workload that an earlier request with its key submitted.
    """
    gate = _Gate(connection, submissions)
    answers = [gate.answer(submission) for submission in submissions]
    admitted = [s for s, answer in zip(submissions, answers, strict=True) if answer is None]
    _insert(connection, admitted, gate.sizes)
    submission_keys.add(connection, {s.workload.id: s.key for s in admitted if s.key is not None}, now)
    return answers


class _Gate:
    """Check submissions against the rows that are there and those admitted before them in the same transaction."""

    def __init__(self, connection: Connection, submissions: Sequence[Checked]) -> None:
        self._connection = connection
        self._taken = reads.ids_taken(connection, [s.workload.id for s in submissions])
        self._originals = reads.ids_taken(connection, list({s.files_of for s in submissions if s.files_of is not None}))
        self._keys = submission_keys.UsedKeys(connection, [s.key for s in submissions if s.key is not None])
        self._servers: dict[tuple[str, str], Workload] = {}
        self._counts: dict[tuple[str, Cap], int] = {}
        self._kept = accounts.KeptSums(connection)
        self._contents = accounts.NewContents(connection)
        self.sizes: dict[str, dict[str, int]] = {}
        """bytes that each job that was admitted adds, by kind"""

    def answer(self, submission: Checked) -> Refused | Workload | None:
        """Admit a submission (None), or return why it cannot be taken, or what its key submitted before."""
        new, key = submission.workload, submission.key
        if key is not None and (before := self._keys.repeated(key)) is not None:
            return before
        refused = self._refusal(submission)
        if refused is None and key is not None:
            self._keys.use(key, new)
        return refused

    def _refusal(self, submission: Checked) -> Conflict | TooMany | StorageLimitExceeded | None:
        new = submission.workload
        if new.id in self._taken:
            return _id_taken(self._connection, new)
        if submission.files_of is not None and submission.files_of not in self._originals:
            return Conflict(f"the workload {submission.files_of} is gone, so its files cannot be shared", None)
        if new.kind == "session" and new.live:
            there = self._servers.get((new.owner, new.server))
            there = there or reads.live_session(self._connection, new.owner, new.server)
            if there is not None:
                return Conflict(f"{new.owner}'s server {new.server!r} has a session already: {there.id}", there)
        if submission.cap is not None and (refused := self._beyond(new.owner, submission.cap)):
            return refused
        sizes = _sizes(self._contents, submission)
        if submission.kept is not None:
            much = self._kept.take(new.owner, new.team or "", sum(sizes.values()), submission.kept)
            if much is not None:
                return much
        self.sizes[new.id] = sizes
        self._taken.add(new.id)
        if new.kind == "session" and new.live:
            self._servers[new.owner, new.server] = new
        return None

    def _beyond(self, owner: str, cap: Cap) -> TooMany | None:
        """Return the refusal of one more workload under a cap, or count it."""
        if (owner, cap) not in self._counts:
            self._counts[owner, cap] = reads.count_capped(self._connection, owner, cap)
        if self._counts[owner, cap] >= cap.limit:
            existing = reads.capped(self._connection, owner, cap, MAX_NAMED)
            return TooMany(f"{owner} has {cap.limit} {cap.kind}s, and that is the most", existing, cap.limit)
        self._counts[owner, cap] += 1
        return None


def _id_taken(connection: Connection, new: Workload) -> Conflict:
    there = reads.workload(connection, new.id)
    kind = there.kind if there else new.kind
    return Conflict(f"there is a {kind} {new.id} already; give every submission its own id", there)


def _insert(connection: Connection, added: Sequence[Checked], sizes: Mapping[str, Mapping[str, int]]) -> None:
    if added:
        accounts.add(connection, _by_account(added, sizes))
        named = (*rows.WORKLOAD_FIELDS, "command", "env")
        values = [{name: getattr(s.workload, name) for name in named} for s in added]
        ADD_WORKLOADS.run(connection, [rows.encode(value) for value in values])
    given = [{"workload": s.workload.id, "source": s.workload.source} for s in added if s.workload.source]
    if given:
        connection.execute(insert(sources), given)
    for submission in added:
        if submission.files_of is not None:
            connection.execute(SHARE_FILES, {"new": submission.workload.id, "old": submission.files_of})
        if not submission.blobs:
            continue
        for file, digest in submission.blobs.items():
            add_blob(connection, digest, None if digest in submission.outside else file.data, len(file.data))
        described = [
            {"workload": submission.workload.id, "path": file.path, "executable": file.executable, "blob": digest}
            for file, digest in submission.blobs.items()
        ]
        connection.execute(insert(files), described)


def _sizes(new_contents: accounts.NewContents, submission: Checked) -> dict[str, int]:
    """Return the bytes of a job by kind; contents that a person has in that team already are not counted again.

    Of jobs that one transaction adds, each counts what is new to its owner, until the next recount.
    """
    new, team = submission.workload, submission.workload.team or ""
    if new.kind != "job":
        return {}
    size = sum(len(file.path) + accounts.PATH_BYTES for file in submission.blobs)
    if submission.files_of is not None:
        size = new_contents.of_copy(submission.files_of, new.owner, team)
    elif submission.blobs:
        contents = {digest: len(file.data) for file, digest in submission.blobs.items()}
        size += new_contents.of(contents, new.owner, team)
    return {"jobs": accounts.ROW_BYTES + new.weight, "files": size}


def _by_account(added: Sequence[Checked], sizes: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str, str], int]:
    """Return the bytes of submissions by owner, team and kind."""
    result: dict[tuple[str, str, str], int] = {}
    for new in (submission.workload for submission in added):
        for kind, size in sizes[new.id].items():
            if size:
                account = new.owner, new.team or "", kind
                result[account] = result.get(account, 0) + size
    return result


def add_blob(connection: Connection, digest: str, data: bytes | None, size: int) -> None:
    """Insert a content of `size` bytes unless it is there; None: it is outside the database."""
    write = postgres_insert if connection.dialect.name == "postgresql" else sqlite_insert
    content = {"digest": digest, "data": b"" if data is None else data, "outside": data is None, "size": size}
    connection.execute(write(blobs).on_conflict_do_nothing(), content)


def digests(given: Sequence[tuple[str, bytes, bool]]) -> dict[File, str]:
    """Return files with the digests of their content; ValueError for a path that is not storable or comes twice."""
    result: dict[File, str] = {}
    paths: set[str] = set()
    for path, data, executable in given:
        rows.refuse_unstorable(path, f"the file name {path!r}")
        if path in paths:
            raise ValueError(f"the file {path!r} comes twice; send it once")
        paths.add(path)
        result[File(path, data, executable)] = hashlib.sha256(data).hexdigest()
    return result


def require_term(connection: Connection, term: int) -> None:
    """Raise LeadershipLost unless `term` is the newest."""
    newest, holder = reads.newest_term(connection)
    if term != newest:
        raise LeadershipLost(term, newest, holder)


def change(
    connection: Connection, changes: Sequence[Change], known: Mapping[str, Workload], now: float
) -> list[Workload]:
    """Apply the changes whose expectation holds and return what these workloads are now.

    `known` saves reading: rows that were read or written before, used where their version is still the same.
    """
    ids = [c.workload for c in changes]
    if len(set(ids)) < len(ids):
        raise ValueError(f"two changes of {next(i for i in ids if ids.count(i) > 1)} in one commit; make them one")
    columns = {c.workload: rows.encode_change(c.fields, rows.CHANGEABLE, "a workload") for c in changes}
    closing = {
        c.workload: rows.encode_change(c.close_attempt, rows.ATTEMPT_CHANGEABLE, "an attempt")
        for c in changes
        if c.close_attempt
    }
    before = reads.current(connection, ids, known)
    numbers = _attempt_numbers(connection, [c.workload for c in changes if c.open_attempt])
    closed = _closed_machines(connection, changes)
    applied = [
        c
        for c in changes
        if c.workload in before and expected(c, before[c.workload], numbers) and not closed & _nodes(c.open_attempt)
    ]
    for c in applied:
        _keep_end(columns[c.workload], before[c.workload], now)
    changed = [after(before[c.workload], columns[c.workload]) for c in applied]
    _update(connection, SET_WORKLOADS, [{"one": w.id, **columns[w.id], "version": w.version} for w in changed])
    _update(connection, CLOSE_ATTEMPTS, [{"one": w.id, **closing[w.id]} for w in changed if w.id in closing])
    for c in applied:
        if c.drop_attempt:
            connection.execute(DROP_ATTEMPT, {"one": c.workload})
    opened = [c.open_attempt for c in applied if c.open_attempt is not None]
    ADD_ATTEMPTS.run(
        connection, [rows.encode({name: getattr(a, name) for name in rows.ATTEMPT_FIELDS}) for a in opened]
    )
    return changed


def move(
    connection: Connection,
    moved: Change,
    env: Mapping[str, str] | None,
    limits: ByteLimits | None,
    known: Mapping[str, Workload],
    now: float,
) -> Workload | None:
    """Apply a change of a job's queue, its environment and its account, as `Store.move`."""
    before = reads.workload(connection, moved.workload)
    done = change(connection, [moved], known, now)
    if not done or before is None:
        return None
    [row] = done
    if env is not None:
        row = row._replace(weight=rows.payload_bytes_of(before.command, env, before.source))
        SET_WORKLOADS.run(connection, [{"one": row.id, "weight": row.weight, **rows.encode({"env": env})}])
    if row.team != before.team:
        refused = accounts.move(connection, row.owner, row.team or "", limits or ByteLimits())
        if refused is not None:
            raise refused
    return row


def _update(connection: Connection, statement: BulkStatement, values: Iterable[dict[str, object]]) -> None:
    """Run an update for each of the values; those that set the same columns go together."""
    alike: dict[tuple[str, ...], list[dict[str, object]]] = {}
    for row in values:
        alike.setdefault(tuple(row), []).append(row)
    for group in alike.values():
        statement.run(connection, group)


def _keep_end(columns: dict[str, object], before: Workload, now: float) -> None:
    """Set `ended_at` where a change sets the state alone: it is null exactly while the workload is live."""
    if "state" in columns or "ended_at" in columns:
        ended = columns.get("state", before.state) in ENDED
        if ended != (columns.get("ended_at", before.ended_at) is not None):
            columns["ended_at"] = now if ended else None


def after(now: Workload, columns: Mapping[str, object]) -> Workload:
    """Return a workload with these columns set and the next version."""
    return rows.changed(now, rows.decode(columns))


def expected(change: Change, now: Workload, numbers: set[tuple[str, int]]) -> bool:
    """Whether the workload is still what the change was decided on."""
    if change.expect_version is not None and change.expect_version != now.version:
        return False
    if change.expect_states is not None and now.state not in change.expect_states:
        return False
    opened = change.open_attempt
    if opened is not None and opened.workload != change.workload:
        raise ValueError(f"an attempt of {opened.workload} cannot be opened with a change of {change.workload}")
    return opened is None or (opened.workload, opened.number) not in numbers


def _nodes(attempt: Attempt | None) -> set[str]:
    return set() if attempt is None else {place.node for place in attempt.placement}


def _closed_machines(connection: Connection, changes: Iterable[Change]) -> set[str]:
    """Return the machines on which attempts are opened, and that are not ready any more."""
    nodes = sorted(set().union(*(_nodes(change.open_attempt) for change in changes)))
    return {id for id, state in MACHINE_STATES.run(connection, nodes) if state != "ready"}


def _attempt_numbers(connection: Connection, ids: Sequence[str]) -> set[tuple[str, int]]:
    return {(workload, number) for workload, number in NUMBERS.run(connection, ids)}


def log(connection: Connection, changed: Iterable[Workload], made: Sequence[NewDecision], now: float) -> None:
    """Write decisions to their log, and an event for every changed workload and every decision."""
    events = [_event(w.kind, w.team, w.owner, w.id, rows.event_data(w), now) for w in changed]
    if made:
        facts = [
            {name: getattr(new, name) for name in DECISION_FIELDS} | {"message": rows.shorten_message(new.message)}
            for new in made
        ]
        ids = _decision_ids(connection, len(made))
        ADD_DECISIONS.run(connection, [_decision(id, fact, now) for id, fact in zip(ids, facts, strict=True)])
        events += [
            _event("decision", new.team, new.owner, new.workload, {"id": id, **fact}, now)
            for id, new, fact in zip(ids, made, facts, strict=True)
        ]
    ADD_EVENTS.run(connection, events)


def _decision_ids(connection: Connection, count: int) -> Sequence[int]:
    """Return the ids of the next decisions: cheaper than to read back what the database chose."""
    if connection.dialect.name == "sqlite":
        last = connection.exec_driver_sql("SELECT seq FROM sqlite_sequence WHERE name = 'decisions'").scalar() or 0
        return range(last + 1, last + 1 + count)
    query = "SELECT nextval(pg_get_serial_sequence('decisions', 'id')) FROM generate_series(1, %s)"
    return [int(id) for id in connection.exec_driver_sql(query, (count,)).scalars()]


def _decision(id: int, facts: Mapping[str, Any], now: float) -> dict[str, object]:
    values = {name: rows.clean(value) for name, value in facts.items()}
    return {"id": id, **values, "at": now, "numbers": rows.to_json(facts["numbers"])}


def add_event(
    connection: Connection, kind: str, team: str | None, owner: str | None, data: Mapping[str, Any], now: float
) -> int:
    """Write one event and return its id."""
    key = connection.execute(ADD_EVENT, _event(kind, team, owner, None, data, now)).inserted_primary_key
    return 0 if key is None else int(key[0])


def _event(
    kind: str, team: str | None, owner: str | None, workload: str | None, data: Mapping[str, Any], now: float
) -> dict[str, object]:
    return {
        "at": now,
        "kind": kind,
        "team": rows.clean(team),
        "owner": rows.clean(owner),
        "workload": rows.clean(workload),
        "data": rows.to_json(data),
    }


def add_policy(connection: Connection, new: PolicyVersion, base: int | None) -> PolicyVersion:
    """Insert the next version; Conflict unless `base` is the current one."""
    current = reads.policy(connection, None)
    number = 0 if current is None else current.version
    if base is not None and base != number:
        who = f", saved by {current.author}" if current else ""
        raise Conflict(f"version {base} was edited, but version {number} is in force{who}; look at it first", current)
    added = replace(new, version=number + 1)
    connection.execute(insert(policies), {name: rows.clean(value) for name, value in asdict(added).items()})
    return added


def keep_histories(connection: Connection, milli: Mapping[str, float], now: float) -> None:
    """Replace the decayed over-quota use of every policy."""
    connection.execute(delete(histories))
    if milli:
        values = [{"policy": rows.clean(policy), "milli": use, "at": now} for policy, use in milli.items()]
        connection.execute(insert(histories), values)


def take_term(connection: Connection, holder: str, now: float) -> int:
    """Insert the next term and return it."""
    newest, _ = reads.newest_term(connection)
    connection.execute(insert(terms), {"term": newest + 1, "holder": rows.clean(holder), "at": now})
    connection.execute(delete(terms).where(terms.c.term < newest - 100))
    return newest + 1
