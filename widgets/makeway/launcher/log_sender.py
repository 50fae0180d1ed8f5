"""Send the log of an attempt from its files, which may lack their middle; used by `remote.py`."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from .files import open_file
from .service import RequestRejected, Service

if TYPE_CHECKING:
    from .attempt import Attempt

PART = 512 * 1024
"""Bytes of an output that are sent at once"""


class LogSender:
    """Sends an attempt's log from its files, which may lack their middle."""

    def __init__(self, attempt: Attempt, service: Service) -> None:
        self._attempt = attempt
        self._service = service
        self._sent = 0
        self._whole_lines = int(attempt.order.get("gang") or 1) > 1

    def send(self, *, final: bool = False) -> None:
        """Send what is new.

        In a gang each part ends with a line, but for the last part of all, a line whose end was dropped, and one that
        is longer than a part.
        """
        while True:
            start, data, complete = self._read()
            if self._whole_lines and not complete and not (final and len(data) < PART):
                data = data[: data.rfind(b"\n") + 1] or (data if len(data) == PART else b"")
            if not data:
                return
            try:
                self._sent = self._service.append("log", start, data, start > self._sent)
            except RequestRejected as error:
                expected = error.numbers.get("expected")
                self._sent = int(expected) if isinstance(expected, int) else start + len(data)

    def _read(self) -> tuple[int, bytes, bool]:
        """Return the next bytes that are still there, where they begin, and whether what follows them was dropped."""
        begin, data = self._sent, b""
        for start, name in self._pieces():
            if start > begin + len(data):
                if data:
                    return begin, data, len(data) < PART
                begin = start
            with contextlib.suppress(OSError), open_file(self._attempt.path(name)) as file:
                file.seek(begin + len(data) - start)
                data += file.read(PART - len(data))
        return begin, data, False

    def _pieces(self) -> list[tuple[int, str]]:
        """Return the offset and the name of each file of the log, by offset."""
        with contextlib.suppress(OSError):  # the job may have removed the folder
            names = (re.fullmatch(r"log(?:\.(\d{1,18}))?", name) for name in os.listdir(self._attempt.home))
            return sorted((int(name[1] or 0), name[0]) for name in names if name)
        return []
