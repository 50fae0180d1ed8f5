"""Remove everything that a cluster made: processes, network, cgroups, mounts and its folder.

Every step removes what it finds, so that the removal can be repeated after it was interrupted. A guard process does it
as soon as the owner has ended without having done it; it runs this module, which needs the standard library alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from . import cgroups, network, processes
from .commands import run
from .folder import Folder, folders, locked_registry
from .problems import KubeProblem

ROOT = Path(__file__).resolve().parent.parent


def remove(folder: Folder) -> None:
    """Remove a cluster; raise KubeProblem with what could not be removed."""
    with folder.locked():
        if not folder.path.exists():
            return
        processes.kill_marked(folder)
        for group in folder.facts().get("cgroups", []):
            cgroups.remove(Path(group))
        network.release(folder)
        if remaining := mounts(folder):
            raise KubeProblem(
                f"These mounts of the cluster in {folder.path} are left: {remaining}. `umount` them first."
            )
        # Never into another file system: a mount that was overlooked may hold data of others.
        run(["rm", "-rf", "--one-file-system", "--", folder.path])


def mounts(folder: Folder) -> list[str]:
    """Return the mount points below a cluster's folder in the namespace of this process."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    points = [line.split(" ")[4].replace("\\040", " ") for line in lines]
    return [point for point in points if point.startswith(f"{folder.path}/")]


def remove_abandoned() -> list[str]:
    """Remove every cluster whose owner has ended, and return their names."""
    with locked_registry():  # a folder that is being made has no owner yet
        abandoned = [folder for folder in folders() if not folder.owner_lives()]
    for folder in abandoned:
        remove(folder)
    return [folder.name for folder in abandoned]


def start_guard(folder: Folder) -> subprocess.Popen[bytes]:
    """Start the process that removes the cluster when its owner ends without doing so."""
    return subprocess.Popen(
        [sys.executable, "-m", "kube_cluster.teardown", str(folder.path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd="/",
        stdin=subprocess.PIPE,  # reaches its end of file when the owner ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


def guard(path: Path) -> None:
    """Wait until standard input ends, and remove the cluster."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # those that end the owner must not end the guard
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    try:
        remove(Folder(path))
    except (KubeProblem, OSError) as problem:  # no terminal is left to say it on
        with (path.parent / "guard.log").open("a", encoding="utf-8") as log:
            log.write(f"{problem}\n")


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
