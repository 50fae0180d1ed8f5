"""Keep who the Hub's users are, and hand work over when a name no longer means the same person.

Workloads, decisions and events are filed under a name, and names change hands: a user is renamed, or deleted and the
name given to another person. The Hub's user has an identity that a rename keeps and a new user of the same name does
not have. What learns of a difference files the work under another name, in one transaction: that of the renamed
person, or `NAME/deleted-N`, which no user of a Hub can have (a user's name has no slash).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, Connection, Table, case, delete, insert, select, update

from . import accounts, pages, rows, writes
from .database.database import Database
from .records import NewDecision, Person, Workload
from .storage import growth
from .tables import ENDED_ROW, LIVE_ROW, decisions, events, people, removals, storage_days, submission_keys, workloads

P = people.c
W = workloads.c
RETIRED = "/deleted-"
CLOCKS_DIFFER = 60.0
"""Seconds by which work may seem older than its owner's user and still be theirs."""
OWNED = ((workloads, "owner"), (decisions, "owner"), (events, "owner"), (removals, "owner"))
AT_ONCE = 1000
"""Names that one statement changes: a database takes some ten thousand values in one"""
CHANGED = "people"
"""The kind of the event after which older events, as they were read before, are filed under names that were given up"""


@dataclass(slots=True)
class HandOver:
    """What a look at the Hub's users changed: old name to new name."""

    moves: dict[str, str] = field(default_factory=dict)


class KnownPeople:
    """The known users of the Hub. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[Person]:
        """Return everyone who is known, and everyone who was deleted, by name."""
        with self._database.read() as connection:
            return list(_read(connection).values())

    def keep(self, heard: Collection[Person]) -> None:
        """Write what was heard of people whose names mean who they did before."""
        with self._database.write(quiet=True) as connection:
            _put(connection, heard)

    def meet(self, listed: Mapping[str, Person], gone: Collection[str], now: float) -> HandOver:
        """Compare what is known with users as the Hub lists them, and file work under the names that are right now.

        `listed` are users of the Hub, all of them where a name may have changed; `gone` are names that the Hub surely
        does not have. A person whose identity is listed under one other name was renamed; otherwise one who is gone,
        or whose name has another identity now, was deleted.
        """
        changed: list[Workload] = []
        with self._database.write(changed) as connection:
            known = _read(connection)
            moves = _moves(known, listed, gone)
            changed += _hand_over(connection, moves, now, used=listed)
            after = {moves.get(name, name): person for name, person in known.items()}
            old = _older(connection, [p for name, p in listed.items() if name not in after])
            names = _Names([*known, *after])
            retired = {name: names.retired(name) for name in old}
            changed += _hand_over(connection, retired, now, before=old)
            _write(connection, known, after, listed, [*moves.values(), *retired.values()])
        return HandOver({**moves, **retired})

    def give(self, old: str, new: str, by: str, now: float) -> int:
        """File the work of one name under another one, as an administrator decided; return how many live workloads."""
        changed: list[Workload] = []
        with self._database.write(changed) as connection:
            changed += _hand_over(connection, {old: new}, now, by=by)
            connection.execute(delete(people).where(P.name == old, P.name.contains(RETIRED)))
        return len(changed)

    def forget(self, limit: int = AT_ONCE) -> int:
        """Remove names of deleted persons under which nothing is filed any more, at most `limit`; return how many.

        A user who is deleted later may get such a name for their work again.
        """
        with self._database.read() as connection:
            retired = select(P.name).where(P.name.contains(RETIRED), P.present.is_(False)).order_by(P.name)
            unused = set(connection.execute(retired).scalars())
            for table, column in (*OWNED, (storage_days, "name")):
                owner = table.c[column]
                for part in _parts(sorted(unused)):
                    unused -= set(connection.execute(select(owner).where(owner.in_(part)).distinct()).scalars())
        gone = sorted(unused)[:limit]
        if gone:
            with self._database.write(quiet=True) as connection:
                connection.execute(delete(people).where(P.name.in_(gone)))
        return len(gone)


def _parts(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE))


class _Names:
    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def retired(self, name: str) -> str:
        """Return the next unused name for the work of a person who was deleted."""
        number = 1
        while (result := f"{name}{RETIRED}{number}") in self._taken:
            number += 1
        self._taken.add(result)
        return result


def is_retired(name: str) -> bool:
    """Whether this is the name of a deleted person's work."""
    return RETIRED in name


def _moves(known: Mapping[str, Person], listed: Mapping[str, Person], gone: Collection[str]) -> dict[str, str]:
    """Return old name to new name, for everyone whose name no longer means them."""
    once = Counter(person.identity for person in listed.values())
    ours = Counter(person.identity for person in known.values())
    at = {person.identity: name for name, person in listed.items() if person.identity and once[person.identity] == 1}
    names = _Names(known)
    moves: dict[str, str] = {}
    for name, person in sorted(known.items()):
        there = listed.get(name)
        if there is not None and (there.identity == person.identity or not person.identity):
            continue
        renamed = at.get(person.identity) if person.identity and ours[person.identity] == 1 else None
        if renamed is not None:
            moves[name] = renamed
        elif not is_retired(name) and (there is not None or name in gone):
            moves[name] = names.retired(name)
    return moves


def _older(connection: Connection, new: Collection[Person]) -> dict[str, float]:
    """Return those of the new names under which there is work from before their users existed, with since when.

    The Hub's clock may differ from that of this service (`CLOCKS_DIFFER`).
    """
    result: dict[str, float] = {}
    for person in new:
        if person.since is None or not person.identity:
            continue
        before = person.since - CLOCKS_DIFFER
        mine = (W.owner == rows.clean(person.name), W.submitted_at < before)
        queries = [select(W.id).where(*mine, condition).limit(1) for condition in (LIVE_ROW, ENDED_ROW)]
        if any(connection.execute(query).first() is not None for query in queries):
            result[person.name] = before
    return result


def _hand_over(
    connection: Connection,
    moves: Mapping[str, str],
    now: float,
    *,
    before: Mapping[str, float] | None = None,
    used: Collection[str] = (),
    by: str = "",
) -> list[Workload]:
    """File everything of each old name under its new one, at the same time for all; return the live rows as they are.

    `before`: only what was submitted or decided before a time, by old name. `used`: names that users have now.
    """
    if not moves:
        return []
    limits = before or {}
    live = _live(connection, moves, limits)
    ousted = _ousted(live, _live(connection, set(moves.values()) - moves.keys(), {}), moves)
    # A server of both names: one lease stays where it is, or, where that is another person's name now, gets one of its
    # own. It ends by itself: no server renews it.
    theirs = {*moves.values(), *used}
    apart = {row.id: f"{row.owner}{RETIRED}{row.id}" if row.owner in theirs else row.owner for row in ousted}
    changed = [
        writes.after(row, {"owner": apart.get(row.id, moves[old])}) for old, held in live.items() for row in held
    ]
    for row in ousted:
        connection.execute(update(workloads).where(W.id == row.id).values(owner=f"/apart/{row.id}"))
    aside = {name: f"/moving/{at}" for at, name in enumerate(moves)}
    first = aside if set(moves) & set(moves.values()) else moves
    for step in [first] if first is moves else [first, {aside[old]: new for old, new in moves.items()}]:
        _rename(connection, step, limits)
    for id, name in apart.items():
        connection.execute(update(workloads).where(W.id == id).values(owner=rows.clean(name)))
        accounts.recount(connection, name)
    if changed:
        writes.SET_WORKLOADS.run(connection, [{"one": row.id, "version": row.version} for row in changed])
    decided = [_decision(old, new, by) for old, new in moves.items()]
    writes.log(connection, changed, decided, now)
    writes.add_event(connection, CHANGED, None, None, {}, now)
    return changed


def _ousted(
    live: Mapping[str, Sequence[Workload]], there: Mapping[str, Sequence[Workload]], moves: Mapping[str, str]
) -> list[Workload]:
    """Return the sessions that would meet another one of the same owner and server: those that are there stay."""
    taken = {(owner, row.server) for owner, held in there.items() for row in held if row.kind == "session"}
    moved = [(moves[old], row) for old, held in live.items() for row in held if row.kind == "session"]
    ousted = []
    for owner, row in sorted(moved, key=lambda item: item[1].submitted_at, reverse=True):
        if (owner, row.server) in taken:
            ousted.append(row)
        taken.add((owner, row.server))
    return ousted


def _live(connection: Connection, owners: Iterable[str], limits: Mapping[str, float]) -> dict[str, list[Workload]]:
    result: dict[str, list[Workload]] = {}
    for owner in owners:
        query = select(*pages.COLUMNS).where(W.owner == rows.clean(owner), LIVE_ROW)
        if owner in limits:
            query = query.where(W.submitted_at < limits[owner])
        result[owner] = rows.workloads(connection.execute(query).all())
    return result


def _rename(connection: Connection, step: Mapping[str, str], limits: Mapping[str, float]) -> None:
    """Write new names for old ones, as `_hand_over`; names without a limit by one look at each table, however many."""
    whole = {str(rows.clean(old)): str(rows.clean(new)) for old, new in step.items() if old not in limits}
    olds = sorted(whole)
    for table, column in OWNED:
        owner = table.c[column]
        for part in ({old: whole[old] for old in olds[at : at + AT_ONCE]} for at in range(0, len(olds), AT_ONCE)):
            named = update(table).where(owner.in_(part))
            connection.execute(named.values({column: case(part, value=owner)}))
        for old in step.keys() & limits.keys():
            mine = update(table).where(owner == rows.clean(old), _time(table) < limits[old])
            connection.execute(mine.values({column: rows.clean(step[old])}))
    S = submission_keys.c
    for old, new in whole.items():
        there = select(S.key).where(S.sender == new).scalar_subquery()
        connection.execute(delete(submission_keys).where(S.sender == old, S.key.in_(there)))
        connection.execute(update(submission_keys).where(S.sender == old).values(sender=new))
    growth.rename(connection, whole)
    for name in (*step.keys(), *step.values()):
        accounts.recount(connection, name)


def _time(table: Table) -> Column[Any]:
    return table.c.submitted_at if table is workloads else table.c.at


def _decision(old: str, new: str, by: str) -> NewDecision:
    if by:
        message = f"{by} gave the work of {old} to {new}."
    elif is_retired(new):
        message = f"The user {old} was deleted at the Hub: their work is kept as that of {new}."
    elif is_retired(old):
        message = f"The user {new}, known as {old} since they were deleted at the Hub, is there again, with their work."
    else:
        message = f"The user {old} is called {new} now, and keeps their work."
    return NewDecision("rename", None, None, new, "renamed", message)


def _read(connection: Connection) -> dict[str, Person]:
    query = select(P.name, P.identity, P.groups, P.present).order_by(P.name)
    return {
        name: Person(name, identity, rows.strings(groups), present)
        for name, identity, groups, present in connection.execute(query)
    }


def _write(
    connection: Connection,
    known: Mapping[str, Person],
    after: Mapping[str, Person],
    listed: Mapping[str, Person],
    moved: Collection[str],
) -> None:
    """Write everyone as they are after a comparison, where that is not what was known."""
    now = dict(after)
    for name in moved:
        if name not in now:
            now[name] = Person(name, "", (), False)  # work from before its user existed
        elif is_retired(name):
            now[name] = now[name]._replace(name=name, groups=(), present=False)
    now.update(listed)
    connection.execute(delete(people).where(P.name.in_([name for name in known if name not in now])))
    _put(connection, [p for name, p in now.items() if known.get(name) != p])


def _put(connection: Connection, heard: Iterable[Person]) -> None:
    values = [
        {
            "name": rows.clean(p.name),
            "identity": p.identity,
            "groups": rows.to_json(list(p.groups)),
            "present": p.present,
        }
        for p in heard
    ]
    if values:
        connection.execute(delete(people).where(P.name.in_([person["name"] for person in values])))
        connection.execute(insert(people), values)
