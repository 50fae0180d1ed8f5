"""What can go wrong with the database, in words."""

from __future__ import annotations

from .records import PolicyVersion, Workload


class StoreError(Exception):
    """The database cannot be used; the sentence says why and what to do."""


class Conflict(StoreError):
    """Somebody was faster: `existing` is what stands now."""

    def __init__(self, message: str, existing: Workload | PolicyVersion | None) -> None:
        super().__init__(message)
        self.existing = existing


class Deposed(StoreError):
    """Another service has taken over; this one must stop deciding."""

    def __init__(self, term: int, newest: int, holder: str) -> None:
        super().__init__(f"term {term} is over: {holder or 'nobody'} holds term {newest}; this service stops deciding")
        self.term = term
        self.newest = newest
        self.holder = holder
