"""Identify processes: a pid counts only together with its start time, as pids are reused.

Used by the local backend to hold on to launchers, and to find and kill whatever is left of an attempt.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..untrusted import whole
from .service_faults import raise_own

PROC = Path("/proc")
SWEEP_SECONDS = 2.0
MAX_PID = 2**22
"""The largest pid of Linux"""
MAX_TICKS = 2**63
MAX_ENVIRONMENT = 8 * 2**20
"""Bytes of an environment that are read; the kernel starts no process with more than 6 MiB"""
NUMBER = re.compile(rb"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark that every process of an attempt carries in its environment."""

    job_dir: str
    attempt: int

    @classmethod
    def of(cls, pid: int) -> Mark | None:
        """Return the mark of a process; None if it has none, is gone, or may not be read.

        OSError where this process cannot read at the moment (`service_faults`); so for all that read here.
        """
        try:
            with (PROC / str(pid) / "environ").open("rb") as file:
                entries = file.read(MAX_ENVIRONMENT).split(b"\0")
        except OSError as error:
            raise_own(error)
            return None
        variables = dict(entry.split(b"=", 1) for entry in entries if entry.startswith(b"MAKEWAY_") and b"=" in entry)
        directory, attempt = variables.get(b"MAKEWAY_JOB_DIR"), variables.get(b"MAKEWAY_ATTEMPT", b"")
        if directory is None or not NUMBER.fullmatch(attempt):
            return None
        return cls(os.fsdecode(directory), int(attempt))


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that are needed; `start_time` is in clock ticks since the boot."""

    state: str
    parent: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Stat | None:
        """Return the fields of a process; None when there is no such process."""
        try:
            fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            return cls(fields[0].decode(), int(fields[1]), int(fields[19]))
        except OSError as error:
            raise_own(error)
            return None
        except (ValueError, IndexError):
            return None

    @property
    def dead(self) -> bool:
        """Whether the process is a zombie."""
        return self.state in "ZX"


def boot_id() -> str:
    """Return the id of this boot: pids and start times of another one mean nothing."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise_own(error)
        return ""


@dataclass(slots=True)
class Process:
    """A handle of one process. `fd` is a pidfd (readable once the process ended), None where the kernel has none."""

    pid: int
    start_time: int
    fd: int | None

    @classmethod
    def find(cls, claim: Mapping[str, object], uid: int, mark: Mark) -> Process | None:
        """Open the process of a launcher's claim: same boot, pid, start time, account and mark, or None."""
        pid, start_time = whole(claim.get("pid"), MAX_PID), whole(claim.get("start_time"), MAX_TICKS)
        if pid is None or start_time is None or pid <= 1 or claim.get("boot") != boot_id():
            return None
        try:
            fd = _pidfd(pid)
        except ProcessLookupError:
            return None
        process = cls(pid, start_time, fd)
        if process._is_same() and _owner(pid) == uid and Mark.of(pid) == mark:
            return process
        process.close()
        return None

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        if self.fd is None:
            return self._is_same()
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        with suppress(ProcessLookupError, PermissionError):  # one that has changed its account is none of the job's
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, number)
            elif self._is_same():
                os.kill(self.pid, number)

    def close(self) -> None:
        """Close its handle; the process goes on."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _is_same(self) -> bool:
        stat = Stat.of(self.pid)
        return stat is not None and not stat.dead and stat.start_time == self.start_time


def sweep(marks: Mapping[Mark, int]) -> set[Mark]:
    """Kill every process that carries one of the marks and belongs to its account, with its children.

    Return the marks of which processes are left after two seconds (those that the kernel cannot end now).
    """
    deadline = time.monotonic() + SWEEP_SECONDS
    while True:
        remaining = set()
        for pid, start_time, mark in _carriers(marks):
            remaining.add(mark)
            _kill(pid, start_time)
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(0.005)


def carried(marks: Mapping[Mark, int]) -> set[Mark]:
    """Return the marks that any process of their accounts carries."""
    return {mark for _, _, mark in _carriers(marks)}


def marked() -> dict[int, Mark]:
    """Return every process that carries a mark, which anyone can give it."""
    return {pid: mark for pid in _pids() if (mark := Mark.of(pid)) is not None}


def _carriers(marks: Mapping[Mark, int]) -> Iterable[tuple[int, int, Mark]]:
    """Return (pid, start time, mark) of processes with a mark, and of descendants, which may have dropped it."""
    stats = {pid: stat for pid in _pids() if (stat := Stat.of(pid)) is not None and not stat.dead}
    result: dict[int, Mark] = {}
    for pid in stats:
        mark = Mark.of(pid)
        if mark is not None and mark in marks and marks[mark] == _owner(pid):
            result[pid] = mark
    for pid in stats:
        ancestry = [pid]
        while ancestry[-1] in stats and ancestry[-1] not in result and stats[ancestry[-1]].parent not in ancestry:
            ancestry.append(stats[ancestry[-1]].parent)
        if ancestry[-1] in result and marks[result[ancestry[-1]]] == _owner(pid):
            result[pid] = result[ancestry[-1]]
    return [(pid, stats[pid].start_time, mark) for pid, mark in result.items()]


def _pids() -> list[int]:
    pids = [int(name) for name in os.listdir(PROC) if name.isascii() and name.isdecimal() and len(name) < 10]
    return [pid for pid in pids if pid not in (1, os.getpid())]


def _kill(pid: int, start_time: int) -> None:
    with suppress(ProcessLookupError):
        process = Process(pid, start_time, _pidfd(pid))
        if process._is_same():
            process.send(signal.SIGKILL)
        process.close()


def _owner(pid: int) -> int | None:
    try:
        return os.stat(PROC / str(pid)).st_uid
    except OSError:
        return None


def _pidfd(pid: int) -> int | None:
    """Open a pidfd; None on a kernel without; ProcessLookupError when there is no such process."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None
