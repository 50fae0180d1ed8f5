"""Raise this process's limit of open files, and derive the connections it allows and the limit of child processes.

Called when the service, or a Hub, starts. Most systems start programs with a soft limit of 1,024, which is for those
that use `select`; the hard limit is what the system allows. Jobs and notebooks get the soft limit that the first of
these processes was started with: it is passed on in the environment.
"""

from __future__ import annotations

import logging
import os
import resource
from contextlib import suppress

log = logging.getLogger("makeway.main")

ENOUGH = 2**20
"""Open files that no process of the portal needs"""
RECOMMENDED_FILES = 4096
"""Open files below which an administrator is told"""
OTHER_FILES = 256
"""Open files that are kept for the database, files, jobs and requests to the Hub and Kubernetes"""
MAX_CONNECTIONS = 20_000
"""Connections at a time, where the limit of open files allows them"""
MIN_CONNECTIONS = 64
BEFORE = "MAKEWAY_SOFT_FILES"
"""The variable with the soft limit that the portal was started with."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        os.environ.setdefault(BEFORE, str(soft))
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
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
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def connections() -> int:
    """Return how many connections a server may have open beside the other files of its process."""
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, (limit() - OTHER_FILES) * 3 // 4))


def limit_of_users() -> int:
    """Return the soft limit that the portal was started with, which is that of jobs and notebooks."""
    before = os.environ.get(BEFORE, "")
    return min(int(before), limit()) if before.isascii() and before.isdecimal() and len(before) < 10 else limit()


def lower_limit(soft: int) -> None:
    """Set the soft limit of this process, a child before its program, to that of jobs and notebooks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
