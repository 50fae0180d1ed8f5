"""Remove the checkpoint folders of jobs that are no longer kept: `python -m makeway.launcher.removal VOLUME ID…`.

Run in a pod of the service's own that mounts the volume. What is in the folders was written by jobs: links are removed
and never followed. What belongs to another user is left, and that user is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator

JOB_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""The id of a job: no path, and nothing that is hidden."""
REPORT = "/dev/termination-log"
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_all(volume: str, names: list[str], report: str = REPORT) -> int:
    """Remove these folders of a volume; return 1 if some are left, with the reason and who owns them in the report."""
    remaining: dict[str, list[str]] = {}
    reason = ""
    for name in names:
        try:
            _remove(volume, name)
        except (OSError, ValueError) as error:
            reason = reason or f"{name}: {error}"
            owner = _other_owner(os.path.join(volume, name)) if isinstance(error, PermissionError) else -1
            remaining.setdefault(str(owner), []).append(name)
    if remaining:
        print(f"launcher: {reason}", file=sys.stderr)
        with open(report, "w", encoding="utf-8") as file:
            json.dump({"why": reason[:1000], "left": remaining}, file)
    return 1 if remaining else 0


def _remove(volume: str, name: str) -> None:
    if not JOB_ID.fullmatch(name):
        raise ValueError(f"{name!r} is not the id of a job")
    remove_tree(os.path.join(volume, name))


def remove_tree(path: str) -> None:
    """Remove a folder that a job has written to, however deep it is and whatever its rights are.

    The folders in a folder are moved up to `path` before it is removed itself, so that nothing recurses and no path
    becomes too long. What cannot be removed is left, and OSError says why.
    """
    if not os.path.lexists(path):
        return
    with _open_folder(path) as top:
        failed: dict[str, OSError] = {}
        while names := [name for name in os.listdir(top) if name not in failed]:
            for name in names:
                try:
                    _remove_from(name, top)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    failed[name] = error
        if failed:
            raise next(iter(failed.values()))
    os.rmdir(path)


def _remove_from(name: str, top: int) -> None:
    """Remove a file or a folder in the folder `top`, to which the folders in it are moved."""
    if _remove_directly(name, top):
        return
    failure: OSError | None = None
    with _open_folder(name, top) as folder:
        for inner in os.listdir(folder):
            try:
                if not _remove_directly(inner, folder):
                    _move_up(inner, folder, top)
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = failure or error
    if failure is not None:
        raise failure
    os.rmdir(name, dir_fd=top)


def _remove_directly(name: str, folder: int) -> bool:
    """Remove a file, a link or an empty folder; return whether it is gone, which a folder with something in it is not.

    Another user's empty folder can be removed, but not moved.
    """
    if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        os.unlink(name, dir_fd=folder)
        return True
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=folder)
        return True
    return False


def _move_up(name: str, folder: int, top: int) -> None:
    new = f"removed-{os.urandom(12).hex()}"
    try:
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    except PermissionError:  # its entry “..” is written to
        with _open_folder(name, folder):
            os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)


@contextlib.contextmanager
def _open_folder(name: str, inside: int | None = None) -> Iterator[int]:
    """Open a folder, and give its owner all rights to it."""
    try:
        handle = os.open(name, FOLDER_FLAGS, dir_fd=inside)
    except PermissionError:
        path_fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
        try:
            os.chmod(f"/proc/self/fd/{path_fd}", 0o700)
        finally:
            os.close(path_fd)
        handle = os.open(name, FOLDER_FLAGS, dir_fd=inside)
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        if mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):
                os.fchmod(handle, mode | 0o700)
        yield handle
    finally:
        os.close(handle)


def _other_owner(path: str) -> int:
    """Return the other user who owns a folder of those that are left; -1 without one."""
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError):
            if (owner := os.lstat(folder).st_uid) != os.geteuid():
                return owner
            with os.scandir(folder) as entries:
                waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return -1


if __name__ == "__main__":
    sys.exit(remove_all(sys.argv[1], sys.argv[2:]))
