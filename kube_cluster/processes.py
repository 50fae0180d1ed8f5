"""Start the processes of a cluster, wait until they are ready, and find and end them again.

Every process of a cluster has the cluster's folder in its environment, and so has what it starts: they are found by
that mark after any crash, without a record that could be missing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .folder import MARK, Folder
from .problems import KubeProblem

PAUSE = 0.05
LAST_LINES = 12


def start(
    folder: Folder, name: str, command: Sequence[str | Path], environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start one program of a cluster; what it prints goes to a log file of its name."""
    with (folder.logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=os.environ | {MARK: str(folder.path)} | dict(environ or {}),
            cwd=folder.path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C in the terminal reaches only the owner, which ends the others
        )
    folder.started[name] = process
    return process


def wait_until(ready: Callable[[], bool], what: str, seconds: float, watch: Callable[[], None] | None = None) -> None:
    """Return when `ready` does; raise KubeProblem when it takes too long, or what `watch` raises."""
    end = time.monotonic() + seconds
    while not ready():
        if watch:
            watch()
        if time.monotonic() > end:
            raise KubeProblem(f"{what} was not ready after {seconds:.0f} s.")
        time.sleep(PAUSE)


def check(folder: Folder) -> None:
    """Raise KubeProblem with the last lines of its log when a program of the cluster has ended."""
    for name, process in folder.started.items():
        if (status := process.poll()) is not None:
            ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise KubeProblem(f"{name} {ended}. Its last lines:\n{last_lines(folder.logs / f'{name}.log')}")


def last_lines(log: Path) -> str:
    """Return the end of a log file, indented; a sentence when there is nothing in it."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        lines = []
    return "\n".join(f"  {line[:400]}" for line in lines) or "  (it printed nothing)"


def marked(folder: Folder) -> list[int]:
    """Return the ids of all processes that carry the mark of this cluster; zombies carry none."""
    mark = f"{MARK}={folder.path}".encode()
    result = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    result.append(int(entry))
    return result


def ends(pid: int) -> bool:
    """Whether a process that was killed has not ended yet: some of its threads are neither dead nor zombies."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            if stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] not in ("Z", "X"):
                return True
    return False


def kill_marked(folder: Folder, seconds: float = 30) -> None:
    """Kill every process of a cluster and return when all have ended; raise KubeProblem when some do not end.

    A process that ends loses its mark with its memory, and only then its open files, mounts and control group.
    """
    end = time.monotonic() + seconds
    killed: set[int] = set()
    while pids := marked(folder) or [pid for pid in killed if ends(pid)]:
        for pid in set(pids) - killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= set(pids)
        if time.monotonic() > end:
            raise KubeProblem(f"These processes of the cluster in {folder.path} do not end: {pids}.")
        time.sleep(PAUSE)
    while folder.started:
        folder.started.popitem()[1].wait()
