"""What can be changed in the store: every INSERT, UPDATE and DELETE."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from . import reads, rows
from .errors import Conflict, Deposed
from .records import ENDED, Attempt, Change, File, NewDecision, PolicyVersion, Pruned, Workload
from .tables import attempts, blobs, decisions, events, files, policies, sources, terms, workloads

ADD_WORKLOAD = insert(workloads)
ADD_ATTEMPT = insert(attempts)
ADD_DECISION = insert(decisions)
ADD_EVENT = insert(events)
A = attempts.c
AT_ONCE = 10_000
"""How many rows of a table one `prune` removes at most, so that nobody waits long for it."""


def add_workload(connection: Connection, new: Workload, blob_of: Mapping[File, str]) -> None:
    """Insert a submission with its source and files; Conflict if its id or its server's place is taken."""
    taken = reads.workload(connection, new.id)
    if taken is not None:
        raise Conflict(f"there is a {taken.kind} {new.id} already; give every submission its own id", taken)
    if new.kind == "session" and new.live:
        taken = reads.live_session(connection, new.owner, new.server)
        if taken is not None:
            raise Conflict(f"{new.owner}'s server {new.server!r} has a session already: {taken.id}", taken)
    values = {name: getattr(new, name) for name in rows.WORKLOAD_FIELDS}
    connection.execute(ADD_WORKLOAD, rows.encode(values))
    if new.source:
        connection.execute(insert(sources), {"workload": new.id, "source": new.source})
    if blob_of:
        write = postgres_insert if connection.dialect.name == "postgresql" else sqlite_insert
        for file, digest in blob_of.items():
            connection.execute(write(blobs).on_conflict_do_nothing(), {"digest": digest, "data": file.data})
        described = [
            {"workload": new.id, "path": file.path, "executable": file.executable, "blob": digest}
            for file, digest in blob_of.items()
        ]
        connection.execute(insert(files), described)


def digests(given: Sequence[tuple[str, bytes, bool]]) -> dict[File, str]:
    """Name every file's content; ValueError for a path that cannot be stored or comes twice."""
    found: dict[File, str] = {}
    paths: set[str] = set()
    for path, data, executable in given:
        rows.refuse_unstorable(path, f"the file name {path!r}")
        if path in paths:
            raise ValueError(f"the file {path!r} comes twice; send it once")
        paths.add(path)
        found[File(path, data, executable)] = hashlib.sha256(data).hexdigest()
    return found


def lead(connection: Connection, term: int) -> None:
    """Raise Deposed unless `term` is the newest."""
    newest, holder = reads.newest_term(connection)
    if term != newest:
        raise Deposed(term, newest, holder)


def change(connection: Connection, changes: Sequence[Change]) -> list[Workload]:
    """Apply those whose expectation holds and answer what these workloads are now."""
    ids = [c.workload for c in changes]
    if len(set(ids)) < len(ids):
        raise ValueError(f"two changes of {next(i for i in ids if ids.count(i) > 1)} in one commit; make them one")
    columns = {c.workload: rows.encode_change(c.fields, rows.CHANGEABLE, "a workload") for c in changes}
    closing = {
        c.workload: rows.encode_change(c.close_attempt, rows.ATTEMPT_CHANGEABLE, "an attempt")
        for c in changes
        if c.close_attempt
    }
    before = reads.several(connection, ids)
    numbers = _attempt_numbers(connection, [c.workload for c in changes if c.open_attempt])
    changed: list[Workload] = []
    for c in changes:
        now = before.get(c.workload)
        if now is None or not expected(c, now, numbers):
            continue
        values = {**columns[c.workload], "version": now.version + 1}
        connection.execute(update(workloads).where(workloads.c.id == bindparam("one")), {"one": c.workload, **values})
        if c.workload in closing:
            _close_attempt(connection, c.workload, closing[c.workload])
        if c.open_attempt is not None:
            opened = {f.name: getattr(c.open_attempt, f.name) for f in fields(Attempt)}
            connection.execute(ADD_ATTEMPT, rows.encode(opened))
        changed.append(after(now, c.fields))
    return changed


def after(now: Workload, changed: Mapping[str, object]) -> Workload:
    """Tell what a workload is once these fields are set."""
    values: dict[str, Any] = {name: rows.clean(value) for name, value in changed.items()}
    return replace(now, version=now.version + 1, **values)


def expected(change: Change, now: Workload, numbers: set[tuple[str, int]]) -> bool:
    """Say whether the workload is still what the change was decided on."""
    if change.expect_version is not None and change.expect_version != now.version:
        return False
    if change.expect_states is not None and now.state not in change.expect_states:
        return False
    opened = change.open_attempt
    if opened is not None and opened.workload != change.workload:
        raise ValueError(f"an attempt of {opened.workload} cannot be opened with a change of {change.workload}")
    return opened is None or (opened.workload, opened.number) not in numbers


def _attempt_numbers(connection: Connection, ids: Sequence[str]) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for begin in range(0, len(ids), 500):
        query = select(A.workload, A.number).where(A.workload.in_(ids[begin : begin + 500]))
        found.update((workload, number) for workload, number in connection.execute(query))
    return found


def _close_attempt(connection: Connection, id: str, columns: Mapping[str, object]) -> None:
    newest = select(func.max(A.number)).where(A.workload == bindparam("one"), A.ended_at.is_(None)).scalar_subquery()
    query = update(attempts).where(A.workload == bindparam("one"), A.number == newest)
    connection.execute(query, {"one": id, **columns})


def tell_workloads(connection: Connection, changed: Iterable[Workload], now: float) -> None:
    """Write an event for every workload that is not what it was."""
    told = [_event(w.kind, w.team, w.owner, w.id, rows.event_data(w), now) for w in changed]
    if told:
        connection.execute(ADD_EVENT, told)


def decide(connection: Connection, made: Sequence[NewDecision], now: float) -> None:
    """Write decisions to the log, and an event for each."""
    if not made:
        return
    for new in made:
        values = {**asdict(new), "at": now, "numbers": rows.to_json(dict(new.numbers))}
        values = {name: rows.clean(value) for name, value in values.items()}
        result = connection.execute(ADD_DECISION, values)
        key = result.inserted_primary_key
        data = {"id": None if key is None else key[0], **asdict(new)}
        connection.execute(ADD_EVENT, _event("decision", new.team, new.owner, new.workload, data, now))


def add_event(
    connection: Connection, kind: str, team: str | None, owner: str | None, data: Mapping[str, Any], now: float
) -> int:
    """Write one event and answer its id."""
    key = connection.execute(ADD_EVENT, _event(kind, team, owner, None, data, now)).inserted_primary_key
    return 0 if key is None else int(key[0])


def _event(
    kind: str, team: str | None, owner: str | None, workload: str | None, data: Mapping[str, Any], now: float
) -> dict[str, object]:
    told = {"at": now, "kind": kind, "team": team, "owner": owner, "workload": workload}
    return {**{name: rows.clean(value) for name, value in told.items()}, "data": rows.to_json(dict(data))}


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


def take_term(connection: Connection, holder: str, now: float) -> int:
    """Begin the next term."""
    newest, _ = reads.newest_term(connection)
    connection.execute(insert(terms), {"term": newest + 1, "holder": rows.clean(holder), "at": now})
    connection.execute(delete(terms).where(terms.c.term < newest - 100))
    return newest + 1


def prune(connection: Connection, events_before: float, decisions_before: float, ended_before: float | None) -> Pruned:
    """Remove what is older, but never the newest event: who listens goes on from its id."""
    newest = select(func.max(events.c.id)).scalar_subquery()
    gone_events = _remove(connection, events, events.c.at < events_before, events.c.id < newest)
    gone_decisions = _remove(connection, decisions, decisions.c.at < decisions_before)
    gone: tuple[str, ...] = ()
    if ended_before is not None:
        old = (workloads.c.state.in_(ENDED), workloads.c.ended_at < ended_before)
        query = select(workloads.c.id).where(*old).order_by(workloads.c.ended_at, workloads.c.id).limit(500)
        gone = tuple(connection.execute(query).scalars())
        connection.execute(delete(workloads).where(workloads.c.id.in_(gone)))
        connection.execute(delete(blobs).where(blobs.c.digest.not_in(select(files.c.blob))))
    return Pruned(gone_events, gone_decisions, gone)


def _remove(connection: Connection, table: Table, *old: Any) -> int:
    ids = select(table.c.id).where(*old).order_by(table.c.id).limit(AT_ONCE)
    return connection.execute(delete(table).where(table.c.id.in_(ids))).rowcount
