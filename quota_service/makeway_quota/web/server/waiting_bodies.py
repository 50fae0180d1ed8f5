"""Count request bodies and bound them: those that arrive, and those that lie on disk until they are processed.

Each bound is one for all callers and one for each, so that one caller's slow or large bodies keep no other out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

MIN_COUNTED = 8 * 2**20
"""Bytes that every body on disk counts for at least, so that the number of open files is bounded, too"""


class TooManyBytes(Exception):
    """The bodies on disk have reached the limit of all callers, or of this one."""


class TooManyBodies(Exception):
    """As many bodies arrive at once as all callers, or this one, may send."""


class ArrivingBodies:
    """The bodies that arrive, of all callers and of each; used on the event loop only.

    The last `reserved` places are for the spawner: people who open slow uploads do not keep sessions from starting.
    """

    def __init__(self, max_bodies: int, max_bodies_per_caller: int, reserved: int) -> None:
        self._max_bodies = max_bodies
        self._max_bodies_per_caller = max_bodies_per_caller
        self._reserved = min(reserved, max_bodies // 2)
        self._by_caller: Counter[str] = Counter()
        self.total = 0

    @contextmanager
    def of(self, caller: str, spawner: bool) -> Iterator[None]:
        """Count one body of a caller until the end of the block; TooManyBodies beyond a limit."""
        max_bodies = self._max_bodies if spawner else self._max_bodies - self._reserved
        if self.total >= max_bodies or (not spawner and self._by_caller[caller] >= self._max_bodies_per_caller):
            raise TooManyBodies
        self.total += 1
        self._by_caller[caller] += 1
        try:
            yield
        finally:
            self.total -= 1
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]


class WaitingBodies:
    """The bytes on disk of bodies to be processed, of all callers and of each; used on the event loop only."""

    def __init__(self, max_bytes: int, max_bytes_per_caller: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_caller = max_bytes_per_caller
        self._by_caller: Counter[str] = Counter()
        self.total = 0

    @contextmanager
    def of(self, caller: str) -> Iterator[WaitingBody]:
        """Count one body of a caller until the end of the block."""
        body = WaitingBody(self, caller)
        try:
            yield body
        finally:
            self._add(caller, -body.counted)

    def grow(self, caller: str, by: int) -> None:
        """Count more bytes of a caller; TooManyBytes beyond a limit."""
        if self.total + by > self._max_bytes or self._by_caller[caller] + by > self._max_bytes_per_caller:
            raise TooManyBytes
        self._add(caller, by)

    def _add(self, caller: str, by: int) -> None:
        self.total += by
        self._by_caller[caller] += by
        if self._by_caller[caller] <= 0:
            del self._by_caller[caller]


class WaitingBody:
    """What one body counts for."""

    def __init__(self, bodies: WaitingBodies, caller: str) -> None:
        self._bodies = bodies
        self._caller = caller
        self.counted = 0

    def grow_to(self, size: int) -> None:
        """Count a body on disk of this size; TooManyBytes where there is no room for it."""
        by = max(size, MIN_COUNTED) - self.counted
        if by > 0:
            self._bodies.grow(self._caller, by)
            self.counted += by
