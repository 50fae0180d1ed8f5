"""Read which processes of a worker listen for the notice themselves, and how far they are with it.

`makeway.checkpoint` writes the files: `PID.START.NAMESPACE` at its first poll, with `.heard` once it has seen the
notice, with `.acknowledged` once it has called `stop()`, with `.saving` while it saves, and with `.exited` once it
exits, and not of an exception. The first and the last of them hold its rank. The launcher adds `signalled`. Used by
`notice_delivery.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from .processes import stat

NAME = re.compile(r"(\d{1,9})\.(\d{1,19})\.(\d{1,19})(\.heard|\.acknowledged|\.saving|\.exited)?")
MAX_ENTRIES = 100_000
"""Files of a folder that are read: the job may have put anything there"""
MAX_ENVIRONMENT = 2**20
"""Bytes of a process's environment that are read"""
_NEAREST = ("heard", "unheard", "acknowledged", "ended")
"""The states of a rank's processes: the first of them that any has is that of the rank"""


@dataclass(frozen=True)
class Listener:
    """A living process that polls for the notice."""

    pid: int
    """0 for one of another pid namespace"""
    heard: bool
    """Whether it has seen the notice"""
    acknowledged: bool
    """Whether it, or a process that started it, has saved and ends; or one that it started, where it only waits"""


class Process(NamedTuple):
    """What identifies a process; `start` in clock ticks since boot."""

    pid: int
    start: int
    namespace: int


class Listeners:
    """The listening processes of one worker, from the folder where they write."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._ancestors: dict[Process, list[int]] = {}
        """The pids above each process that was found alive, nearest first"""
        self._ranks: dict[Process, str] = {}
        """The rank of each of them in its environment, "" without one"""

    def mark_signalled(self) -> None:
        """Add the file by which processes know that their signal is that of the notice, and none of their parent."""
        with contextlib.suppress(OSError):
            path = os.path.join(self.folder, "signalled")
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))

    def acknowledged(self) -> bool:
        """Whether any process has acknowledged the notice, also one that has ended since."""
        return any("acknowledged" in marks for marks in self._marks().values())

    def heard(self) -> list[bool]:
        """Return for each process that ever listened whether it has seen the notice."""
        return [bool(marks) for marks in self._marks().values()]

    def saving(self) -> list[bool]:
        """Return for each save that began and did not come to its end whether its process lives."""
        here = _namespace()
        saves = [process for process, mark in self._files() if mark == "saving"]
        return [process.namespace != here or _is_alive(process) for process in saves]

    def exited(self) -> list[str]:
        """Return the ranks that have exited, and not of an exception, in the order of their exits.

        One that an agent such as torchrun has started again has not.
        """
        exits: list[tuple[float, int, str]] = []
        started: dict[str, int] = {}
        for process, mark in self._files():
            path = os.path.join(self.folder, ".".join([*map(str, process), *filter(None, [mark])]))
            if mark in ("", "exited") and (data := _first_bytes(path, 9)).isdigit():
                rank = data.decode("ascii")
                started[rank] = max(process.start, started.get(rank, 0))
                if mark:
                    exits.append((_changed_at(path), process.start, rank))
        return [rank for _, start, rank in sorted(exits) if start == started[rank]]

    def ended_since(self) -> bool:
        """Whether a process that listened since the notice has ended, and none listens any more."""
        marks = self._marks()
        since = {process for process in marks if process in self._ancestors or "heard" in marks[process]}
        here = _namespace()
        return bool(since) and not any(process.namespace != here or _is_alive(process) for process in marks)

    def alive(self) -> list[Listener]:
        """Return the processes that listen and have not ended, by pid; they are remembered for `unsaved`."""
        marks = self._marks()
        here = _namespace()  # in another one a pid means something else
        living = [process for process in sorted(marks) if process.namespace != here or _is_alive(process)]
        for process in living:
            if process not in self._ancestors:
                is_here = process.namespace == here
                self._ancestors[process] = _ancestors(process.pid) if is_here else []
                self._ranks[process] = _rank(process.pid) if is_here else ""
        done = self._done(marks)
        return [
            Listener(process.pid if process.namespace == here else 0, bool(marks[process]), process in done)
            for process in living
        ]

    def unsaved(self) -> bool:
        """Whether a process that has listened since the notice has not acknowledged it, also one that has ended.

        One that had ended before the notice has no part in it.
        """
        marks = self._marks()
        since = {process for process in marks if process in self._ancestors or "heard" in marks[process]}
        return not since <= self._done(marks)

    def ranks(self) -> dict[str, str]:
        """Return how far each rank is with the notice that was found alive since.

        `acknowledged`; `heard` or `unheard` while it lives; `ended` where it has ended without an acknowledgement. Of
        several processes of a rank, one that lives and has not acknowledged decides.
        """
        self.alive()  # those that have come since
        marks = self._marks()
        done = self._done(marks)
        by_rank: dict[str, list[str]] = {}
        for process, rank in self._ranks.items():
            if process in done:
                state = "acknowledged"
            elif _is_alive(process):
                state = "heard" if marks.get(process) else "unheard"
            else:
                state = "ended"
            by_rank.setdefault(rank, []).append(state)
        return {rank: min(states, key=_NEAREST.index) for rank, states in by_rank.items() if rank}

    def _done(self, marks: dict[Process, set[str]]) -> set[Process]:
        """Return the processes that have acknowledged, those that they started, and those that only wait for them."""
        done = {process for process in marks if "acknowledged" in marks[process]}
        pids = {process.pid for process in done}
        above = {pid for process in done for pid in self._ancestors.get(process, ())}
        started = {process for process in marks if pids.intersection(self._ancestors.get(process, ()))}
        waiting = {process for process in marks if process.pid in above and not marks[process]}
        return done | started | waiting

    def _marks(self) -> dict[Process, set[str]]:
        """Return the marks of each process."""
        result: dict[Process, set[str]] = {}
        for process, mark in self._files():
            if mark not in ("saving", "exited"):  # a process may save that does not listen
                result.setdefault(process, set()).update({mark} if mark else ())
        return result

    def _files(self) -> list[tuple[Process, str]]:
        """Return the files by their process, with the mark that each is."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            matches = [NAME.fullmatch(entry.name) for entry in islice(entries, MAX_ENTRIES)]
            return [
                (Process(int(match[1]), int(match[2]), int(match[3])), (match[4] or "")[1:])
                for match in matches
                if match
            ]
        return []


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _rank(pid: int) -> str:
    """Return RANK in the environment that a process was started with; "" without one."""
    for variable in _first_bytes(f"/proc/{pid}/environ", MAX_ENVIRONMENT).split(b"\0"):
        if variable.startswith(b"RANK=") and variable[5:].isdigit():
            return variable[5:14].decode("ascii")
    return ""


def _first_bytes(path: str, limit: int) -> bytes:
    """Return what a file begins with; nothing where it cannot be read, or is something else such as a pipe."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            data = b""
            while len(data) < limit and (more := os.read(descriptor, limit - len(data))):
                data += more
            return data
        finally:
            os.close(descriptor)
    return b""


def _changed_at(path: str) -> float:
    """Return when a file was written, in Unix seconds; 0 where it is gone."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _namespace() -> int:
    """Return the pid namespace of this process; -1 where /proc does not have it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return -1


def _is_alive(process: Process) -> bool:
    """Whether a process of this pid namespace has not ended."""
    current = stat(process.pid)
    return current is not None and current.start == process.start and current.is_alive


def _ancestors(pid: int) -> list[int]:
    """Return the pids of the processes above one, nearest first."""
    result: list[int] = []
    while pid > 1 and len(result) < 100:
        above = stat(pid)
        pid = above.parent if above is not None else 0
        result.append(pid)
    return result
