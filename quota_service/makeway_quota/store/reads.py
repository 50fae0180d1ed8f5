"""Read single records and short lists from the database; long lists are in `pages.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, TextClause, bindparam, func, literal, select, union_all

from ..engine.snapshot import ADMITTED
from . import rows
from .pages import COLUMNS, W, bounded, by_id
from .records import ENDED, LIVE_STATES, Attempt, Cap, Event, PastRun, PolicyVersion, Workload
from .statements import KeyLookup
from .tables import LIVE_ROW, attempts, blobs, events, files, policies, purges, sources, terms, workloads
from .tables import histories as known

ATTEMPT_COLUMNS = [attempts.c[name] for name in rows.ATTEMPT_FIELDS]
VERSIONS = KeyLookup(W.id, W.id, W.version)
IDS = KeyLookup(W.id, W.id)
NAMES = KeyLookup(W.id, W.id, W.name)
PURGES = KeyLookup(purges.c.workload, purges.c.workload)
WHOLE_ROW = (
    select(*COLUMNS, W.command, W.env, sources.c.source)
    .outerjoin_from(workloads, sources)
    .where(W.id == bindparam("one"))
)
ACTIVE = select(*COLUMNS).where(LIVE_ROW).order_by(W.submitted_at, W.id)


NEWEST_TERM = select(terms.c.term, terms.c.holder).order_by(terms.c.term.desc()).limit(1)


def workload(connection: Connection, id: str) -> Workload | None:
    """Return one workload with its source, or None."""
    row = connection.execute(WHOLE_ROW, {"one": rows.clean(id)}).first()
    return None if row is None else rows.with_large_fields(row)


def whole_workloads(connection: Connection, ids: Sequence[str]) -> dict[str, Workload]:
    """Return these workloads by id with command and environment, without source."""
    query = select(*COLUMNS, W.command, W.env, literal("")).where(W.id.in_([rows.clean(id) for id in ids]))
    return {row.id: row for row in map(rows.with_large_fields, connection.execute(query))}


def names(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Return the names of workloads, ended ones too; those that do not exist or have none are missing."""
    return {id: name for id, name in NAMES.run(connection, ids) if name}


def active(connection: Connection, damaged: dict[str, Sequence[str]] | None = None) -> list[Workload]:
    """Return all live workloads, first submitted first, without what is large; `damaged` as `rows.workload`.

    Where the placement of one cannot be read, it is that of its attempt.
    """
    result = rows.workloads(connection.execute(ACTIVE).all(), damaged)
    unplaced = {id for id, fields in (damaged or {}).items() if "placement" in fields}
    for at, row in enumerate(result) if unplaced else ():
        if row.id in unplaced and row.state in ADMITTED:
            last = [attempt.placement for attempt in attempts_of(connection, row.id) if attempt.number == row.attempt]
            result[at] = row._replace(placement=last[0] if last else ())
    return result


def current(connection: Connection, ids: Sequence[str], known: Mapping[str, Workload]) -> dict[str, Workload]:
    """Return these workloads by id, without what is large; those `known` in their present version are not read."""
    result = {
        id: known[id] for id, version in VERSIONS.run(connection, ids) if id in known and known[id].version == version
    }
    missing = [id for id in ids if id not in result]
    return result | by_id(connection, missing) if missing else result


def ids_taken(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Return those of these ids that cannot be used: of workloads, and of folders that are still to be purged."""
    return {id for lookup in (IDS, PURGES) for (id,) in lookup.run(connection, ids)}


def live_session(connection: Connection, owner: str, server: str) -> Workload | None:
    """Return the live session of a user's server, or None."""
    query = select(*COLUMNS).where(W.kind == "session", W.owner == owner, W.server == server, LIVE_ROW)
    row = connection.execute(query).first()
    return None if row is None else rows.workload(row)


def capped(connection: Connection, owner: str, cap: Cap, limit: int) -> list[Workload]:
    """Return the first `limit` workloads of an owner that a cap counts."""
    query = select(*COLUMNS).where(*_counted(owner, cap)).order_by(W.submitted_at).limit(limit)
    return rows.workloads(connection.execute(query).all())


def count_capped(connection: Connection, owner: str, cap: Cap) -> int:
    """Return how many workloads of an owner a cap counts; it stops counting at the cap."""
    counted = select(W.id).where(*_counted(owner, cap)).limit(cap.limit).subquery()
    return int(connection.execute(select(func.count()).select_from(counted)).scalar_one())


def _counted(owner: str, cap: Cap) -> list[ColumnElement[bool] | TextClause]:
    exactly = [] if cap.states == LIVE_STATES else [W.state.in_(cap.states)]
    asking = [W.gpus > 0] if cap.with_gpus else []
    return [W.owner == rows.clean(owner), LIVE_ROW, W.kind == cap.kind, *exactly, *asking]


def files_of(connection: Connection, id: str) -> list[tuple[str, bytes | None, bool, str]]:
    """Return path, content, executable and digest of the files of a submission, by path.

    The content is None where it is not in the database.
    """
    query = (
        select(files.c.path, blobs.c.data, files.c.executable, blobs.c.digest, blobs.c.outside)
        .join_from(files, blobs)
        .where(files.c.workload == rows.clean(id))
        .order_by(files.c.path)
    )
    return [
        (path, None if outside else bytes(data), executable, digest)
        for path, data, executable, digest, outside in connection.execute(query)
    ]


def attempts_of(connection: Connection, id: str) -> list[Attempt]:
    """Return the attempts of a workload, first one first."""
    query = select(*ATTEMPT_COLUMNS).where(attempts.c.workload == rows.clean(id)).order_by(attempts.c.number)
    return [rows.attempt(row) for row in connection.execute(query)]


def digests_of(connection: Connection, id: str) -> list[tuple[str, bool, str]]:
    """Return path, whether it is executable, and digest of each file of a submission, by path."""
    query = select(files.c.path, files.c.executable, files.c.blob).where(files.c.workload == rows.clean(id))
    return [tuple(row) for row in connection.execute(query.order_by(files.c.path))]


def content_of(connection: Connection, id: str, digest: str) -> tuple[str, bytes | None] | None:
    """Return path and content of one file of a submission (None: it is outside); None if it has no such file."""
    query = (
        select(files.c.path, blobs.c.data, blobs.c.outside)
        .join(blobs, blobs.c.digest == files.c.blob)
        .where(files.c.workload == rows.clean(id), files.c.blob == digest)
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else (row.path, None if row.outside else row.data)


def events_after(connection: Connection, after: int, limit: int) -> list[Event]:
    """Return the events after an event, oldest first."""
    query = select(events).where(events.c.id > rows.clean(after)).order_by(events.c.id).limit(bounded(limit))
    return [rows.event(row) for row in connection.execute(query)]


def event_range(connection: Connection) -> tuple[int, int]:
    """Return the ids of the oldest and the newest event, 0 where there is none."""
    oldest = select(func.min(events.c.id).label("id"))
    newest = select(func.max(events.c.id).label("id"))
    both = union_all(oldest, newest).subquery()
    first, last = (int(id or 0) for id in connection.execute(select(both.c.id)).scalars())
    return min(first, last), max(first, last)


def past_runs(connection: Connection, limit: int) -> list[PastRun]:
    """Return how long the last ended jobs ran, first submitted first."""
    query = (
        select(W.team, W.owner, W.profile, W.ran)
        .where(W.kind == "job", W.state.in_(ENDED), W.ran > 0)
        .order_by(W.submitted_at.desc(), W.id.desc())
        .limit(limit)
    )
    return [PastRun(*row) for row in connection.execute(query)][::-1]


def histories(connection: Connection) -> tuple[dict[str, float], float]:
    """Return the decayed over-quota use of every policy, and when it was written (0: never)."""
    stored = connection.execute(select(known.c.policy, known.c.milli, known.c.at)).all()
    return {policy: milli for policy, milli, _ in stored}, max((at for _, _, at in stored), default=0.0)


def policy(connection: Connection, version: int | None) -> PolicyVersion | None:
    """Return one version of the policy document, the newest for None."""
    query = select(policies).order_by(policies.c.version.desc()).limit(1)
    if version is not None:
        query = query.where(policies.c.version == min(version, 2**31 - 1))
    row = connection.execute(query).first()
    return None if row is None else PolicyVersion(*row)


def policy_history(connection: Connection, limit: int, documents: bool) -> list[PolicyVersion]:
    """Return the versions of the policy document, newest first, with or without their text."""
    of = policies.c
    document = of.document if documents else literal("")
    query = select(of.version, of.at, of.author, of.comment, document).order_by(of.version.desc()).limit(bounded(limit))
    return [PolicyVersion(*row) for row in connection.execute(query)]


def newest_term(connection: Connection) -> tuple[int, str]:
    """Return the newest term and its holder."""
    row = connection.execute(NEWEST_TERM).first()
    return (0, "") if row is None else (int(row[0]), str(row[1]))
