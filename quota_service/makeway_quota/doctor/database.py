"""Check the database: that it can be used, its version, encryption, latency, clock and connections."""

from __future__ import annotations

from collections.abc import Iterator

from ..store.database.postgres_check import ServerFacts, read_facts
from .findings import Finding
from .server import clock_skew

MIN_VERSION = 140_000
"""PostgreSQL 14, as docs/how-to/back-up-and-upgrade.md says"""
SLOW, TOO_SLOW = 0.02, 0.2
"""Seconds of one statement: a change of a job takes about ten of them"""
MIN_FREE_CONNECTIONS = 30
"""Connections that two replicas of the service need"""


def check_database(url: str) -> list[Finding]:
    """Return what is wrong with the database; StoreError, whose sentence is the finding, where it cannot be used."""
    facts = read_facts(url)
    return [] if facts is None else list(_findings(facts))


def _findings(facts: ServerFacts) -> Iterator[Finding]:
    where = "PostgreSQL"
    if facts.version < MIN_VERSION:
        yield Finding("error", f"PostgreSQL {facts.version // 10_000} is too old.", where, "Upgrade it to 14 or newer.")
    if not facts.encrypted:
        yield Finding(
            "warning",
            "The connection to PostgreSQL is not encrypted.",
            where,
            "Add sslmode=verify-full and sslrootcert to its address, where others can read the network in between.",
        )
    if facts.latency > SLOW:
        yield Finding(
            "error" if facts.latency > TOO_SLOW else "warning",
            f"A statement takes {facts.latency * 1000:.0f} ms.",
            where,
            "Use a server in the same network, or find out what keeps it busy.",
        )
    if facts.free_connections < MIN_FREE_CONNECTIONS:
        yield Finding(
            "warning",
            f"PostgreSQL has {max(0, facts.free_connections)} connections left, and Makeway uses up to "
            f"{MIN_FREE_CONNECTIONS}.",
            where,
            "Raise max_connections, or end those of other programs.",
        )
    yield from clock_skew(abs(facts.clock_skew), where)
