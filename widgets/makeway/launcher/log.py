"""Keep a job's output within a size limit."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from .attempt import Attempt
from .output_copy import OutputCopy

LIMIT = 64 * 2**20
"""The default limit in bytes."""
LINE_SECONDS = 0.1
"""Seconds for which a note waits for the end of a line that the job is writing: Python writes one in several parts"""


class Log:
    """A job's output: the first half of the limit and at least the newest quarter; the middle is dropped.

    `log` is the head; `log.OFFSET` are pieces of the tail, named by the offset of their first byte.
    """

    def __init__(self, attempt: Attempt, limit: int, copy: OutputCopy | None = None) -> None:
        self._attempt = attempt
        self._copy = copy
        self._head, self._piece = limit // 2, limit // 4
        self._lock = threading.Lock()
        self._file = open(attempt.path("log"), "ab", buffering=0)  # noqa: SIM115
        self._at = self._file.tell()
        self._room = self._head - self._at
        self._pieces: list[str] = []
        self._newest = b""

    def write(self, data: bytes) -> None:
        """Append output; a full disk loses output, never the job."""
        with self._lock:
            self._write(data)

    def _write(self, data: bytes) -> None:
        self._newest = (self._newest + data)[-4096:]
        if self._copy is not None:
            self._copy.write(data)
        with contextlib.suppress(OSError):
            while data:
                if self._room <= 0:
                    self._next_piece()
                part, data = data[: self._room], data[self._room :]
                self._file.write(part)
                self._at += len(part)
                self._room -= len(part)

    def note(self, sentence: str) -> None:
        """Append a line of the launcher's own, marked with `makeway:`; it never continues a line of the job."""
        line, ends = f"makeway: {sentence}\n".encode(), time.monotonic() + LINE_SECONDS
        while True:
            with self._lock:
                between = not self._newest or self._newest.endswith((b"\n", b"\r"))
                if between or time.monotonic() > ends:
                    self._write(line if between else b"\n" + line)
                    return
            time.sleep(0.002)

    def last_lines(self, count: int) -> list[str]:
        """Return the newest lines of the job's output, without the launcher's own."""
        lines = self._newest.decode("utf-8", "replace").replace("\r", "\n").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("makeway: ")][-count:]

    def _next_piece(self) -> None:
        self._file.close()
        name = self._attempt.path(f"log.{self._at}")
        self._file = open(name, "ab", buffering=0)  # noqa: SIM115
        self._room = max(self._piece, 1)
        self._pieces.append(name)
        while len(self._pieces) > 2:
            os.unlink(self._pieces.pop(0))
