"""Make the pauses between two tries of a launcher; used by `remote.py`."""

from __future__ import annotations

import os

MAX_PAUSE = 10.0
"""Seconds between two tries while the service is unavailable, at most (half as much more by chance)"""


class Pause:
    """Growing pauses between tries, with some chance in them, so that workers do not come back all at once."""

    def __init__(self, max_seconds: float = MAX_PAUSE) -> None:
        self._seconds = 0.5
        self._max_seconds = max_seconds

    def next(self, minimum: float = 0.0) -> float:
        """Return the next pause in seconds."""
        seconds, self._seconds = self._seconds, min(self._max_seconds, self._seconds * 2)
        chance = int.from_bytes(os.urandom(4), "big") / 2**32  # `random` takes memory of each launcher and agent
        return max(minimum, seconds) * (0.5 + chance)
