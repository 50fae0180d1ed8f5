"""Measure and remove the folders that jobs have made: as deep as they like, with names that add up to any length.

Nothing here recurses, follows a link, or has more than a few folders open. `makeway.launcher.removal` removes in the
same way on other machines, where nothing but the standard library is there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_PATH = 3000
"""Characters of a path, of which the system takes 4,095 bytes at most; with longer ones a folder is opened first"""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def tree_bytes(path: Path) -> int:
    """Return the bytes on disk of all files below a folder; of those with several names, each name counts."""
    total, opened = 0, list[int]()
    waiting = [str(path)]
    try:
        while waiting:
            folder = waiting.pop()
            if len(folder.encode(errors="surrogateescape")) > MAX_PATH:
                try:
                    opened.append(os.open(folder, FOLDER))
                except OSError:
                    continue
                folder = f"/proc/self/fd/{opened[-1]}"
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        else:
                            total += entry.stat(follow_symlinks=False).st_blocks * 512
    finally:
        for handle in opened:
            os.close(handle)
    return total


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
