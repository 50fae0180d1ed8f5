"""Notice when the clock of this machine is set, so that no time that was noted before is compared with one after it.

`World` looks at the beginning of each cycle. What was noted before a step counts as if the clock had always been as it
is now: `CorrectedTimes` for rows, `WorkloadPods` for pods. No patience or protection ends early or late by a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("makeway.clock")

MIN_STEP = 2.0
"""Seconds between the clock and the one that never jumps that count as a step; less is only how clocks drift."""
READS = 5
"""How often both clocks are read where this process was stopped in between."""


class ClockSteps:
    """The difference of the clock to one that never jumps, as it was at the last look."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] | None = None) -> None:
        """`clock` returns Unix seconds. Without `monotonic`, only steps of the system's own clock are noticed."""
        self._clock = clock
        self._monotonic = monotonic or (time.monotonic if clock is time.time else clock)
        self._ahead = self._difference()

    def now(self) -> float:
        """Return the time as if the clock had not been set since the last look, in Unix seconds."""
        return self._monotonic() + self._ahead

    def observe(self) -> float:
        """Return by how many seconds the clock was set forward since the last look, less than 0 if back, 0 if not."""
        ahead = self._difference()
        step = ahead - self._ahead
        if abs(step) < MIN_STEP:
            return 0.0
        self._ahead = ahead
        way = "forward" if step > 0 else "back"
        log.warning(
            "The clock was set %s by %.0f s: what ran and waited before is timed as without that", way, abs(step)
        )
        return step

    def _difference(self) -> float:
        for _ in range(READS):
            began = self._monotonic()
            now = self._clock()
            if self._monotonic() - began < MIN_STEP / 10:
                break
        return now - began
