"""Define on the wire what is kept for people: bytes by person, team and kind, and the limits."""

from __future__ import annotations

from pydantic import AwareDatetime, Field

from .base import RequestBody, UserName, Wire


class StorageAccount(Wire):
    """The bytes that are kept for a person in a team."""

    owner: str
    team: str
    bytes: int
    kinds: dict[str, int] = Field(
        default_factory=dict, description="jobs (rows, commands, sources), files, results, logs, folders (on this disk)"
    )


class StorageReport(Wire):
    """What is kept for the caller; for an administrator what is kept for everybody, the largest account first."""

    mine: int = Field(0, description="bytes of the caller, in all teams")
    kinds: dict[str, int] = Field(default_factory=dict, description="bytes of the accounts by kind")
    accounts: list[StorageAccount] = Field(default_factory=list)
    person_limit: int | None = Field(None, description="bytes that one person may keep; null: no limit")
    team_limit: int | None = None
    limit: int | None = Field(None, description="bytes that all together may keep; null: no limit")
    database_bytes: int = Field(0, description="for administrators")
    free_bytes: int | None = Field(None, description="free on the fullest disk with data; null: no disk of its own")
    reserve_bytes: int | None = Field(None, description="of these, kept for ending, cancelling and deleting")


class StorageDelete(RequestBody):
    """Which ended jobs of a person to delete, with their files, logs, results and checkpoints."""

    owner: UserName
    ended_before: AwareDatetime | None = Field(None, description="default: all that have ended")


class StorageDeleted(Wire):
    """What was deleted."""

    jobs: int
    bytes: int = Field(description="that are not kept any more; folders and large files go some seconds later")
