"""Keep a job's output within a size limit."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from io import FileIO

from .attempt import Attempt
from .files import create_file
from .output_copy import OutputCopy

LIMIT = 64 * 2**20
"""The default limit in bytes."""
NEWEST_BYTES = 16384
"""Bytes of the output that are kept for messages: torchrun writes 4 KiB about a failure"""
LINE_SECONDS = 0.1
"""Seconds for which a note waits for the end of a line that the job is writing: Python writes one in several parts"""
NOTES_SECONDS = 2.0
"""Seconds for which the end waits for the launcher's own lines on a slow disk"""


class Log:
    """A job's output: the first half of the limit and at least the newest quarter; the middle is dropped.

    `log` is the head; `log.OFFSET` are pieces of the tail, named by the offset of their first byte.
    """

    def __init__(self, attempt: Attempt, limit: int, copy: OutputCopy | None = None) -> None:
        self._attempt = attempt
        self._copy = copy
        self._head, self._piece = limit // 2, limit // 4
        self._lock = threading.Lock()
        """of the file: a disk may hold it up for long, so that only threads that write output wait for it"""
        self._at = 0
        self._room = self._head
        self._pieces: list[str] = []
        self._newest = b""
        self._notes: deque[bytes] = deque()
        self._noted = threading.Event()
        self._writer: threading.Thread | None = None
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = self._opened("log")

    def write(self, data: bytes) -> None:
        """Append output; a full disk loses output, never the job."""
        with self._lock:
            self._write(data)

    def _write(self, data: bytes) -> None:
        self._newest = (self._newest + data)[-NEWEST_BYTES:]
        if self._copy is not None:
            self._copy.write(data)
        with contextlib.suppress(OSError):
            while data:
                if self._room <= 0:
                    self._next_piece()
                elif self._file is None:
                    self._file = self._opened("log" if not self._at else f"log.{self._at}")
                assert self._file is not None
                written = self._file.write(data[: self._room]) or 0
                data = data[written:]
                self._at += written
                self._room -= written

    def note(self, sentence: str) -> None:
        """Append a line of the launcher's own, marked with `makeway:`; it never continues a line of the job.

        A thread of its own writes it, which is waited for a moment only.
        """
        self._notes.append(f"makeway: {sentence}\n".encode())
        if self._writer is None:
            writer = threading.Thread(target=self._write_notes, daemon=True)
            try:
                writer.start()
            except RuntimeError:  # the job has used up the processes of its pod
                if self._lock.acquire(blocking=False):
                    try:
                        self._take_notes()
                    finally:
                        self._lock.release()
                return
            self._writer = writer
        self._noted.set()
        self._wait_for_notes(2 * LINE_SECONDS)

    def wait_for_notes(self) -> None:
        """Wait until all notes are written, for NOTES_SECONDS at most."""
        self._wait_for_notes(NOTES_SECONDS)

    def _wait_for_notes(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while self._notes and time.monotonic() < ends:
            time.sleep(0.002)

    def _write_notes(self) -> None:
        while True:
            self._noted.wait()
            self._noted.clear()
            ends = time.monotonic() + LINE_SECONDS
            while self._notes:
                with self._lock:
                    if self._is_between_lines() or time.monotonic() > ends:
                        self._take_notes()
                        break
                time.sleep(0.002)

    def _is_between_lines(self) -> bool:
        return not self._newest or self._newest.endswith((b"\n", b"\r"))

    def _take_notes(self) -> None:
        while self._notes:
            self._write(self._notes[0] if self._is_between_lines() else b"\n" + self._notes[0])
            self._notes.popleft()

    def last_lines(self, count: int) -> list[str]:
        """Return the newest lines of the job's output, without the launcher's own."""
        lines = self._newest.decode("utf-8", "replace").replace("\r", "\n").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("makeway: ")][-count:]

    def _next_piece(self) -> None:
        name = f"log.{self._at}"
        file = self._opened(name)
        if self._file is not None:
            self._file.close()
        self._file, self._room = file, max(self._piece, 1)
        self._pieces.append(self._attempt.path(name))
        while len(self._pieces) > 2:
            os.unlink(self._pieces.pop(0))

    def _opened(self, name: str) -> FileIO:
        """Go on in a new file; whatever the job has put in its place is none."""
        return FileIO(create_file(self._attempt.path(name)), "ab")
