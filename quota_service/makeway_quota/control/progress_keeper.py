"""Collect how far jobs are, and write it every few seconds: of the many steps of a job only the newest.

Reports come from the backend's thread (jobs of this machine) and from the requests of workers elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from makeway_api.models.progress import read_progress

from ..store.errors import StoreError
from ..store.store import Store

log = logging.getLogger("makeway.progress")

EVERY = 3.0
"""Seconds between two writes"""
MOST_AT_ONCE = 500
"""Jobs of one write: where more report, the others wait for the next"""


class ProgressKeeper:
    """The newest reports that are not written yet. Thread-safe."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._unwritten: dict[str, tuple[int, dict[str, Any]]] = {}
        self._trouble = ""
        self.written = 0
        """Counts the writes, so that pages know when to look"""

    def note(self, workload: str, attempt: int, given: object) -> None:
        """Keep what a job's process wrote for the next write; anything may be in it."""
        if (found := read_progress(given)) is None:
            return
        with self._lock:
            before = self._unwritten.get(workload)
            if before is None or before[0] <= attempt:
                self._unwritten[workload] = (attempt, found.model_dump())

    def write(self) -> None:
        """Write what was reported since the last time, the first jobs first; StoreError keeps it for the next time."""
        with self._lock:
            part = dict(list(self._unwritten.items())[:MOST_AT_ONCE])
        if not part:
            return
        self._store.progress.write(part, self._clock())
        self.written += 1
        with self._lock:
            for workload, report in part.items():
                if self._unwritten.get(workload) is report:
                    del self._unwritten[workload]

    async def run(self) -> None:
        """Write every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                await asyncio.to_thread(self.write)
                self._trouble = ""
            except StoreError as error:
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    log.warning("The progress of jobs cannot be written: %s", error)
