"""Read long histories page by page: workloads and decisions, newest first.

A page is merged from short index walks, one for each team and state that is wanted, so that its cost depends on the
size of the page and not on the length of the history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, TextClause, or_, select, tuple_, union

from . import rows
from .records import ENDED, LIVE_STATES, Decision, Workload
from .tables import ENDED_ROW, LIVE_ROW, decisions, workloads

T = TypeVar("T")
W = workloads.c
D = decisions.c
COLUMNS = [workloads.c[name] for name in rows.WORKLOAD_FIELDS]
MAX_ROWS = 10_000
MAX_TEAMS = 20
"""Beyond so many teams the page is filtered out of all rows: a reader of so many teams sees most rows anyway."""

Conditions = tuple[ColumnElement[bool] | TextClause, ...]


def bounded(limit: int) -> int:
    """Return a page size between 1 and MAX_ROWS."""
    return max(1, min(limit, MAX_ROWS))


def first_that_fit(items: Iterable[T], size: Callable[[T], int], limit: int) -> list[T]:
    """Return the first items that have `limit` bytes together, and always the first one."""
    result: list[T] = []
    for item in items:
        limit -= size(item)
        if limit < 0 and result:
            break
        result.append(item)
    return result


def workload_page(
    connection: Connection,
    kind: str | None,
    owner: str | None,
    teams: Sequence[str] | None,
    states: Sequence[str] | None,
    limit: int,
    cursor: str | None,
) -> tuple[list[Workload], str | None]:
    """Return one page, newest submission first, and the cursor of the next; filters that are None do not matter."""
    limit = bounded(limit)
    common: list[ColumnElement[bool]] = [] if kind is None else [W.kind == kind]
    if cursor is not None:
        at, id = read_cursor(cursor)
        common.append(tuple_(W.submitted_at, W.id) < tuple_(at, id))
    if teams is not None and (owner is not None or len(teams) > MAX_TEAMS):
        common.append(W.team.in_([rows.clean(team) for team in teams]))
        teams = None
    found_ids = (
        select(W.id, W.submitted_at).where(*common).order_by(W.submitted_at.desc(), W.id.desc()).limit(limit + 1)
    )
    walks = [found_ids.where(*walk) for walk in _walks(owner, teams, states)]
    if not walks:
        return [], None
    ids = connection.execute(newest(walks, limit + 1, "submitted_at", "id")).scalars().all()
    page = list(by_id(connection, ids[:limit]).values())
    page.sort(key=lambda row: (row.submitted_at, row.id), reverse=True)
    return page, cursor_after(page[-1]) if page and len(ids) > limit else None


def cursor_after(last: Workload) -> str:
    """Return the cursor of the page after a workload."""
    return f"{last.submitted_at!r}~{last.id}"


def by_id(
    connection: Connection, ids: Sequence[str], damaged: dict[str, Sequence[str]] | None = None
) -> dict[str, Workload]:
    """Return these workloads by id, without what is large; ids that do not exist are missing.

    `damaged` as `rows.workload`.
    """
    result: dict[str, Workload] = {}
    for begin in range(0, len(ids), 500):
        query = select(*COLUMNS).where(W.id.in_([rows.clean(id) for id in ids[begin : begin + 500]]))
        result.update((row.id, row) for row in rows.workloads(connection.execute(query).all(), damaged))
    return result


def _walks(owner: str | None, teams: Sequence[str] | None, states: Sequence[str] | None) -> list[Conditions]:
    """Return the conditions of the index walks that together find what is wanted, each row once.

    The indexes are partial, one kind for live and one for ended rows, and serve only a query that repeats their
    condition.
    """
    whose: list[Conditions] = [()]
    if owner is not None:
        whose = [(W.owner == rows.clean(owner),)]
    elif teams is not None:
        whose = [(W.team == team,) for team in dict.fromkeys(rows.clean(team) for team in teams)]
    elif states is None:
        return [()]
    live = [state for state in LIVE_STATES if states is None or state in states]
    ended = [state for state in ENDED if states is None or state in states]
    exactly = () if len(live) == len(LIVE_STATES) else (W.state.in_(live),)
    walks: list[Conditions] = [(*one, LIVE_ROW, *exactly) for one in whose if live]
    return walks + [(*one, ENDED_ROW, W.state == state) for one in whose for state in ended]


def read_cursor(cursor: str) -> tuple[float, str]:
    """Return the submission time and id that a cursor stands for; ValueError for a cursor of another origin."""
    at, mark, id = cursor.partition("~")
    rows.refuse_unstorable(id, "the cursor")
    try:
        if mark:
            return float(at), id
    except ValueError:
        pass
    raise ValueError("the cursor is not one that a page gave out; begin at the first page without it")


def decision_page(
    connection: Connection,
    workload: str | None,
    teams: Sequence[str] | None,
    owner: str | None,
    limit: int,
    before: int | None,
) -> list[Decision]:
    """Return decisions, newest first: of these teams or this owner (both None: of all), or about one workload."""
    common = [] if before is None else [D.id < rows.clean(before)]
    if workload is not None:
        common.append(D.workload == rows.clean(workload))
    whose = [D.team == team for team in dict.fromkeys(rows.clean(team) for team in teams or ())]
    if owner is not None:
        whose.append(D.owner == rows.clean(owner))
    if not whose and teams is not None:
        return []
    if workload is not None and whose:
        whose = [or_(*whose)]
    walk = select(decisions).where(*common).order_by(D.id.desc()).limit(bounded(limit))
    walks = [walk.where(one) for one in whose] or [walk]
    query = newest(walks, bounded(limit), "id")
    return [rows.decision(row) for row in connection.execute(query)]


def newest(walks: Sequence[Select[Any]], limit: int, *order: str) -> Select[Any]:
    """Return one query for the newest rows of several ordered and limited walks, each row once."""
    if len(walks) == 1:
        return walks[0]
    whole = union(*[walk.subquery().select() for walk in walks]).subquery()
    return select(whole).order_by(*[whole.c[name].desc() for name in order]).limit(limit)
