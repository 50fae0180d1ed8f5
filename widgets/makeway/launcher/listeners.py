"""Read which processes of a worker listen for the notice themselves, and how far they are with it.

`makeway.checkpoint` writes the files: `PID.START.NAMESPACE` at its first poll, with `.heard` once it has seen the
notice, with `.acknowledged` once it has called `stop()`. Used by `notice_delivery.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from itertools import islice

NAME = re.compile(r"(\d{1,9})\.(\d{1,19})\.(\d{1,19})(\.heard|\.acknowledged)?")
MOST = 100_000
"""Files of a folder that are read: the job may have put anything there"""


@dataclass(frozen=True)
class Listener:
    """A living process that polls for the notice."""

    pid: int
    """0 for one of another pid namespace"""
    heard: bool
    """Whether it has seen the notice"""
    acknowledged: bool
    """Whether it, or a process that started it, has saved and ends"""


class Listeners:
    """The listening processes of one worker, from the folder where they write."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def acknowledged(self) -> bool:
        """Whether any process has acknowledged the notice, also one that has ended since."""
        return any("acknowledged" in marks for marks in self._marks().values())

    def heard(self) -> list[bool]:
        """Return for each process that ever listened whether it has seen the notice."""
        return [bool(marks) for marks in self._marks().values()]

    def alive(self) -> list[Listener]:
        """Return the processes that listen and have not ended, by pid."""
        living: list[tuple[int, set[str]]] = []
        for (pid, start, namespace), marks in sorted(self._marks().items()):
            if namespace != _namespace():  # its pid means nothing here
                living.append((0, marks))
            elif _is_alive(pid, start):
                living.append((pid, marks))
        done = {pid for pid, marks in living if pid and "acknowledged" in marks}
        return [
            Listener(pid, bool(marks), "acknowledged" in marks or bool(done.intersection(_ancestors(pid))))
            for pid, marks in living
        ]

    def _marks(self) -> dict[tuple[int, int, int], set[str]]:
        """Return the marks of each process by pid, start and pid namespace."""
        found: dict[tuple[int, int, int], set[str]] = {}
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in islice(entries, MOST):
                match = NAME.fullmatch(entry.name)
                if match:
                    marks = found.setdefault((int(match[1]), int(match[2]), int(match[3])), set())
                    marks.update({match[4][1:]} if match[4] else ())
        return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _namespace() -> int:
    """Return the pid namespace of this process; -1 where /proc does not have it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return -1


def _is_alive(pid: int, start: int) -> bool:
    """Whether the process that started then has not ended."""
    fields = _stat(pid)
    return len(fields) > 19 and fields[19] == str(start) and fields[0] not in "ZX"


def _ancestors(pid: int) -> list[int]:
    """Return the pids of the processes above one, nearest first."""
    found: list[int] = []
    while pid > 1 and len(found) < 100:
        fields = _stat(pid)
        pid = int(fields[1]) if len(fields) > 1 else 0
        found.append(pid)
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the command's name; none if the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
    return []
