"""Write on standard error that the service is not reached, for people who read the log of the machine."""

from __future__ import annotations

import select
import sys
import threading
import time

WARN_SECONDS = 60.0
"""Seconds between two lines of one outage"""
MAX_MESSAGE = 300
"""Characters of a cause"""


class Outage:
    """Log an outage of the service to standard error, at most one line a minute. Thread-safe.

    What would have to wait for a reader of standard error is left out: nothing may hold up the work.
    """

    def __init__(self, address: str, program: str = "launcher") -> None:
        self._address = address
        self._program = program
        self._lock = threading.Lock()
        self._warned_at: float | None = None

    def failed(self, why: str) -> None:
        """Write the cause of a failure, unless a line of the last minute has one."""
        now = time.monotonic()
        with self._lock:
            if self._warned_at is None or now - self._warned_at >= WARN_SECONDS:
                self._warned_at = now
                cause = " ".join(why.split())[:MAX_MESSAGE]
                write_line(f"{self._program}: the service at {self._address} was not reached: {cause}")

    def over(self) -> None:
        """Write that the service is reached again, if it was not."""
        if self._warned_at is not None:
            with self._lock:
                if self._warned_at is not None:
                    self._warned_at = None
                    write_line(f"{self._program}: the service at {self._address} is reached again")


def write_line(sentence: str) -> None:
    """Write a line with the time to standard error, unless it would have to wait for its reader."""
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {sentence}\n".encode("utf-8", "replace")
    try:
        room = select.poll()
        room.register(sys.stderr.fileno(), select.POLLOUT)
        if any(event & select.POLLOUT for _, event in room.poll(0)):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
    except (OSError, ValueError, AttributeError):
        pass
