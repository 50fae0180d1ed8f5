"""Collect how far jobs are, and write it every few seconds: of the many steps of a job only the newest.

Reports come from the backend's thread (jobs of this machine) and from the requests of workers elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from makeway_api.models.progress import read_progress

from ...quarantine import concerns_all
from ...store.errors import StoreError
from ...store.store import Store

log = logging.getLogger("makeway.progress")

WRITE_SECONDS = 3.0
"""Seconds between two writes"""
MAX_AT_ONCE = 500
"""Jobs of one write: where more report, the others wait for the next"""


Report = tuple[int, dict[str, Any]]
"""The attempt, and what its process reported"""


class ProgressKeeper:
    """The newest reports that are not written yet. Thread-safe."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """held during a write: who waited for it finds written what was reported before"""
        self._unwritten: dict[str, Report] = {}
        self._last_error = ""
        self.written = 0
        """Counts the writes, so that pages know when to look"""

    def note(self, workload: str, attempt: int, report: object) -> None:
        """Keep what a job's process wrote for the next write; anything may be in it."""
        if (result := read_progress(report)) is None:
            return
        with self._lock:
            before = self._unwritten.get(workload)
            if before is None or before[0] <= attempt:
                self._unwritten[workload] = (attempt, result.model_dump())

    def write(self, first: Collection[str] = ()) -> None:
        """Write what was reported since the last time; StoreError keeps it for the next time.

        All jobs of `first` are written, and others as they reported first.
        """
        with self._writing:
            self._write_part(first)

    def _write_part(self, first: Collection[str]) -> None:
        with self._lock:
            named = [workload for workload in first if workload in self._unwritten]
            order = list(dict.fromkeys([*named, *self._unwritten]))
            batch = {workload: self._unwritten[workload] for workload in order[: max(MAX_AT_ONCE, len(named))]}
            for workload in batch:  # what is reported from now on comes behind what waits
                del self._unwritten[workload]
        if not batch:
            return
        try:
            self._write(batch)
        except BaseException:
            with self._lock:
                self._unwritten = batch | self._unwritten
            raise
        self.written += 1

    def _write(self, batch: Mapping[str, Report]) -> None:
        """Write reports together; where that fails by one of them, all others."""
        try:
            self._store.progress.write(batch, self._clock())
        except Exception as error:
            if concerns_all(error):
                raise
            if len(batch) > 1:
                jobs = list(batch.items())
                self._write(dict(jobs[: len(jobs) // 2]))
                self._write(dict(jobs[len(jobs) // 2 :]))
                return
            log.exception("The progress of the job %s cannot be written, and is left out", next(iter(batch)))

    async def run(self) -> None:
        """Write every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            try:
                await asyncio.to_thread(self.write)
                self._last_error = ""
            except StoreError as error:
                if str(error) != self._last_error:
                    self._last_error = str(error)
                    log.warning("The progress of jobs cannot be written: %s", error)
