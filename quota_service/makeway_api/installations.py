"""Detect that another portal on this machine has the same data, as one on a restored copy has.

The service locks a file with the name of its installation as long as it lives; one that starts on a copy of its data
finds it locked. The kernel releases the lock with the process. The file lies outside the state directory, so that no
copy has it, and in a folder of this account, so that no other account can keep a portal from its start. Used by the
service, and by the Hub before it touches notebooks.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

log = logging.getLogger("makeway.installations")

FOLDERS = Path("/tmp")  # the same for every process of an account, whatever its TMPDIR
"""Where each account has a folder of its own"""


@dataclass(frozen=True, slots=True)
class RunningService:
    """The service that has locked an installation: its process, and the folder it works in ("": not known)."""

    pid: int
    folder: str

    def __str__(self) -> str:
        return f"in {self.folder} (process {self.pid})" if self.folder else f"as the process {self.pid}"


def lock(installation: str) -> IO[str] | None:
    """Lock an installation until the file is closed; None where another process of this account has locked it.

    Where the folder of this account belongs to another one, or cannot be written, nothing is locked and a warning says
    so: then a copy is not detected, and every portal starts.
    """
    try:
        descriptor = os.open(_path(installation), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("A copy of this portal on this machine would not be detected: %s", error)
        return open(os.devnull, encoding="utf-8")
    locked = open(descriptor, "r+", encoding="utf-8")  # noqa: SIM115 (held as long as the service lives)
    try:
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        locked.close()
        return None
    locked.truncate()
    locked.write(f"{os.getpid()}")
    locked.flush()
    return locked


def running_service(installation: str) -> RunningService | None:
    """Return the process that has locked an installation now, None where none of this account has."""
    try:
        descriptor = os.open(_path(installation), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, folder = file.read(20), ""  # "" where it has not written it yet
            with suppress(OSError):
                folder = os.readlink(f"/proc/{pid}/cwd")
            return RunningService(int(pid) if pid.isdecimal() else 0, folder)
    return None


def copy_problem(running: RunningService, folder: str) -> str:
    """Return why a portal cannot start beside the one that has its data."""
    return (
        f"{folder} is a copy of the data of a portal that runs on this machine, {running}: both would run the same "
        "jobs and stop each other's notebooks. Stop that one first; for a second portal, begin with an empty "
        "MAKEWAY_STATE_DIR."
    )


def _path(installation: str) -> Path:
    """Return the file of an installation; OSError where the folder is not this account's alone."""
    folder = FOLDERS / f"makeway-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    result = folder.lstat()
    if not stat.S_ISDIR(result.st_mode) or result.st_uid != os.geteuid() or result.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by other accounts; remove it")
    return folder / f"installation-{quote(installation, safe='')}"
