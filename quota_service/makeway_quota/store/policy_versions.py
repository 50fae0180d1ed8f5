"""Read and add the versions of the policy document."""

from __future__ import annotations

from collections.abc import Callable, Collection

from . import reads, rows, writes
from .database.database import Database
from .records import NewDecision, PolicyVersion
from .storage.sealed_secrets import disable_absent


class PolicyVersions:
    """The versions of the policy document; the newest is in force. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def current(self) -> PolicyVersion | None:
        """Return the version in force; None before the first."""
        with self._database.read() as connection:
            return reads.policy(connection, None)

    def version(self, n: int) -> PolicyVersion | None:
        """Return one version; None if there is none of this number."""
        with self._database.read() as connection:
            return reads.policy(connection, n)

    def history(self, limit: int = 100, *, documents: bool = True) -> list[PolicyVersion]:
        """Return the last `limit` versions, newest first, with or without their `documents`."""
        with self._database.read() as connection:
            return reads.policy_history(connection, limit, documents)

    def add(
        self,
        document: str,
        author: str,
        comment: str,
        base: int | None,
        now: float,
        decision: Callable[[PolicyVersion], NewDecision] | None = None,
        teams: Collection[str] | None = None,
    ) -> PolicyVersion:
        """Add a version, which is in force then, and log the `decision` about it, both or none.

        A document that is in force already, as a script applies it again and again, adds neither: the version in force
        is returned. Conflict unless `base` is the version in force (0: none yet, None: any). `teams` are those of the
        document: the credentials of all others are disabled with it.
        """
        with self._database.write(durable=True) as connection:
            current = reads.policy(connection, None)
            if current is not None and base in (None, current.version) and current.document == rows.clean(document):
                return current
            added = writes.add_policy(connection, PolicyVersion(0, now, author, comment, document), base)
            data = {"version": added.version, "author": author, "comment": comment}
            writes.add_event(connection, "policy", None, author, data, now)
            if decision is not None:
                writes.log(connection, (), [decision(added)], now)
            if teams is not None:
                disable_absent(connection, teams, added.version, author, now)
        return added
