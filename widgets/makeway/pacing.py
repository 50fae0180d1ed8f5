"""Write text into a notebook no faster than its server forwards it: beyond its limits the server drops output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

RATE = 400_000
"""Bytes a second, of JSON; the notebook server forwards 1,000,000"""
BURST = 400_000
"""Bytes that may go at once after a pause"""
MESSAGE = 2_000
"""Bytes that each write counts at least, so that there are at most 400 messages in a second: the limit is 1,000"""
PIECE = 65_536
"""Characters of one write"""


class Budget:
    """The bytes that may be written now; it grows with time up to BURST."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep):
        self._clock, self._sleep = clock, sleep
        self._free, self._at = float(BURST), clock()

    def spend(self, size: int) -> None:
        """Wait until so many bytes may be written."""
        now = self._clock()
        self._free = min(float(BURST), self._free + (now - self._at) * RATE) - size
        self._at = now
        if self._free < 0:
            self._sleep(-self._free / RATE)


KERNEL = Budget()
"""The budget of this kernel, which all cells share: several may run one after the other"""


class Output:
    """Standard output that is paced in a notebook, and knows whether its last line is complete."""

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget if budget is not None else KERNEL if _in_notebook() else None
        self._line_ended = True

    def write(self, text: str) -> None:
        """Write text as it is."""
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            if self._budget is not None:
                self._budget.spend(max(MESSAGE, len(json.dumps(piece))))
            print(piece, end="", flush=True)
            self._line_ended = piece.endswith("\n")

    def line(self, text: str) -> None:
        """Write a line of its own, below what the last line says so far."""
        self.end_line()
        self.write(f"{text}\n")

    def end_line(self) -> None:
        """Complete the last line, where text has been written that does not end with one."""
        if not self._line_ended:
            self.write("\n")

    def mark(self, text: str) -> None:
        """Write a line that is not part of a log."""
        self.line(f"── {text}")


def _in_notebook() -> bool:
    """Whether standard output goes through a kernel to a notebook server."""
    return hasattr(sys.stdout, "pub_thread")
