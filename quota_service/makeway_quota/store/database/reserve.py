"""Keep room on the disk of an SQLite database for small writes: what ends, cancels and deletes works on a full disk.

Files of the reserve take the room while there is enough. Before a write that finds little room left, one of them is
removed; they are made again once much is free. Each write needs little, so that a job that fills the disk at the same
time takes the room of one file, not of all.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

SLICE = 4 * 2**20
SLICES = 6
LOW = 3 * 2**20
"""Free bytes below which a file of the reserve is given up before a write"""
FOLDER = "reserve"


class Reserve:
    """The files of the reserve in the folder `reserve` beside a database. Not for several threads at once."""

    def __init__(self, beside: Path) -> None:
        self._folder = beside / FOLDER
        self._slices = [self._folder / str(number) for number in range(SLICES)]

    def before_write(self) -> bool:
        """Remove a file of the reserve where little room is left; return whether there is room for a small write."""
        try:
            if free_bytes(self._folder.parent) >= LOW:
                return True
            for path in self._slices:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    log.warning("The disk of the database is full: a part of the reserve is used (%s)", path)
                    return True
        except OSError as error:
            log.debug("The reserve cannot be used: %s", error)
        return False

    def fill(self) -> bool:
        """Make the missing files where the disk then still has as much free; return whether it has."""
        try:
            for path in self._slices:
                if free_bytes(self._folder.parent) <= 2 * SLICE * SLICES:
                    return False
                if not path.exists():
                    self._make(path)
        except OSError as error:
            log.warning("The reserve of disk space cannot be made: %s", error)
            return False
        return True

    def _make(self, path: Path) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        new = path.with_suffix(".new")
        try:
            with new.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, SLICE)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free for this process on the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def disk_bytes(folder: Path) -> int:
    """Return the size of the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_blocks * disk.f_frsize
