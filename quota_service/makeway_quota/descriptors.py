"""Raise this process's limit of open files, and remember what it was for the jobs that it starts.

Called by `main` when the service starts. Most systems start programs with a soft limit of 1,024, which is for those
that use `select`; the hard limit is what the system allows. Jobs get the soft limit that the service was started with.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress

log = logging.getLogger("makeway.main")

ENOUGH = 2**20
"""Open files that no service needs"""
FEW = 4096
"""Open files below which an administrator is told"""

_before: int | None = None


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; return what it is now."""
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _before is None:
        _before = soft
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    now = limit()
    if now < FEW:
        log.warning(
            "The service may open %d files at most, which is enough for about %d connections: raise the hard limit "
            "(LimitNOFILE= of systemd, ulimit -Hn)",
            now,
            now // 2,
        )
    return now


def limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def limit_of_jobs() -> int:
    """Return the soft limit that this process was started with."""
    return limit() if _before is None or _before == resource.RLIM_INFINITY else _before
