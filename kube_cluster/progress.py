"""Show the progress of a long step: a bar on a terminal, else a line a minute."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 30
EVERY_SECONDS = 60


class Progress:
    """One step with a known number of parts."""

    def __init__(self, what: str, out: TextIO | None = None) -> None:
        self._what = what
        self._out = out or sys.stderr
        self._start = time.monotonic()
        self._shown = float("-inf")
        self._open = False

    def show(self, done: int, total: int) -> None:
        """Show `done` of `total` parts."""
        now = time.monotonic()
        share = min(1.0, done / total) if total else 0.0
        passed = duration(now - self._start)
        if self._out.isatty():
            if not self._open:  # on a line of its own: a bar that is wrapped cannot be drawn again
                self._out.write(f"{self._what} …\n")
            if now - self._shown > 0.1 or done == total:
                bar = "█" * round(WIDTH * share)
                self._out.write(f"\r{bar:░<{WIDTH}} {share:4.0%}, {passed} ")
                self._shown, self._open = now, True
        elif now - self._shown > EVERY_SECONDS:
            self._out.write(f"{self._what}: {share:.0%} after {passed}\n")
            self._shown = now
        self._out.flush()

    def end(self, message: str = "done") -> None:
        """Close the step with a last line."""
        passed = duration(time.monotonic() - self._start)
        self._out.write(
            f"\r\x1b[K{message} after {passed}\n" if self._open else f"{self._what}: {message} after {passed}\n"
        )
        self._out.flush()


def duration(seconds: float) -> str:
    """Return a duration as in "1 min 30 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
