"""Convert Unix seconds to the times of the API."""

from __future__ import annotations

from datetime import UTC, datetime


def to_optional_datetime(seconds: float | None) -> datetime | None:
    """Return the time of Unix seconds, or None for None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def to_datetime(seconds: float) -> datetime:
    """Return the time of Unix seconds."""
    return datetime.fromtimestamp(seconds, UTC)
