"""Remember the versions of rows that this process read or wrote, so that they need not be read again."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ..records import Workload

ENDED_KEPT = 10_000
"""Workloads that ended whose versions are remembered."""


class KnownRows:
    """Live rows by id and the versions of ended ones. Any thread may add rows, and look one up without a lock."""

    def __init__(self) -> None:
        self.live: dict[str, Workload] = {}
        """live rows that the listeners were called with"""
        self.read: dict[str, Workload] = {}
        """live rows that were read as a whole, and that no listener was called with"""
        self.ended: dict[str, int] = {}
        """versions of the last workloads that ended, so that the change feed need not read them again"""
        self._lock = threading.Lock()

    def add(self, rows: Iterable[Workload]) -> None:
        """Add rows that were committed; one that is older than what is known changes nothing."""
        with self._lock:
            for row in rows:
                self.read.pop(row.id, None)
                if self._newest(row.id) > row.version:
                    continue
                self.live.pop(row.id, None)
                self.ended.pop(row.id, None)
                if row.live:
                    self.live[row.id] = row
                else:
                    self.ended[row.id] = row.version
            while len(self.ended) > ENDED_KEPT:
                del self.ended[next(iter(self.ended))]

    def add_read(self, rows: Iterable[Workload]) -> None:
        """Add all live rows as they were read, except those that are known already.

        No listener was called with them, so their end has to be reported.
        """
        with self._lock:
            self.read.update((row.id, row) for row in rows if not self._newest(row.id))

    def all_live(self) -> dict[str, Workload]:
        """Return every live row that this process may hold."""
        with self._lock:
            return self.read | self.live

    def _newest(self, id: str) -> int:
        live = self.live.get(id)
        return max(live.version if live is not None else 0, self.ended.get(id, 0))
