"""Keep the workloads that have not ended in memory: read once, then followed from commit to commit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from ...engine.snapshot import ADMITTED
from ...store.records import Workload


class RowsAsOf(Mapping[str, Workload]):
    """The rows as they were when this was made. Not a copy: only what changed since is kept beside them."""

    def __init__(self, rows: Mapping[str, Workload]) -> None:
        self._rows = rows
        self.before: dict[str, Workload | None] = {}
        """What changed since, as it was; None for rows that were not there."""

    def __getitem__(self, id: str) -> Workload:
        if id not in self.before:
            return self._rows[id]
        row = self.before[id]
        if row is None:
            raise KeyError(id)
        return row

    def __iter__(self) -> Iterator[str]:
        yield from (id for id in self._rows if id not in self.before)
        yield from (id for id, row in self.before.items() if row is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ActiveRows:
    """The rows by id, with the indexes that a cycle needs. Used by one event loop; commits come from any thread."""

    def __init__(self) -> None:
        self.rows: dict[str, Workload] | None = None
        """None until they were read."""
        self.holding: dict[str, Workload] = {}
        """Those that hold GPUs or have a lease; not the thousands of jobs that wait."""
        self.urgent: dict[str, Workload] = {}
        """Jobs and sessions that a cycle may have to act upon: starting, noticed, terminating or cancelled."""
        self.nominated: dict[str, Workload] = {}
        """Those that wait for a nomination."""
        self.on_node: dict[str, set[str]] = {}
        """Node to the ids of the workloads that are placed there."""
        self._by_team: dict[str, dict[str, Workload]] = {}
        self._by_owner: dict[str, dict[str, Workload]] = {}
        self.changed: set[str] = set()
        """Ids that changed and that no cycle has gone through with yet."""
        self._committed: deque[Sequence[Workload]] = deque()
        self._reading = asyncio.Lock()
        self._copy: dict[str, Workload] | None = None
        self._as_of: RowsAsOf | None = None

    def committed(self, changed: Sequence[Workload]) -> None:
        """Queue what a commit changed, in the thread that wrote; `follow` applies it."""
        self._committed.append(changed)

    async def read(self, read: Callable[[], Awaitable[Iterable[Workload]]]) -> bool:
        """Read the rows, if that was not done yet; return whether it was done now."""
        if self.rows is not None:
            return False
        async with self._reading:
            if self.rows is not None:
                return False
            rows = await read()
            result: dict[str, Workload] = {}
            for row in rows:
                result[row.id] = row
                self._index(None, row)
            self.rows = result
            return True

    def copy(self) -> dict[str, Workload]:
        """Return a copy for others to hold, the same one until something changes."""
        if self._copy is None:
            self._copy = dict(self.rows or {})
        return self._copy

    def as_of_now(self) -> Mapping[str, Workload]:
        """Return the rows as they are now, without a copy; valid until the next call."""
        self._as_of = RowsAsOf(self.rows or {})
        return self._as_of

    def are_current(self, rows: object) -> bool:
        """Whether these are the rows as they are now, from `copy` or `as_of_now`."""
        if isinstance(rows, RowsAsOf):
            return rows is self._as_of and not rows.before
        return rows is not None and rows is self._copy

    def follow(self) -> list[tuple[Workload | None, Workload]]:
        """Apply what was committed since; return each row before and after."""
        applied: list[tuple[Workload | None, Workload]] = []
        result = self.rows
        if result is None or not self._committed:
            return applied
        self._copy = None
        while self._committed:
            for row in self._committed.popleft():
                known = result.get(row.id)
                if known is not None and not is_newer(row, known):
                    continue
                if row.live:
                    result[row.id] = row
                else:
                    result.pop(row.id, None)
                self._index(known, row)
                if self._as_of is not None:
                    self._as_of.before.setdefault(row.id, known)
                applied.append((known, row))
        return applied

    def placed_on(self, nodes: Iterable[str]) -> set[str]:
        """Return the ids of the workloads that are placed on any of the nodes."""
        return set().union(*(self.on_node.get(node, ()) for node in nodes))

    def of_teams_or_owner(self, teams: Iterable[str], owner: str) -> list[Workload]:
        """Return the rows of some teams, then those of `owner` in other teams ("" adds none); in no order."""
        shown = set(teams)
        result = [row for team in shown for row in self._by_team.get(team, {}).values()]
        if owner:
            result += [row for row in self._by_owner.get(owner, {}).values() if (row.team or "") not in shown]
        return result

    def owners(self) -> set[str]:
        """Return the names of all owners."""
        return set(self._by_owner)

    def _index(self, known: Workload | None, row: Workload) -> None:
        self.changed.add(row.id)
        _put(self.holding, row, is_holding(row))
        _put(self.urgent, row, is_urgent(row))
        _put(self.nominated, row, row.live and bool(row.nomination))
        _group(self._by_team, known and (known.team or ""), row.team or "", row)
        _group(self._by_owner, known and known.owner, row.owner, row)
        before, now = known.placement if known else (), row.placement if row.live else ()
        if before != now:
            for place in before:
                ids = self.on_node.get(place.node, set())
                ids.discard(row.id)
                if not ids:
                    self.on_node.pop(place.node, None)
            for place in now:
                self.on_node.setdefault(place.node, set()).add(row.id)


def is_newer(row: Workload, known: Workload) -> bool:
    """Whether a row is newer than what is known of it, or was read again after it could not be read as a whole."""
    return row.version > known.version or (row.version == known.version and row is not known and row != known)


def is_holding(row: Workload) -> bool:
    """Whether a row holds GPUs or has a lease."""
    return row.live and (row.kind == "session" or row.state != "pending")


def is_urgent(row: Workload) -> bool:
    """Whether a cycle may have to act upon a row, even if nothing new is reported of it."""
    ending = row.notice is not None or row.cancel_requested or row.reason_code == "time_limit"
    return row.state in ADMITTED and (row.state != "running" or ending)


def _put(index: dict[str, Workload], row: Workload, belongs: bool) -> None:
    if belongs:
        index[row.id] = row
    else:
        index.pop(row.id, None)


def _group(index: dict[str, dict[str, Workload]], before: str | None, now: str, row: Workload) -> None:
    """Add a row to its present group and remove it from the one of `before` (None: none); empty groups are dropped."""
    if before is not None and (before != now or not row.live):
        group = index.get(before, {})
        group.pop(row.id, None)
        if not group:
            index.pop(before, None)
    if row.live:
        index.setdefault(now, {})[row.id] = row
