"""Bring a launcher its order and its files, and take its reports: by files on the same machine, or by HTTP (`remote`).

The launcher runs an attempt the same way with both: notices are files beside the attempt's, with a signal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from .attempt import Attempt


class Transport(Protocol):
    """The service as the launcher sees it."""

    def content(self, entry: dict[str, Any]) -> bytes:
        """Return the content of one file of the order; called once for each, in their order."""

    def begin(self, attempt: Attempt) -> None:
        """Begin to pass on orders and reports: the workers were started."""

    def finish(self, attempt: Attempt, status: dict[str, Any], note: Callable[[str], None]) -> None:
        """Report how the attempt ended; return when that is done. `note` adds a sentence to its log."""


class Beside:
    """The service on the same machine: it reads and writes the attempt's files itself."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def content(self, entry: dict[str, Any]) -> bytes:
        """Return the next bytes of the order."""
        return self._stream.read(int(entry["size"]))

    def begin(self, attempt: Attempt) -> None:
        """Close the order, which was read."""
        self._stream.close()

    def finish(self, attempt: Attempt, status: dict[str, Any], note: Callable[[str], None]) -> None:
        """Do nothing: the service reads the status from its file."""
