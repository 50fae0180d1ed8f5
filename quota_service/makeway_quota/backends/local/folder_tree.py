"""Measure and remove the folders that jobs have made: as deep as they like, with names that add up to any length.

Nothing here recurses, follows a link, or has more than a few folders open. `makeway.launcher.removal` removes in the
same way on other machines, where nothing but the standard library is there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def tree_bytes(path: Path) -> int:
    """Return the bytes on disk of all files below a folder; of those with several names, each name counts.

    One folder is open at a time, and two for a moment. OSError where the system has no handle left for it.
    """
    if (here := _open_folder(str(path))) < 0:
        return 0
    try:
        total, names = _scan(here)
        levels = [_Level(str(path), _identity(here), names)]
        while levels:
            if names := levels[-1].waiting:
                name = names.pop()
                if (inner := _open_folder(name, here)) < 0:
                    continue
                os.close(here)
                here = inner
                size, names = _scan(here)
                total += size
                levels.append(_Level(name, _identity(here), names))
            elif levels.pop() and levels:
                outer = _open_folder("..", here)
                os.close(here)
                here = outer
                if here < 0 or _identity(here) != levels[-1].identity:  # it was moved meanwhile, or is closed to us
                    if here >= 0:
                        os.close(here)
                    here = -1
                    here = _reopen(levels)
        return total
    finally:
        if here >= 0:
            os.close(here)


class _Level(NamedTuple):
    """A folder on the way from the top to the one that is open."""

    name: str
    identity: tuple[int, int]
    waiting: list[str]
    """The folders in it that are not measured yet"""


def _reopen(levels: list[_Level]) -> int:
    """Return a handle of the last of these levels that is where it was, and drop those behind it; -1 where none is."""
    current = -1
    try:
        for depth, level in enumerate(levels):
            inner = _open_folder(level.name, current if depth else None)
            if inner < 0 or _identity(inner) != level.identity:
                del levels[depth:]
                if inner >= 0:
                    os.close(inner)
                break
            if current >= 0:
                os.close(current)
            current = inner
    except OSError:
        if current >= 0:
            os.close(current)
        raise
    return current


def _scan(folder: int) -> tuple[int, list[str]]:
    """Return the bytes of the files in a folder, and the names of the folders in it."""
    total, names = 0, list[str]()
    with _what_goes(), os.scandir(folder) as entries:
        for entry in entries:
            with _what_goes():
                if entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total, names


def _open_folder(name: str, inside: int | None = None) -> int:
    """Return a handle of a folder, which a link is not; -1 for what is gone or closed to this process."""
    handle = -1
    with _what_goes():
        handle = os.open(name, FOLDER, dir_fd=inside)
    return handle


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


@contextmanager
def _what_goes() -> Iterator[None]:
    """Pass over what a job removes or closes meanwhile; a lack of handles is no reason to count less."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise


def remove_tree(path: Path) -> None:
    """Remove a folder with everything in it; what cannot be removed is left, and OSError says why.

    The folders in a folder are moved up to `path` before it is removed itself. Folders without write permission get it.
    """
    if not os.path.lexists(path):
        return
    with _opened(str(path)) as top:
        failed: dict[str, OSError] = {}
        while names := [name for name in os.listdir(top) if name not in failed]:
            for name in names:
                try:
                    _remove(name, top)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    failed[name] = error
        if failed:
            raise next(iter(failed.values()))
    os.rmdir(path)


def _remove(name: str, top: int) -> None:
    """Remove a file or a folder in the folder `top`, to which the folders in it are moved."""
    if _unlinked(name, top):
        return
    failure: OSError | None = None
    with _opened(name, top) as folder:
        for inner in os.listdir(folder):
            try:
                if not _unlinked(inner, folder):
                    _move_up(inner, folder, top)
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = failure or error
    if failure is not None:
        raise failure
    os.rmdir(name, dir_fd=top)


def _unlinked(name: str, folder: int) -> bool:
    """Remove a file, a link or an empty folder; return whether it is gone, which a folder with something in it is not.

    Another user's empty folder can be removed, but not moved.
    """
    if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        os.unlink(name, dir_fd=folder)
        return True
    with suppress(OSError):
        os.rmdir(name, dir_fd=folder)
        return True
    return False


def _move_up(name: str, folder: int, top: int) -> None:
    new = f"removed-{os.urandom(12).hex()}"
    try:
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    except PermissionError:  # its entry “..” is written to
        with _opened(name, folder):
            os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)


@contextmanager
def _opened(name: str, inside: int | None = None) -> Iterator[int]:
    """Open a folder, and give its owner all rights to it."""
    try:
        handle = os.open(name, FOLDER, dir_fd=inside)
    except PermissionError:
        closed = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        try:
            os.chmod(f"/proc/self/fd/{closed}", 0o700)
        finally:
            os.close(closed)
        handle = os.open(name, FOLDER, dir_fd=inside)
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        if mode & 0o700 != 0o700:
            with suppress(OSError):
                os.fchmod(handle, mode | 0o700)
        yield handle
    finally:
        os.close(handle)
