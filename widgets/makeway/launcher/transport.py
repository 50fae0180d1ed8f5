"""Bring a launcher its start order and files and take its reports, by files of the same machine or HTTP (`remote`).

The launcher runs an attempt the same way with both: after a SIGTERM it asks for a notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from .files import read_json

if TYPE_CHECKING:
    from .attempt import Attempt
    from .log import Log


class Transport(Protocol):
    """The service as the launcher sees it."""

    def content(self, entry: dict[str, Any]) -> bytes:
        """Return the content of one file of the start order; called once for each, in sequence."""

    def begin(self, attempt: Attempt) -> None:
        """Begin to exchange notices and reports: the workers were started."""

    def notice(self, attempt: Attempt) -> dict[str, Any]:
        """Return the newest notice, empty without one; called after a SIGTERM and periodically."""

    def failed_rank(self) -> tuple[str, int] | None:
        """Return a rank that runs elsewhere and has failed after the notice, and its exit code; None without one."""

    def finish(self, attempt: Attempt, status: dict[str, Any], log: Log, deadline: float | None = None) -> None:
        """Report how the attempt ended; return when that is done. It may add notes to the log.

        `deadline`: that of its notice, by the monotonic clock.
        """


class LocalTransport:
    """The service on the same machine: it reads and writes the attempt's files itself."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def content(self, entry: dict[str, Any]) -> bytes:
        """Return the next bytes of the start order."""
        return self._stream.read(int(entry["size"]))

    def begin(self, attempt: Attempt) -> None:
        """Close the start order, which was read."""
        self._stream.close()

    def notice(self, attempt: Attempt) -> dict[str, Any]:
        """Read the notice that the service wrote beside the attempt's files."""
        return read_json(attempt.path("notice.json"))

    def failed_rank(self) -> tuple[str, int] | None:
        """Return None: all ranks run here."""
        return None

    def finish(self, attempt: Attempt, status: dict[str, Any], log: Log, deadline: float | None = None) -> None:
        """Do nothing: the service reads the status from its file."""
