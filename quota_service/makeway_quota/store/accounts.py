"""Count the bytes that are kept for each person and team: rows, files, results, logs and folders of jobs.

Whatever adds bytes counts them in its own transaction (`add`). What is removed is not subtracted: the account of its
owner is counted anew (`recount`) after each removal and in each pass of the retention, which mends every error, too.
Clones share contents: a content counts once for a person in a team.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Executable, Select, func, insert, literal, select
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from . import rows
from .database.database import Database
from .errors import StorageLimit, StorageLimitExceeded
from .records import ByteLimits
from .tables import accounts, attempts, blobs, files, folders, outputs, workloads

W = workloads.c
A = accounts.c
ROW_BYTES = 6000
"""Bytes that the rows of one job take: its own, decisions, events, its first attempts, indexes"""
ATTEMPT_BYTES = 1000
"""Bytes that the rows of one attempt take"""
KINDS = ("jobs", "files", "results", "logs", "attempts", "folders")
"""Rows with commands and sources; submitted files; results and exceptions; logs; rows of attempts and of what is known
of their checkpoints; folders on this disk"""
PATH_BYTES = 150
"""Bytes of the row of a file, beside its path"""
NEAR = 100
"""Jobs with a content that are looked at for one of a person, before all jobs of that person are"""

AccountKey = tuple[str, str]
"""An owner and a team, "" for any"""


class AccountLine(NamedTuple):
    """The bytes of one kind that are kept for a person in a team."""

    owner: str
    team: str
    kind: str
    bytes: int


def accounts_of(owner: str, team: str) -> dict[StorageLimit, AccountKey]:
    """Return the accounts that bytes of a person in a team count in, by the limit of each."""
    return {"person": (owner, ""), "team": ("", team), "whole": ("", ""), "share": (owner, team)}


def kind_of(output: str) -> str:
    """Return the kind that an output of a worker is counted as."""
    return "logs" if output in ("log", "dropped") else "results"


def add(connection: Connection, added: Mapping[tuple[str, str, str], int]) -> None:
    """Count bytes that were added, by owner, team and kind."""
    write = postgres_insert if connection.dialect.name == "postgresql" else sqlite_insert
    for (owner, team, kind), size in sorted(added.items()):
        new = write(accounts).values(owner=rows.clean(owner), team=rows.clean(team), kind=kind, bytes=size)
        total = {"bytes": accounts.c.bytes + new.excluded.bytes}
        connection.execute(new.on_conflict_do_update(index_elements=[A.owner, A.team, A.kind], set_=total))


def add_output(connection: Connection, workload: str, output: str, size: int, limits: ByteLimits | None = None) -> None:
    """Count bytes that a worker sent for the owner of its job; StorageLimitExceeded where they exceed a limit."""
    result = connection.execute(select(W.owner, W.team).where(W.id == rows.clean(workload))).first()
    if result is None:
        return
    team = result.team or ""
    if limits is not None and (refused := KeptSums(connection).take(result.owner, team, size, limits)) is not None:
        raise refused
    add(connection, {(result.owner, team, kind_of(output)): size})


class KeptSums:
    """The accounts as one transaction finds them, and what it adds to them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sums: dict[AccountKey, int] = {}

    def take(self, owner: str, team: str, size: int, limits: ByteLimits) -> StorageLimitExceeded | None:
        """Count `size` more bytes for a person in a team (None), or return why they are too many."""
        whose = accounts_of(owner, team)
        if any(limits) and not self._sums.keys() >= set(whose.values()):
            read = dict(zip(whose.values(), sums_of(self._connection, owner, team), strict=True))
            self._sums = read | self._sums  # what this transaction has taken is not written yet
        result = {which: self._sums[who] for which, who in whose.items() if getattr(limits, which)}
        for which, kept in result.items():
            if kept + size > getattr(limits, which):
                return StorageLimitExceeded(which, kept, size)
        for which, kept in result.items():
            self._sums[whose[which]] = kept + size
        return None


def move(connection: Connection, owner: str, team: str, limits: ByteLimits) -> StorageLimitExceeded | None:
    """Count a person's account anew after work of theirs got into a team; return why it is too much for that team."""

    def kept_now() -> dict[StorageLimit, int]:
        _, ours, _, mine = sums_of(connection, owner, team)
        return {"team": ours, "share": mine}

    there = kept_now()
    recount(connection, owner)
    now = kept_now()
    for which, kept in there.items():
        if (limit := getattr(limits, which)) and limit < now[which] and kept < now[which]:
            return StorageLimitExceeded(which, kept, now[which] - kept)
    return None


def sums_of(connection: Connection, owner: str, team: str) -> tuple[int, int, int, int]:
    """Return the bytes that are kept for a person, for a team, in all, and for this person in this team."""
    query = select(
        _sum(A.owner == rows.clean(owner)),
        _sum(A.team == rows.clean(team)),
        func.coalesce(func.sum(A.bytes), 0),
        _sum((A.owner == rows.clean(owner)) & (A.team == rows.clean(team))),
    )
    person, whole_team, whole, share = connection.execute(query).one()
    return int(person), int(whole_team), int(whole), int(share)


class NewContents:
    """What contents add for a person in a team, as one transaction finds it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._had: dict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
        """whether jobs of an owner in a team have a content, by its digest"""
        self._copies: dict[tuple[str, str, str], int] = {}
        """what a copy of a job adds for an owner in a team"""

    def of_copy(self, original: str, owner: str, team: str) -> int:
        """Return what a copy of a job adds: rows of its files, and contents where the job is another's, or a team's."""
        key = original, owner, team
        if key not in self._copies:
            of = files.c.workload == rows.clean(original)
            paths = select(func.sum(func.length(files.c.path) + PATH_BYTES)).where(of)
            size = int(self._connection.execute(paths).scalar() or 0)
            if size and not self._is_of(original, owner, team):
                contents = select(blobs.c.digest, blobs.c.size).where(
                    blobs.c.digest.in_(select(files.c.blob).where(of))
                )
                sizes = {digest: int(length or 0) for digest, length in self._connection.execute(contents)}
                size += self.of(sizes, owner, team)
            self._copies[key] = size
        return self._copies[key]

    def of(self, sizes: Mapping[str, int], owner: str, team: str) -> int:
        """Return the bytes of those contents, given with their sizes, that no job of a person in a team has yet."""
        had = self._had[owner, team]
        unknown = [digest for digest in sizes if digest not in had]
        for begin in range(0, len(unknown), 500):
            part = unknown[begin : begin + 500]
            near = self._connection.execute(_near(part, owner, team)).all()
            there = {row.digest for row in near if row.mine}
            if common := [row.digest for row in near if row.more and not row.mine]:
                there.update(self._connection.execute(_among_all(common, owner, team)).scalars())
            had.update((digest, digest in there) for digest in part)
        return sum(size for digest, size in sizes.items() if not had[digest])

    def _is_of(self, id: str, owner: str, team: str) -> bool:
        query = select(W.owner, func.coalesce(W.team, "")).where(W.id == rows.clean(id))
        result = self._connection.execute(query).first()
        return result is not None and tuple(result) == (rows.clean(owner), rows.clean(team))


def _near(digests: Sequence[str], owner: str, team: str) -> Select[str, int | None, int | None]:
    """Return a query for contents: whether one of NEAR jobs with each is a person's in a team, and there are more.

    The owner is compared as no index has it: SQLite would walk all jobs of the owner instead, and their files.
    """
    of = files.c.blob == blobs.c.digest
    some = select(files.c.workload).where(of).correlate(blobs).limit(NEAR).subquery()
    whose = (W.owner.concat("") == rows.clean(owner), func.coalesce(W.team, "") == rows.clean(team))
    mine = select(literal(1)).join_from(some, workloads, some.c.workload == W.id).where(*whose).limit(1)
    more = select(literal(1)).select_from(files).where(of).correlate(blobs).limit(1).offset(NEAR)
    columns = (mine.correlate(blobs).scalar_subquery().label("mine"), more.scalar_subquery().label("more"))
    return select(blobs.c.digest, *columns).where(blobs.c.digest.in_(digests))


def _among_all(digests: Sequence[str], owner: str, team: str) -> Select[str]:
    """Return a query for those contents that a job of a person in a team has, for contents that many jobs have."""
    mine = (W.owner == rows.clean(owner), func.coalesce(W.team, "") == rows.clean(team))
    return select(files.c.blob).join_from(files, workloads).where(files.c.blob.in_(digests), *mine).distinct()


def recount(connection: Connection, owner: str) -> None:
    """Replace a person's account by what there is."""
    counted = _counted(connection, owner)
    connection.execute(accounts.delete().where(A.owner == rows.clean(owner)))
    who = {"owner": rows.clean(owner)}
    new = [{**who, "team": team, "kind": kind, "bytes": size} for (team, kind), size in counted.items() if size]
    if new:
        connection.execute(insert(accounts), new)


class Accounts:
    """The accounts of all people. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, owner: str, team: str) -> tuple[int, int, int, int]:
        """Return the bytes that are kept for a person, for a team, in all, and for this person in this team."""
        with self._database.read() as connection:
            return sums_of(connection, owner, team)

    def list_lines(self, owner: str | None = None, teams: Sequence[str] | None = None) -> list[AccountLine]:
        """Return the accounts of a person (None: of all), and those in some teams (None: in all), largest first."""
        query = select(accounts).where(A.bytes > 0).order_by(A.bytes.desc(), A.owner, A.team, A.kind)
        if owner is not None:
            query = query.where(A.owner == rows.clean(owner))
        if teams is not None:
            query = query.where(A.team.in_([rows.clean(team) for team in teams]))
        with self._database.read() as connection:
            return [AccountLine(one.owner, one.team, one.kind, int(one.bytes)) for one in connection.execute(query)]

    def of_teams(self, teams: Sequence[str]) -> dict[str, int]:
        """Return the bytes that are kept for these teams, and for all together under the name ""."""
        sums = select(A.team, func.sum(A.bytes)).group_by(A.team)
        with self._database.read() as connection:
            sizes = {team: int(size) for team, size in connection.execute(sums)}
        return {team: sizes.get(team, 0) for team in teams} | {"": sum(sizes.values())}

    def people(self) -> list[str]:
        """Return the owners who have an account: all who have submitted a job, or were given one."""
        with self._database.read() as connection:
            return list(connection.execute(select(A.owner).distinct()).scalars())

    def recount(self, owner: str) -> None:
        """Count a person's account anew from what there is."""
        with self._database.write(quiet=True) as connection:
            recount(connection, owner)

    def unmeasured(self, limit: int) -> list[str]:
        """Return ended jobs whose folder was not measured since their end, and live ones that have run.

        At most `limit` of each; of the live ones those that were measured longest ago.
        """
        folder = folders.c
        ran = (
            select(W.id)
            .outerjoin(folders, folder.workload == W.id)
            .where(W.kind == "job", W.attempt > 0, W.ended_at.is_(None))
            .order_by(func.coalesce(folder.at, 0))
        )
        ended = (
            select(W.id)
            .outerjoin(folders, folder.workload == W.id)
            .where(
                W.kind == "job", W.attempt > 0, W.ended_at.is_not(None), folder.at.is_(None) | (folder.at < W.ended_at)
            )
        )
        with self._database.read() as connection:
            return [*connection.execute(ran.limit(limit)).scalars(), *connection.execute(ended.limit(limit)).scalars()]

    def measured(self, sizes: Mapping[str, int], at: float) -> None:
        """Write the sizes of folders of jobs, as they were measured."""
        write = postgres_insert if not self._database.sqlite else sqlite_insert
        with self._database.write(quiet=True) as connection:
            there = select(W.id).where(W.id.in_([rows.clean(id) for id in sizes]))
            for id in connection.execute(there).scalars().all():
                new = write(folders).values(workload=id, bytes=sizes[id], at=at)
                values = {"bytes": new.excluded.bytes, "at": new.excluded.at}
                connection.execute(new.on_conflict_do_update(index_elements=[folders.c.workload], set_=values))


def _sum(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(A.bytes).filter(condition), 0)


def _counted(connection: Connection, owner: str) -> dict[tuple[str, str], int]:
    """Return the bytes that are kept for a person, by team and kind."""
    counted: dict[tuple[str, str], int] = defaultdict(int)
    mine, team = W.owner == rows.clean(owner), func.coalesce(W.team, "").label("team")

    def count(kind: str | None, result: Iterable[tuple[str, str, int]]) -> None:
        for one, output, size in result:
            counted[one, kind or kind_of(output)] += int(size or 0)

    named = literal("")
    jobs = select(team, named, func.sum(W.weight + ROW_BYTES)).where(mine, W.kind == "job").group_by(team)
    paths = select(team, named, func.sum(func.length(files.c.path) + PATH_BYTES)).join_from(files, workloads)
    shared = select(team, files.c.blob, blobs.c.size).join_from(files, workloads).join(blobs).where(mine).distinct()
    contents = shared.subquery()
    kept = select(team, outputs.c.kind, func.sum(outputs.c.size)).join_from(outputs, workloads).where(mine)
    measured = select(team, named, func.sum(folders.c.bytes)).join_from(folders, workloads).where(mine)
    count("jobs", _rows(connection, jobs))
    count("files", _rows(connection, paths.where(mine).group_by(team)))
    count(
        "files", _rows(connection, select(contents.c.team, named, func.sum(contents.c.size)).group_by(contents.c.team))
    )
    count(None, _rows(connection, kept.group_by(team, outputs.c.kind)))
    count("folders", _rows(connection, measured.group_by(team)))
    tried = select(team, named, func.count() * ATTEMPT_BYTES).join_from(attempts, workloads).where(mine)
    count("attempts", _rows(connection, tried.group_by(team)))
    return counted


def _rows(connection: Connection, query: Executable) -> list[tuple[str, str, int]]:
    return [(row[0], row[1], row[2]) for row in connection.execute(query)]
