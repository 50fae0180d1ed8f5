"""Bound the connections of the server: a new one closes idle ones where there are too many.

A connection counts as idle while no request of it is answered. All people of a portal come from one address, that of
the Hub's proxy, so no number is fixed for an address: the idle connections of the address with the most of them go
first, those that never sent a request before others, the oldest first. What is answered at the moment, such as a stream
or a worker's held request, is never closed. So probes and the Hub, which connect anew, always get in.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from ..descriptors import limit

log = logging.getLogger("makeway.web")

MOST = 20_000
"""Connections at a time, where the limit of open files allows them"""
OTHER_FILES = 256
"""Open files that are kept for the database, files, jobs and requests to the Hub and Kubernetes"""
LEAST = 64
PART = 20
"""One of so many connections, or more, is closed at a time, so that the search for them costs little"""
WARN_EVERY = 60.0


class Open(Protocol):
    """One connection."""

    address: str
    idle_since: float | None
    """monotonic seconds; None while a request is answered"""
    requests: int

    def drop(self) -> None:
        """Close it without an answer."""


class Connections:
    """The open connections of one server."""

    def __init__(self, most: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: connections at a time; None: what the limit of open files allows, up to `MOST`."""
        self._most = most
        self._clock = clock
        self._warned_at: float | None = None
        self._open: set[Open] = set()

    @property
    def most(self) -> int:
        """Return how many connections may be open now."""
        return self._most or max(LEAST, min(MOST, (limit() - OTHER_FILES) * 3 // 4))

    def opened(self, connection: Open) -> None:
        """Take a new connection; close idle ones, or this one where no other is idle, if there are too many."""
        most = self.most
        if len(self._open) >= most:
            self._warn(most)
            for victim in _longest_idle(self._open, max(1, most // PART)) or [connection]:
                self._open.discard(victim)
                victim.drop()
                if victim is connection:
                    return
        self._open.add(connection)

    def closed(self, connection: Open) -> None:
        """Count a connection no more."""
        self._open.discard(connection)

    def _warn(self, most: int) -> None:
        now = self._clock()
        if self._warned_at is None or now - self._warned_at >= WARN_EVERY:
            self._warned_at = now
            address, count = Counter(each.address for each in self._open).most_common(1)[0]
            log.warning(
                "%d connections are open, the most that are possible: idle ones are closed. %d are from %s",
                most,
                count,
                address or "one address",
            )


def _longest_idle(connections: Collection[Open], count: int) -> list[Open]:
    """Return up to `count` idle connections of the address that has most of them, the first to close first."""
    idle: dict[str, list[Open]] = {}
    for each in connections:
        if each.idle_since is not None:
            idle.setdefault(each.address, []).append(each)
    if not idle:
        return []
    most: Iterable[Open] = max(idle.items(), key=lambda entry: (len(entry[1]), entry[0]))[1]
    return sorted(most, key=lambda each: (each.requests > 0, each.idle_since or 0.0))[:count]
