"""Define the retention on the wire: what is kept, for how long, and what the last pass removed."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from .base import Wire


class RecordRetention(Wire):
    """One kind of record: how many there are, the oldest, and how long they are kept."""

    kind: str = Field(description="workloads, decisions or events")
    days: float | None = Field(default=None, description="days that they are kept; null for ever")
    most: int | None = Field(default=None, description="how many are kept at most")
    count: int = Field(default=0, description="as of the last pass")
    oldest: datetime | None = Field(default=None, description="workloads: the first end")


class RetentionReport(Wire):
    """The retention as of its last pass; `at` is null before the first."""

    at: datetime | None = None
    kept: list[RecordRetention] = Field(default_factory=list)
    removed: dict[str, int] = Field(default_factory=dict, description="what the last pass removed, by kind")
    folders_failed: int = Field(default=0, description="folders of removed jobs that could not be purged")
    database_bytes: int = 0
    free_bytes: int = Field(default=0, description="of these, free for new rows (SQLite)")
    artifacts: int = Field(default=0, description="large files of submissions that are kept outside the database")
    artifact_bytes: int = Field(default=0, description="bytes of these")
