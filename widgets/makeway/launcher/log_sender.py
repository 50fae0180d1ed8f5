"""Send the log of an attempt from its files, which may lack their middle; used by `remote.py`."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from .service import Rejected, Service

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
        """Send what is new; in a gang whole lines, unless it is the end."""
        while True:
            start, data = self._read()
            if self._whole_lines and not final and len(data) < PART:
                data = data[: data.rfind(b"\n") + 1]
            if not data:
                return
            try:
                self._sent = self._service.append("log", start, data, start > self._sent)
            except Rejected as error:
                expected = error.numbers.get("expected")
                self._sent = int(expected) if isinstance(expected, int) else start + len(data)

    def _read(self) -> tuple[int, bytes]:
        """Return the next bytes that are still there, and where they begin."""
        pieces = []
        with contextlib.suppress(OSError):  # the job may have removed the folder
            for name in os.listdir(self._attempt.home):
                if re.fullmatch(r"log(\.\d{1,18})?", name):
                    pieces.append((int(name[4:] or 0), name))
        for start, name in sorted(pieces):
            with contextlib.suppress(OSError), open(self._attempt.path(name), "rb") as file:
                begin = max(self._sent, start)
                file.seek(begin - start)
                if data := file.read(PART):
                    return begin, data
        return self._sent, b""
