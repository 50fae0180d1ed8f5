"""Read from /proc what the launcher has to know about a process: its state, its parent, and when it started."""

from __future__ import annotations

import contextlib

from .record import Record


class Stat(Record):
    """A process that is there; `start` in clock ticks since boot."""

    state: str
    parent: int
    start: int

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended: one that its parent has not waited for is still there."""
        return self.state not in "ZX"


def stat(pid: int) -> Stat | None:
    """Return what /proc/PID/stat says of a process; None if it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before may have any characters
        return Stat(fields[0], int(fields[1]), int(fields[19]))
    return None
