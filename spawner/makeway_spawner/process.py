"""Processes by their proper identity: a pid alone may belong to somebody else by now."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path


def start_ticks(pid: int) -> int:
    """Give a process's start time in clock ticks since boot; 0 when there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat[stat.rindex(")") + 2 :].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def marked(variable: str, value: str) -> Iterator[int]:
    """Find the processes that were started with `variable=value` in their environment."""
    needle = f"{variable}={value}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle in environ.split(b"\0"):
            yield int(entry.name)


def kill_marked(variable: str, value: str) -> int:
    """Kill what is left of a session (kernels, terminals, their children) and tell how many there were."""
    count = 0
    for pid in marked(variable, value):
        try:
            os.kill(pid, signal.SIGKILL)
            count += 1
        except OSError:
            continue
    return count
