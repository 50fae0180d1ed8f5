"""Repeat an order that the backend refused, within one process: the attempt stays.

Used by `Actuator`, which is refused, and by the loop, which runs a cycle when the next one is due.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection

from ..backends.base import Key

FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
"""Seconds between two tries of one attempt, which double from the first to the longest."""
DIGITS = re.compile(r"\d+")


class OrderRetries:
    """The time of the next try of each attempt that was refused; not kept over a restart."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._refused: dict[Key, tuple[float, float]] = {}
        """the monotonic time of the next try of an attempt, and the seconds before it"""

    def wait(self, key: Key) -> bool:
        """Whether an attempt was refused too recently to be tried again."""
        return key in self._refused and self._monotonic() < self._refused[key][0]

    def refused(self, key: Key) -> None:
        """Postpone the next try of an attempt, twice as long as the last time."""
        pause = min(MAX_PAUSE, 2.0 * self._refused[key][1]) if key in self._refused else FIRST_PAUSE
        self._refused[key] = self._monotonic() + pause, pause

    def postpone(self, key: Key, seconds: float) -> None:
        """Postpone the first try of an attempt, of which nothing is known yet, by so many seconds."""
        if key not in self._refused and seconds > 0:
            self._refused[key] = self._monotonic() + seconds, FIRST_PAUSE / 2

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all other attempts."""
        self._refused = {key: times for key, times in self._refused.items() if key in keys}

    def due(self) -> float | None:
        """Return the seconds until the next try of any attempt, at least FIRST_PAUSE; None where none was refused."""
        if not self._refused:
            return None
        return max(FIRST_PAUSE, min(at for at, _ in self._refused.values()) - self._monotonic())


def alike(message: str | None, other: str) -> bool:
    """Whether two reasons differ in nothing but numbers, such as the port of a connection."""
    return message is not None and DIGITS.sub("#", message) == DIGITS.sub("#", other)


def sentence(error: Exception) -> str:
    """Return an error as a sentence for people: of a system error only its text and the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__
