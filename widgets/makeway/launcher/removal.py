"""Remove the checkpoint folders of jobs that are no longer kept: `python -m makeway.launcher.removal VOLUME ID…`.

Run in a pod of the service's own that mounts the volume. What is in the folders was written by jobs: links are removed
and never followed. What belongs to another user is left, and that user is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import sys

JOB_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""The id of a job: no path, and nothing that is hidden."""
REPORT = "/dev/termination-log"


def remove_all(volume: str, names: list[str], report: str = REPORT) -> int:
    """Remove these folders of a volume; return 1 if some are left, with the reason and who owns them in the report."""
    remaining: dict[str, list[str]] = {}
    why = ""
    for name in names:
        try:
            _remove(volume, name)
        except (OSError, RecursionError, ValueError) as error:
            why = why or f"{name}: {error}"
            owner = _other_owner(os.path.join(volume, name)) if isinstance(error, PermissionError) else -1
            remaining.setdefault(str(owner), []).append(name)
    if remaining:
        print(f"launcher: {why}", file=sys.stderr)
        with open(report, "w", encoding="utf-8") as file:
            json.dump({"why": why[:1000], "left": remaining}, file)
    return 1 if remaining else 0


def _remove(volume: str, name: str) -> None:
    if not JOB_ID.fullmatch(name):
        raise ValueError(f"{name!r} is not the id of a job")
    remove_tree(os.path.join(volume, name))


def remove_tree(path: str) -> None:
    """Remove a folder that a job has written to, also where it has made folders read-only; OSError with the reason."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):  # a job may have made folders read-only
        _make_writable(path)
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        shutil.rmtree(path)  # raises why


def _make_writable(path: str) -> None:
    """Add all rights of the owner to a folder and to those below it."""
    _open_up(path, None)
    for _, folders, _, inside in os.fwalk(path):
        for name in folders:
            _open_up(name, inside)


def _open_up(name: str, inside: int | None) -> None:
    """Add all rights of the owner to one folder, unless it is a link or another user's."""
    with contextlib.suppress(OSError):
        folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
        try:
            os.chmod(f"/proc/self/fd/{folder}", stat.S_IMODE(os.fstat(folder).st_mode) | 0o700)
        finally:
            os.close(folder)


def _other_owner(path: str) -> int:
    """Return the other user who owns a folder of those that are left; -1 without one."""
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            if (owner := os.lstat(folder).st_uid) != os.geteuid():
                return owner
    return -1


if __name__ == "__main__":
    sys.exit(remove_all(sys.argv[1], sys.argv[2:]))
