"""Identify processes by more than their pid, and find those of one session."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_SECONDS = 10.0
"""Longest time to kill the processes of a session: one that waits for a broken disk cannot be killed."""


def start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; 0 for a zombie and where there is no such process.

    Stored with the pid, so that a later Hub distinguishes the process from a later one with its pid. psutil's
    `create_time` does not suit: it is wall-clock time and moves when the clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat[stat.rindex(")") + 2 :].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def marked(variable: str, value: str) -> Iterator[int]:
    """Yield the pids of the processes that were started with `variable=value` in their environment."""
    for process in _marked(variable, value):
        yield process.pid


def kill_marked(variable: str, value: str) -> int:
    """Kill what is left of a session (kernels, terminals, their children); return how many processes there were.

    Repeats until none is left, for at most _SECONDS: a process may have forked while the others were killed, and one
    that was killed exists until the kernel has run it a last time.
    """
    killed: set[psutil.Process] = set()
    until, pause = time.monotonic() + _SECONDS, 0.01
    while remaining := list(_marked(variable, value)):
        for process in remaining:
            with suppress(psutil.Error):
                process.kill()
        killed.update(remaining)
        if time.monotonic() > until:
            break
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
    return len(killed)


def _marked(variable: str, value: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, a zombie, or another account's
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                yield process
