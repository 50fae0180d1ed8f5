"""Errors of the database and of what it refuses, each with a sentence for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .records import PolicyVersion, StoredDeployment, Workload

StorageLimit = Literal["person", "team", "whole", "share"]
"""What a limit of kept bytes is for: a person, a team, all, or one person in one team"""


class StoreError(Exception):
    """The database cannot be used; the sentence says why and what to do."""

    concerns_all = True
    """whether every row is concerned, so that nothing is quarantined for it"""


class OutcomeUnknown(StoreError):
    """The connection broke during a COMMIT, and whether it counts cannot be read yet."""

    def __init__(self) -> None:
        super().__init__(
            "the database went silent while this was written, so it is not known yet whether it counts; "
            "look before you repeat it, or repeat it with the same Idempotency-Key"
        )


class RowRefused(StoreError):
    """The database refuses a value, such as a number that is too large: other rows can be written."""

    concerns_all = False


class Conflict(StoreError):
    """Another request was faster: `existing` is what it wrote."""

    def __init__(self, message: str, existing: Workload | PolicyVersion | StoredDeployment | None) -> None:
        super().__init__(message)
        self.existing = existing


class TooMany(StoreError):
    """The owner has as many workloads as a cap allows: `existing` are the first of them, `limit` is the cap."""

    def __init__(self, message: str, existing: Sequence[Workload], limit: int) -> None:
        super().__init__(message)
        self.existing = tuple(existing)
        self.limit = limit


class StorageLimitExceeded(StoreError):
    """More bytes would be kept than a limit allows: `kept` are there, `size` more were to be added."""

    def __init__(self, which: StorageLimit, kept: int, size: int) -> None:
        super().__init__(f"{kept} bytes are kept already ({which}), and {size} more exceed the limit")
        self.which = which
        self.kept = kept
        self.size = size


class KeyReused(StoreError):
    """The key of a submission was used for another one."""

    def __init__(self) -> None:
        super().__init__("the key was used for another submission; give every submission a key of its own")


class Removed(StoreError):
    """The requested workload was removed."""

    def __init__(self, workload: str) -> None:
        super().__init__(f"the workload {workload} was removed")
        self.workload = workload


class FileUnreadable(StoreError):
    """The content of a submitted file is gone or damaged."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"The file “{path}” of the job is lost ({why}). Submit the job again with its files.")


class FilesUnavailable(StoreError):
    """The content of a submitted file cannot be read now; it may be there later."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the file “{path}” cannot be read now ({why})")


class NotLeading(StoreError):
    """This replica does not lead (any more), so it must neither decide nor act."""


class LeadershipLost(NotLeading):
    """Another replica has taken a newer term."""

    def __init__(self, term: int, newest: int, holder: str) -> None:
        super().__init__(
            f"term {term} is over: {holder or 'another replica'} holds term {newest}; this one stops deciding"
        )
        self.term = term
        self.newest = newest
        self.holder = holder


class Unremovable(StoreError):
    """Rows cannot be removed together, and none was: `keys` are their primary keys, the cause says why."""

    concerns_all = False

    def __init__(self, table: str, keys: Sequence[tuple[object, ...]]) -> None:
        super().__init__(f"{len(keys)} of the {table} cannot be removed")
        self.table = table
        self.keys = tuple(keys)
