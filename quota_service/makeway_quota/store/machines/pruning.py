"""Remove machines that are over for long, with what is kept of them, and deployments that were deleted long ago.

Called by `history/retention.py`. Every method is one short transaction that removes at most `limit` rows, as those of
`storage/pruning.py`: it returns how many went, and raises Unremovable for rows that cannot be removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from sqlalchemy import Connection, delete, func, select

from .. import writes
from ..database.database import Database
from ..database.old_rows import Skip, besides, remove_oldest, remove_rows, removing
from ..pages import first_that_fit
from ..tables import (
    FINISHED_MACHINE,
    deployments,
    machine_events,
    machine_outputs,
    machine_requests,
    machines,
    spend_months,
)

PARTS_BYTES = 8 * 2**20
"""Bytes of outputs and requests that one transaction removes, or a single machine that has more"""
M = machines.c
SIZE = (
    select(func.coalesce(func.sum(func.length(machine_outputs.c.text)), 0))
    .where(machine_outputs.c.machine == M.id)
    .scalar_subquery()
    + select(func.coalesce(func.sum(func.length(machine_requests.c.request)), 0))
    .where(machine_requests.c.machine == M.id)
    .scalar_subquery()
)


class MachinePruning:
    """The removals of machines. `term`: only while this term leads (LeadershipLost otherwise)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def forget_machines(
        self, over_before: float, limit: int, term: int | None = None, *, maximum: int | None = None, skip: Skip = ()
    ) -> int:
        """Remove machines that were over before a time, or beyond the newest `maximum` of those that are over."""
        with self._writing(term) as connection:
            if count := _forget(connection, over_before, limit, skip):
                return count
            if maximum is None:
                return 0
            there = connection.execute(select(func.count()).select_from(machines).where(FINISHED_MACHINE)).scalar_one()
            beyond = there - maximum - len(skip)
            return _forget(connection, inf, min(limit, beyond), skip) if beyond > 0 else 0

    def forget_machine_outputs(self, limit: int, term: int | None = None, *, maximum: int, skip: Skip = ()) -> int:
        """Remove the oldest outputs beyond the newest `maximum` of machines that are over."""
        over = select(M.id).where(FINISHED_MACHINE)
        mine = (machine_outputs.c.machine.in_(over), *besides(machine_outputs, skip))
        key = list(machine_outputs.primary_key)
        with self._writing(term) as connection:
            there = connection.execute(select(func.count()).select_from(machine_outputs).where(*mine)).scalar_one()
            if there <= maximum:
                return 0
            size = func.length(machine_outputs.c.text).label("size")
            oldest = select(*key, size).where(*mine).order_by(machine_outputs.c.at, *key)
            result = connection.execute(oldest.limit(min(limit, there - maximum))).all()
            result = first_that_fit(result, lambda row: int(row.size), PARTS_BYTES)
            return remove_rows(connection, machine_outputs, [(row.machine, row.kind) for row in result])

    def forget_machine_events(
        self, before: float, limit: int, term: int | None = None, *, maximum: int, skip: Skip = ()
    ) -> int:
        """Remove the oldest events from before a time, or beyond the newest `maximum`."""
        with self._writing(term) as connection:
            newest = connection.execute(select(func.max(machine_events.c.id))).scalar_one() or 0
            return remove_oldest(connection, machine_events, before, limit, newest - maximum, skip=skip)

    def forget_deployments(self, deleted_before: float, limit: int, term: int | None = None, *, skip: Skip = ()) -> int:
        """Remove deployments that were deleted before a time, with what they have spent."""
        D = deployments.c
        old = select(D.name).where(D.deleted_at < deleted_before, *besides(deployments, skip))
        with self._writing(term) as connection:
            names = list(connection.execute(old.order_by(D.deleted_at, D.name).limit(min(limit, 100))).scalars())
            with removing(deployments, [(name,) for name in names]):
                connection.execute(delete(spend_months).where(spend_months.c.deployment.in_(names)))
                connection.execute(delete(deployments).where(D.name.in_(names)))
        return len(names)

    @contextmanager
    def _writing(self, term: int | None) -> Iterator[Connection]:
        """Write under the term, without calling listeners: what they follow does not change."""
        with self._database.write(quiet=True) as connection:
            if term is not None:
                writes.require_term(connection, term)
            yield connection


def _forget(connection: Connection, over_before: float, limit: int, skip: Skip) -> int:
    query = (
        select(M.id, SIZE.label("size"))
        .where(M.over_at < over_before, FINISHED_MACHINE, *besides(machines, skip))
        .order_by(M.over_at, M.id)
        .limit(limit)
    )
    result = first_that_fit(connection.execute(query).all(), lambda row: int(row.size), PARTS_BYTES)
    return remove_rows(connection, machines, [(row.id,) for row in result])
