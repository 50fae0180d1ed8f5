"""Read and write the documents of deployments: each change is made to the version that was read, or refused.

A deployment that is deleted is marked first, so that nothing is launched any more; its row is closed when its last
machine is gone. The version goes on where a name is used again: no step that was decided by an earlier document counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, delete, exists, insert, select, update

from .. import rows, writes
from ..database.database import Database
from ..errors import Conflict
from ..records import NewDecision, StoredDeployment
from ..tables import LIVE_MACHINE, deployments, launch_backoffs, machines, unknown_instances
from .log import add_events, event_of
from .rows import repaired

D = deployments.c
FIELDS = (D.name, D.document, D.version, D.deleting, D.updated_at, D.updated_by)
Decide = Callable[[StoredDeployment], NewDecision]
"""Return the line of the decision log about what was saved"""

KINDS: Mapping[str, tuple[type, Any]] = {
    **dict.fromkeys(("document", "updated_by"), (str, "")),
    "version": (int, 0),
    "updated_at": (float, 0.0),
}


class Deployments:
    """The documents of deployments. Each method is one transaction; Conflict where another change was faster."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self) -> list[StoredDeployment]:
        """Return all deployments, those that are being deleted too, by name."""
        query = select(*FIELDS).where(D.deleted_at.is_(None)).order_by(D.name)
        with self._database.read() as connection:
            return [_deployment(row) for row in connection.execute(query)]

    def versions(self) -> dict[str, int]:
        """Return the versions of all deployments, by name: each change has another one."""
        query = select(D.name, D.version).where(D.deleted_at.is_(None))
        with self._database.read() as connection:
            return {name: version if type(version) is int else 0 for name, version in connection.execute(query)}

    def read(self, name: str) -> StoredDeployment | None:
        """Return one deployment; None if there is none, or it was deleted."""
        with self._database.read() as connection:
            row = _row(connection, name)
        return None if row is None or row.deleted_at is not None else _deployment(row)

    def save(
        self,
        name: str,
        document: str,
        version: int,
        author: str,
        now: float,
        decision: Decide | None = None,
    ) -> StoredDeployment:
        """Replace the document of which `version` was read (0: there is none), and log the `decision`, both or none.

        Conflict where it has changed since.
        """
        with self._database.write(durable=True) as connection:
            row = _row(connection, name)
            there = None if row is None or row.deleted_at is not None else _deployment(row)
            _expect(name, there, version)
            if there is not None and there.deleting:
                raise Conflict(
                    f"the deployment {name} is being deleted; wait until it is gone, or use a new name", there
                )
            last = 0 if row is None else _deployment(row).version
            saved = StoredDeployment(name, document, last + 1, False, now, author)
            _write(connection, saved, new=row is None, known=there is not None)
            _log(connection, saved, decision)
        return saved

    def delete(
        self, name: str, version: int, author: str, now: float, decision: Decide | None = None
    ) -> StoredDeployment:
        """Mark a deployment as being deleted, which does nothing a second time, and log the `decision`.

        Its machines are ended then, and `close` follows.
        """
        with self._database.write(durable=True) as connection:
            row = _row(connection, name)
            there = None if row is None or row.deleted_at is not None else _deployment(row)
            if there is not None and there.deleting:
                return there
            _expect(name, there, version)
            if there is None:
                raise Conflict(f"there is no deployment {name}", None)
            marked = StoredDeployment(name, there.document, there.version + 1, True, now, author)
            _write(connection, marked, new=False, known=True)
            _log(connection, marked, decision)
        return marked

    def close(self, name: str, term: int, now: float) -> bool:
        """End a deployment that is being deleted; False while it has machines or instances, or is not being deleted.

        LeadershipLost where another replica leads.
        """
        name = str(rows.clean(name))
        with self._database.write(durable=True) as connection:
            writes.require_term(connection, term)
            used = exists().where(machines.c.deployment == name, LIVE_MACHINE)
            seen = exists().where(unknown_instances.c.deployment == name)
            closing = update(deployments).where(D.name == name, D.deleting, D.deleted_at.is_(None), ~used, ~seen)
            if not connection.execute(closing.values(deleted_at=now, version=D.version + 1)).rowcount:
                return False
            connection.execute(delete(launch_backoffs).where(launch_backoffs.c.deployment == name))
            _tell(connection, name, "deleted", "", now)
        return True


def _row(connection: Connection, name: str) -> Any:
    return connection.execute(select(deployments).where(D.name == rows.clean(name))).first()


def _deployment(row: Any) -> StoredDeployment:
    """Return a deployment; a document that is damaged is empty, which its reader refuses in words."""
    known = repaired(row, KINDS) or {}
    return StoredDeployment(**{column.name: known[column.name] for column in FIELDS})


def _expect(name: str, there: StoredDeployment | None, version: int) -> None:
    current = 0 if there is None else there.version
    if version == current:
        return
    if there is None:
        raise Conflict(f"the deployment {name} was deleted meanwhile", None)
    by = f", saved by {there.updated_by}" if there.updated_by else ""
    raise Conflict(
        f"version {version} of the deployment {name} was edited, but it has version {current}{by}; look at it first",
        there,
    )


def _write(connection: Connection, saved: StoredDeployment, *, new: bool, known: bool) -> None:
    values = {name: rows.clean(getattr(saved, name)) for name in ("document", "version", "updated_at", "updated_by")}
    values |= {"deleting": saved.deleting, "deleted_at": None}
    name = rows.clean(saved.name)
    if new:
        connection.execute(insert(deployments), {"name": name, **values})
    else:
        connection.execute(update(deployments).where(D.name == name).values(values))
    verb = "deleting" if saved.deleting else "saved" if known else "created"
    _tell(connection, str(name), verb, f"version {saved.version}, by {saved.updated_by}", saved.updated_at)


def _log(connection: Connection, saved: StoredDeployment, decision: Decide | None) -> None:
    if decision is not None:
        writes.log(connection, (), [decision(saved)], saved.updated_at)


def _tell(connection: Connection, name: str, verb: str, message: str, now: float) -> None:
    """Write the change to the log of machines, and tell readers of the live stream."""
    add_events(connection, [event_of(name, "", "", verb, message, now)])
    writes.add_event(connection, "deployment", None, None, {"deployment": name, "change": verb}, now)
