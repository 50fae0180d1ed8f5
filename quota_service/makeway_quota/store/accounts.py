"""Count the bytes that are kept for each person and team: rows, files, results, logs and folders of jobs.

Whatever adds bytes counts them in its own transaction (`add`). What is removed is not subtracted: the account of its
owner is counted anew (`recount`) after each removal and in each pass of the retention, which mends every error, too.
Clones share contents: a content counts once for a person in a team.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Executable, func, insert, literal, select
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from . import rows
from .database.database import Database
from .errors import TooMuchKept, Which
from .records import KeptLimits
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

WHICH: tuple[Which, ...] = ("person", "team", "whole", "share")
Who = tuple[str, str]
"""An owner and a team ("" for none)"""


class AccountLine(NamedTuple):
    """The bytes of one kind that are kept for a person in a team."""

    owner: str
    team: str
    kind: str
    bytes: int


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


def add_output(connection: Connection, workload: str, output: str, size: int, limits: KeptLimits | None = None) -> None:
    """Count bytes that a worker sent for the owner of its job; TooMuchKept where they exceed a limit."""
    found = connection.execute(select(W.owner, W.team).where(W.id == rows.clean(workload))).first()
    if found is None:
        return
    team = found.team or ""
    if limits is not None and (refused := KeptSums(connection).take(found.owner, team, size, limits)) is not None:
        raise refused
    add(connection, {(found.owner, team, kind_of(output)): size})


class KeptSums:
    """The accounts as one transaction finds them, and what it adds to them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sums: dict[Who, int] = {}

    def take(self, owner: str, team: str, size: int, limits: KeptLimits) -> TooMuchKept | None:
        """Count `size` more bytes for a person in a team (None), or return why they are too many."""
        whose: dict[Which, Who] = {"person": (owner, ""), "team": ("", team), "whole": ("", ""), "share": (owner, team)}
        found = {which: self.sum(*who) for which, who in whose.items() if getattr(limits, which)}
        for which, kept in found.items():
            if kept + size > getattr(limits, which):
                return TooMuchKept(which, kept, size)
        for which, kept in found.items():
            self._sums[whose[which]] = kept + size
        return None

    def sum(self, owner: str, team: str) -> int:
        """Return the bytes of a person, of a team, of both or ("", "") of all."""
        if (owner, team) not in self._sums:
            mine = [A.owner == rows.clean(owner)] if owner else []
            ours = [A.team == rows.clean(team)] if team else []
            query = select(func.coalesce(func.sum(A.bytes), 0)).where(*mine, *ours)
            self._sums[owner, team] = int(self._connection.execute(query).scalar_one())
        return self._sums[owner, team]


def move(connection: Connection, owner: str, team: str, limits: KeptLimits) -> TooMuchKept | None:
    """Count a person's account anew after work of theirs got into a team; return why it is too much for that team."""
    before = KeptSums(connection)
    there: dict[Which, int] = {"team": before.sum("", team), "share": before.sum(owner, team)}
    recount(connection, owner)
    after = KeptSums(connection)
    now: dict[Which, int] = {"team": after.sum("", team), "share": after.sum(owner, team)}
    for which, kept in there.items():
        if (limit := getattr(limits, which)) and limit < now[which] and kept < now[which]:
            return TooMuchKept(which, kept, now[which] - kept)
    return None


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
            query = select(
                _sum(A.owner == rows.clean(owner)),
                _sum(A.team == rows.clean(team)),
                func.coalesce(func.sum(A.bytes), 0),
                _sum((A.owner == rows.clean(owner)) & (A.team == rows.clean(team))),
            )
            person, whole_team, whole, share = connection.execute(query).one()
        return int(person), int(whole_team), int(whole), int(share)

    def listed(self, owner: str | None = None, teams: Sequence[str] | None = None) -> list[AccountLine]:
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
            found = {team: int(size) for team, size in connection.execute(sums)}
        return {team: found.get(team, 0) for team in teams} | {"": sum(found.values())}

    def people(self) -> list[str]:
        """Return the owners who have an account: all who have submitted a job, or were given one."""
        with self._database.read() as connection:
            return list(connection.execute(select(A.owner).distinct()).scalars())

    def recount(self, owner: str) -> None:
        """Count a person's account anew from what there is."""
        with self._database.write(quiet=True) as connection:
            recount(connection, owner)

    def unmeasured(self, limit: int) -> list[str]:
        """Return ended jobs whose folder was not measured since their end, and live ones that have run."""
        folder = folders.c
        ran = select(W.id).where(W.kind == "job", W.attempt > 0, W.ended_at.is_(None))
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

    def count(kind: str | None, found: Iterable[tuple[str, str, int]]) -> None:
        for one, output, size in found:
            counted[one, kind or kind_of(output)] += int(size or 0)

    named = literal("")
    jobs = select(team, named, func.sum(W.weight + ROW_BYTES)).where(mine, W.kind == "job").group_by(team)
    paths = select(team, named, func.sum(func.length(files.c.path) + PATH_BYTES)).join_from(files, workloads)
    shared = select(team, files.c.blob, blobs.c.size).join_from(files, workloads).join(blobs).where(mine).distinct()
    each = shared.subquery()
    kept = select(team, outputs.c.kind, func.sum(outputs.c.size)).join_from(outputs, workloads).where(mine)
    measured = select(team, named, func.sum(folders.c.bytes)).join_from(folders, workloads).where(mine)
    count("jobs", _rows(connection, jobs))
    count("files", _rows(connection, paths.where(mine).group_by(team)))
    count("files", _rows(connection, select(each.c.team, named, func.sum(each.c.size)).group_by(each.c.team)))
    count(None, _rows(connection, kept.group_by(team, outputs.c.kind)))
    count("folders", _rows(connection, measured.group_by(team)))
    tried = select(team, named, func.count() * ATTEMPT_BYTES).join_from(attempts, workloads).where(mine)
    count("attempts", _rows(connection, tried.group_by(team)))
    return counted


def _rows(connection: Connection, query: Executable) -> list[tuple[str, str, int]]:
    return [(row[0], row[1], row[2]) for row in connection.execute(query)]
