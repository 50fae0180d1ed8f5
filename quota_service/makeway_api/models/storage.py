"""Define on the wire what is kept for people: bytes by person, team, kind and job, and the limits."""

from __future__ import annotations

from pydantic import AwareDatetime, Field

from .base import RequestBody, UserName, Wire

KINDS = "queue (jobs that have not ended), jobs, files, results, logs, attempts, folders (on the service's disk)"


class StorageAccount(Wire):
    """The bytes that are kept for a person in a team."""

    owner: str
    team: str
    bytes: int
    kinds: dict[str, int] = Field(
        default_factory=dict,
        description="jobs (rows, commands, sources), files, results, logs, attempts (their rows and what is known of "
        "checkpoints), folders (on the service's disk)",
    )


class StorageTeam(Wire):
    """The bytes that are kept for a team of the caller, and what the caller may keep of its quota."""

    team: str
    title: str = ""
    mine: int = Field(0, description="bytes of the caller in this team")
    bytes: int = Field(0, description="bytes of all its members")
    limit: int | None = Field(None, description="bytes that the team may keep; null: no limit")
    share_limit: int | None = Field(None, description="bytes of it that one person may keep; null: no limit")


class StorageJob(Wire):
    """An ended job of the caller and the bytes that its deletion frees."""

    id: str
    name: str
    team: str
    ended_at: AwareDatetime
    bytes: int


class StorageReport(Wire):
    """What is kept for the caller; for an administrator what is kept for everybody, the largest account first."""

    mine: int = Field(0, description="bytes of the caller, in all teams")
    mine_kinds: dict[str, int] = Field(default_factory=dict, description=f"these bytes by kind: {KINDS}")
    teams: list[StorageTeam] = Field(default_factory=list, description="the caller's teams")
    largest: list[StorageJob] = Field(
        default_factory=list, description="ended jobs of the caller that keep the most, the largest first"
    )
    kinds: dict[str, int] = Field(default_factory=dict, description="bytes of the accounts by kind")
    accounts: list[StorageAccount] = Field(default_factory=list)
    whole: int = Field(0, description="bytes of everybody")
    person_limit: int | None = Field(None, description="bytes that one person may keep; null: no limit")
    team_limit: int | None = None
    limit: int | None = Field(None, description="bytes that all together may keep; null: no limit")
    database_bytes: int = Field(0, description="for administrators")
    free_bytes: int | None = Field(None, description="free on the fullest disk with data; null: no disk of its own")
    reserve_bytes: int | None = Field(None, description="of these, kept for ending, cancelling and deleting")


class AttemptStorage(Wire):
    """The bytes of what one attempt of a job wrote."""

    attempt: int
    log: int = 0
    result: int = Field(0, description="of its result or exception")
    ended: bool = Field(False, description="whether its output can be deleted")


class JobStorage(Wire):
    """The bytes that are kept of one job."""

    bytes: int = Field(description="that its deletion frees: files that its owner's other jobs have, too, do not count")
    kinds: dict[str, int] = Field(default_factory=dict, description="jobs, files, results, logs, attempts, folders")
    attempts: list[AttemptStorage] = Field(default_factory=list, description="the newest 100, first one first")


class StorageDelete(RequestBody):
    """Which ended jobs of a person to delete, with their files, logs, results and checkpoints."""

    owner: UserName
    ended_before: AwareDatetime | None = Field(None, description="default: all that have ended")


class StorageDeleted(Wire):
    """What was deleted."""

    jobs: int
    bytes: int = Field(description="that are not kept any more; folders and large files go some seconds later")


class StorageTrend(Wire):
    """How the bytes of all, of a team or of a person grow."""

    name: str = Field("", description="the team or the person; empty: all together")
    title: str = ""
    bytes: int = 0
    day: int | None = Field(None, description="bytes more than at the end of the day before; null: not known")
    week: int | None = Field(None, description="more than seven days ago")
    month: int | None = Field(None, description="more than thirty days ago")
    full_in_days: int | None = Field(
        None, description="days until the quota is used, by the trend of two weeks; null: it does not look so"
    )


class StorageGrowth(Wire):
    """What was kept each day, and what grows; days begin at midnight UTC."""

    first_day: int = Field(0, description="the first day that is known, in days since 1970")
    days: list[int | None] = Field(
        default_factory=list,
        description="bytes of all at the end of each day from the first on; the last is today",
    )
    all: StorageTrend = Field(default_factory=StorageTrend)
    limit: int | None = Field(None, description="bytes that all together may keep")
    quota_full_in_days: int | None = None
    disk_full_in_days: int | None = Field(None, description="until the disk has no room for large writes")
    teams: list[StorageTrend] = Field(default_factory=list, description="those that grew the most in a week")
    people: list[StorageTrend] = Field(default_factory=list)
