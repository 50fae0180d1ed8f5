"""Copy a job's output to a file descriptor, such as the launcher's own standard output in a pod.

Used for remote workers only. Its reader may be slow, or not read at all: that never holds up the job.
"""

from __future__ import annotations

import os
import select
import threading

HELD = 2**20
"""Bytes that wait for a slow reader; what comes beyond them is left out"""
CLOSE_SECONDS = 2.0
"""Seconds for which the end waits for the reader"""


class OutputCopy:
    """Copy at most `limit` bytes of output, in a thread of its own.

    Gaps, and reaching the limit, are marked in the copy.
    """

    def __init__(self, descriptor: int, limit: int) -> None:
        self._descriptor = descriptor
        self._room = limit
        self._changed = threading.Condition()
        self._held: list[bytes] = []
        self._size = 0
        """of what is held and what is being written"""
        self._missing = 0
        self._over = False
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Add output; never waits for the reader."""
        with self._changed:
            if self._over or not self._room:
                return
            part = data[: self._room]
            if self._size + len(part) > HELD:
                self._missing += len(part)
                return
            self._mark_gap()
            self._room -= len(part)
            self._hold(part)
            if not self._room:
                self._hold(b"\nmakeway: the rest of the output is not copied here\n")
            self._changed.notify()

    def close(self) -> None:
        """Write what is held, as far as the reader takes it soon."""
        with self._changed:
            self._mark_gap()
            self._over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _mark_gap(self) -> None:
        if self._missing:
            self._hold(b"\nmakeway: %d bytes are missing here, which were not read in time\n" % self._missing)
            self._missing = 0

    def _hold(self, data: bytes) -> None:
        if self._thread is None:  # not before, as the launcher forks
            thread = threading.Thread(target=self._run, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the job has used up the processes of its pod; its log has the output
                self._over = True
                return
            self._thread = thread
        self._held.append(data)
        self._size += len(data)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held or self._over)
                data, self._held = b"".join(self._held), []
            if not data:
                return
            try:
                self._write(data)
            except OSError:  # the reader is gone
                with self._changed:
                    self._over, self._held = True, []
                return
            with self._changed:
                self._size -= len(data)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process that shares the descriptor set O_NONBLOCK
                select.select([], [self._descriptor], [], 1.0)
