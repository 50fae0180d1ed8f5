"""Recognize requests that submitted something already, by their keys; called within a transaction.

Writers follow each other, so of two equal requests at the same time one submits, and the other one finds its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection, insert

from . import reads
from .errors import KeyReused, Removed
from .records import SubmissionKey, Workload
from .statements import BulkStatement, KeyLookup
from .tables import submission_keys

K = submission_keys.c
KEYS = KeyLookup(K.key, K.key, K.sender, K.number, K.digest, K.workload)
ADD_KEYS = BulkStatement(insert(submission_keys))


class UsedKeys:
    """The keys of some requests that were used before, and those that are used in this transaction."""

    def __init__(self, connection: Connection, keys: Iterable[SubmissionKey]) -> None:
        self._connection = connection
        wanted = sorted({submission_key.key for submission_key in keys})
        used = KEYS.run(connection, wanted) if wanted else []
        self._used = {(key, sender, number): (digest, workload) for key, sender, number, digest, workload in used}
        self._added: dict[str, Workload] = {}

    def repeated(self, key: SubmissionKey) -> Workload | KeyReused | Removed | None:
        """Return the workload that this request submitted before, as it is now; None if the key is new."""
        used = self._used.get((key.key, key.sender, key.number))
        if used is None:
            return None
        digest, id = used
        if digest != key.digest:
            return KeyReused()
        row = self._added.get(id) or reads.workload(self._connection, id)
        return Removed(id) if row is None else row._replace(source="")

    def use(self, key: SubmissionKey, workload: Workload) -> None:
        """Count a key as used for a workload that is about to be inserted."""
        self._used[key.key, key.sender, key.number] = key.digest, workload.id
        self._added[workload.id] = workload


def add(connection: Connection, used: Mapping[str, SubmissionKey], now: float) -> None:
    """Insert keys by the ids of the workloads that they submitted."""
    rows = [
        {"key": k.key, "sender": k.sender, "number": k.number, "digest": k.digest, "workload": id, "at": now}
        for id, k in used.items()
    ]
    ADD_KEYS.run(connection, rows)


def earlier(connection: Connection, keys: Sequence[SubmissionKey]) -> list[Workload] | None:
    """Return what all these keys submitted, None if one is new; raise KeyReused or Removed."""
    used = UsedKeys(connection, keys)
    result: list[Workload] = []
    for key in keys:
        answer = used.repeated(key)
        if isinstance(answer, KeyReused | Removed):
            raise answer
        if answer is None:
            return None
        result.append(answer)
    return result
