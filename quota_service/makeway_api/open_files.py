"""Raise this process's limit of open files, and compute from it how many connections a server accepts.

Called when the service, or a Hub, starts. Most systems start programs with a soft limit of 1,024, which suits programs
that use `select`; a process may raise it to its hard limit. Jobs and notebooks keep the soft limit with which the
portal was started: an environment variable carries it to them.
"""

from __future__ import annotations

import logging
import os
import resource
from contextlib import suppress

log = logging.getLogger("makeway.main")

MAX_OPEN_FILES = 2**20
"""The limit that is set where the hard one is higher, or missing: no process of the portal needs more"""
RECOMMENDED_FILES = 4096
"""A limit below this one is logged as a warning"""
OTHER_FILES = 256
"""Open files that are kept for the database, files, jobs and requests to the Hub and Kubernetes"""
MAX_CONNECTIONS = 20_000
"""Connections at a time, where the limit of open files allows them"""
MIN_CONNECTIONS = 64
SOFT_LIMIT_VARIABLE = "MAKEWAY_SOFT_FILES"
"""The variable with the soft limit that the portal was started with."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        os.environ.setdefault(SOFT_LIMIT_VARIABLE, str(soft))
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    now = limit()
    if now < RECOMMENDED_FILES:
        log.warning(
            "This process may open %d files at most, which is enough for %d connections: raise the hard limit "
            "(LimitNOFILE= of systemd, ulimit -Hn)",
            now,
            connections(),
        )
    return now


def limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def connections() -> int:
    """Return how many connections a server may have open beside the other files of its process."""
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, (limit() - OTHER_FILES) * 3 // 4))


def soft_limit_of_jobs() -> int:
    """Return the soft limit that the portal was started with, which is that of jobs and notebooks."""
    before = os.environ.get(SOFT_LIMIT_VARIABLE, "")
    return min(int(before), limit()) if before.isascii() and before.isdecimal() and len(before) < 10 else limit()


def lower_limit(soft: int) -> None:
    """Set the soft limit of this process, a child before its program, to that of jobs and notebooks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
