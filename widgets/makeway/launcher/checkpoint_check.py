"""Check that a folder of checkpoints can be written to, before a job computes for hours what it could not keep."""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from .durations import duration
from .files import create_file, write_whole

SECONDS = 60.0
"""Seconds that a volume may take: a network file system that hangs never answers"""
SIZE = 65_536
"""Bytes that are written: fewer may fit where nothing else does"""
PREFIX = ".makeway-check-"
MAX_AGE = 3600.0
"""Age of a file that a check which was killed has left behind, after which another one removes it"""
CANNOT_CREATE = 73
"""The exit code of an attempt whose checkpoints could not be kept, as sysexits.h has it (EX_CANTCREAT)"""
NOT_ALLOWED = (
    "{who} may not write there; an NFS server applies no fsGroup and may squash users, so the export has to let this "
    "user or group write"
)
CAUSES = {
    errno.EACCES: NOT_ALLOWED,
    errno.EPERM: NOT_ALLOWED,
    errno.EROFS: "its volume is read-only",
    errno.ENOSPC: "its volume is full",
    errno.EDQUOT: "the quota of its volume is used up",
    errno.ESTALE: "its volume is gone from its server (stale file handle)",
    errno.EIO: "its volume answers with an input/output error",
    errno.ENOTDIR: "something that is no folder is in its place",
}


def write_failure(folder: str, seconds: float = SECONDS) -> str:
    """Return why a folder, which is made where it is missing, keeps no checkpoint; "" if it does.

    A file is written, flushed, renamed and removed, as a checkpoint is. That takes at most so many seconds: what does
    not answer by then is left to a thread.
    """
    result = []
    check = threading.Thread(target=lambda: result.append(_failure(folder)), daemon=True)
    check.start()
    check.join(seconds)
    cause = result[0] if result else f"its volume did not answer within {duration(seconds)}"
    return f"no checkpoint can be kept in {folder}: {cause}. An administrator has to act" if cause else ""


def _failure(folder: str) -> str:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _write(folder)
    except OSError as error:
        who = f"user {os.geteuid()} (group {os.getegid()})"
        known = CAUSES.get(error.errno or 0)
        return known.format(who=who) if known else (error.strerror or str(error)).lower()
    return ""


def _write(folder: str) -> None:
    name = os.path.join(folder, PREFIX + os.urandom(8).hex())
    try:
        descriptor = create_file(name)
        try:
            write_whole(descriptor, b"\0" * SIZE)
            os.fsync(descriptor)
            now = os.fstat(descriptor).st_mtime  # by the clock of the volume
        finally:
            os.close(descriptor)  # may be the first to fail, on a network file system
        os.replace(name, f"{name}.new")
    finally:
        for path in (name, f"{name}.new"):
            with contextlib.suppress(OSError):
                os.unlink(path)
    with contextlib.suppress(OSError):
        _remove_leftovers(folder, now - MAX_AGE)


def _remove_leftovers(folder: str, before: float) -> None:
    """Remove the files of checks that were killed; those of other workers may be in use."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(PREFIX) and os.lstat(path).st_mtime < before:
            os.unlink(path)
