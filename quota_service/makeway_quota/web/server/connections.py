"""Bound the connections of the server: a new one closes idle ones where there are too many.

A connection counts as idle while no request of it is answered, and while its reader takes nothing of the answer. All
people of a portal come from one address, that of the Hub's proxy, so no number is fixed for an address: idle
connections without a login go first, of the address with the most of them, those that never sent a request before
others, the oldest first. What is answered at the moment, such as a stream or a worker's held request, is never closed.

Where none is idle, some more connections are taken: on them only probes and the Hub's spawner are answered, others are
told to come again. So the Hub, which starts and ends notebooks for all, and probes, by which a service that is only
full would be restarted, get in however many workers and people there are.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from makeway_api import open_files

log = logging.getLogger("makeway.web")

RESERVED = 64
RESERVED_PART = 10
"""Of those that are possible, one connection of so many, and `RESERVED` at least, only probes and the Hub's spawner
use, where all others are busy"""
YOUNG_SECONDS = 1.0
"""A connection is closed before only where no more are possible: its request may be on its way"""
PART = 20
"""One of so many connections, or more, is closed at a time, so that the search for them costs little"""
WARN_EVERY = 60.0
PROBES = (b"/healthz", b"/readyz")
MAX_TOKENS = 1000
CONNECTION = "makeway.connection"
"""Key of the connection in the scope of a request"""


class Open(Protocol):
    """One connection."""

    address: str
    idle_since: float | None
    """monotonic seconds; None while a request is answered"""
    requests: int
    logged_in: bool
    """whether a request on it had a valid token or login"""

    def drop(self) -> None:
        """Close it without an answer."""


class SpawnerTokens:
    """The tokens of the Hub's spawner, as far as the Hub has named their holder, as digests."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, token: str) -> None:
        """Remember a token whose holder may take leases for others."""
        if len(self._digests) < MAX_TOKENS:
            self._digests.add(hashlib.sha256(token.encode()).digest())

    def has(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether a request carries one of them."""
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        return hashlib.sha256(sent.partition(b" ")[2].strip()).digest() in self._digests


class Connections:
    """The open connections of one server."""

    def __init__(
        self,
        limit: int | None = None,
        tokens: SpawnerTokens | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit`: connections at a time; None: what the limit of open files allows (`open_files.connections`)."""
        self._limit = limit
        self._tokens = tokens or SpawnerTokens()
        self._clock = clock
        self._warned_at: float | None = None
        self._open: set[Open] = set()
        self._beyond: set[Open] = set()

    @property
    def limit(self) -> int:
        """Return how many connections may be open now, with those that are reserved."""
        return self._limit or open_files.connections()

    @property
    def for_all(self) -> int:
        """Return how many of them anyone may use."""
        limit = self.limit
        return limit - min(max(RESERVED, limit // RESERVED_PART), limit // 4)

    def opened(self, connection: Open) -> None:
        """Take a new connection; close idle ones, or reserve this one where none is idle, if there are too many."""
        maximum, for_all = self.limit, self.for_all
        if len(self._open) >= for_all:
            self._warn(for_all)
            victims = self._victims(for_all, YOUNG_SECONDS)
            if not victims and len(self._open) >= maximum:
                victims = self._victims(for_all, 0.0)
            for victim in victims:
                self.closed(victim)
                victim.drop()
            if not victims and len(self._open) >= maximum:
                connection.drop()
                return
            if len(self._open) >= for_all:
                self._beyond.add(connection)
        self._open.add(connection)

    def admits(self, connection: Open, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether a request on a connection is answered: on a reserved one those of probes and of the spawner are."""
        if connection not in self._beyond:
            return True
        if len(self._open) - len(self._beyond) < self.for_all:
            self._beyond.discard(connection)
            return True
        return target.partition(b"?")[0].endswith(PROBES) or self._tokens.has(headers)

    def closed(self, connection: Open) -> None:
        """Count a connection no more."""
        self._open.discard(connection)
        self._beyond.discard(connection)

    def _victims(self, for_all: int, seconds: float) -> list[Open]:
        """Return which connections go, of those that were idle for so long."""
        before = self._clock() - seconds
        return _closable(self._open, max(1, for_all // PART), before)

    def _warn(self, limit: int) -> None:
        now = self._clock()
        if self._warned_at is None or now - self._warned_at >= WARN_EVERY:
            self._warned_at = now
            address, count = Counter(connection.address for connection in self._open).most_common(1)[0]
            log.warning(
                "%d connections are open, the most that are possible: idle ones are closed. %d are from %s",
                limit,
                count,
                address or "one address",
            )


def _closable(connections: Collection[Open], count: int, before: float) -> list[Open]:
    """Return up to `count` connections of one address that are idle since `before`, the first to close first.

    Those without a login go before all others.
    """
    idle: dict[str, list[Open]] = {}
    candidates = [
        connection
        for connection in connections
        if connection.idle_since is not None and connection.idle_since <= before
    ]
    for connection in [connection for connection in candidates if not connection.logged_in] or candidates:
        idle.setdefault(connection.address, []).append(connection)
    if not idle:
        return []
    largest: Iterable[Open] = max(idle.items(), key=lambda entry: (len(entry[1]), entry[0]))[1]
    return sorted(largest, key=lambda connection: (connection.requests > 0, connection.idle_since or 0.0))[:count]


def note_login(scope: Mapping[str, Any]) -> None:
    """Note that the connection of a request has a login: it is not closed before those without one."""
    connection = scope.get(CONNECTION)
    if connection is not None:
        connection.logged_in = True
