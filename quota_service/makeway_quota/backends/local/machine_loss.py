"""Distinguish a launcher that vanished alone from a machine of which everything vanished at once.

Used by the local backend. Where all jobs of a machine, or the service and its jobs, end in the same moment without a
report, the machine (its container, its power) was lost; none of the jobs is to blame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from ..base import Key

TOGETHER_SECONDS = 0.5
"""Seconds in which all launchers of a lost machine vanish: signals do not reach them in one moment"""


class VanishedLaunchers:
    """The attempts whose launchers vanished without a report, and that are not concluded yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest = 0.0
        self._keys: set[Key] = set()
        self._startup_scan = True
        self.service_was_killed = False
        """whether the process before this one was killed: what vanished with it counts as lost with the machine"""

    def end_startup_scan(self) -> None:
        """Note that what an earlier process left is read: this process sees by itself what vanishes from now on."""
        self._startup_scan = self.service_was_killed = False

    def all_at_once(self, keys: Set[Key], running: int) -> bool | None:
        """Whether everything vanished together; None while others may still follow.

        `keys` are the attempts that have vanished and wait to be concluded, `running` counts the launchers that live.
        """
        if not keys:
            return None
        if keys - self._keys:
            self._newest = self._clock()
        self._keys = set(keys)
        if self._startup_scan:
            return self.service_was_killed or (len(keys) > 1 and not running)
        if self._clock() - self._newest < TOGETHER_SECONDS:
            return None
        return len(keys) > 1 and not running
