"""Protocol through which remote backends read reports of their workers; `control/workers/channel.py` implements it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from makeway_api.models.attempts import WorkerReportIn

from ..base import Key
from .workers import WorkerStatus


class Channel(Protocol):
    """The reports, the outputs and the credentials of workers that are no processes of the service."""

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a worker reports something new."""

    async def refresh(self) -> bool:
        """Read what workers reported to any replica; return whether there is something new."""

    def worker_statuses(self) -> Mapping[Key, Mapping[int, WorkerStatus]]:
        """Return the workers that were heard of, by attempt and number."""

    def changed(self) -> set[Key]:
        """Return the attempts whose workers reported something new, or were forgotten, since the last call."""

    def silent(self, seconds: float) -> Mapping[Key, int]:
        """Map each attempt to a worker that has neither reported for `seconds` nor ended.

        Time in which the service itself was not running does not count.
        """

    async def record_final_reports(
        self, ends: Mapping[tuple[str, int, int], WorkerReportIn]
    ) -> Collection[tuple[str, int, int]]:
        """Record ends of workers that their hosts report; not of one that reported an end itself, or never began.

        Return the workers whose end could not be recorded.
        """

    async def forget(self, workload: str, attempt: int) -> None:
        """Drop the reports of an attempt whose end is recorded; what it sent stays."""

    def credentials(self, workload: str, attempt: int, worker: int) -> tuple[str, str]:
        """Return the path below the service's address that a worker has to itself, and its first token."""

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Return as `Backend.log`."""

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return as `Backend.log_gap`."""

    async def output(self, workload: str, attempt: int, kind: str, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return bytes of a result or an exception and the size of the whole; None without one."""
