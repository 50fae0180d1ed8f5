"""Measure processor and memory of the service while a hundred jobs run and nothing happens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from makeway_api.models import JobRequest

from .measure import Measured
from .portal import TIMEOUT, Portal

JOBS = 100
WINDOW = 20.0
WINDOWS = 3
TICKS = os.sysconf("SC_CLK_TCK")


def measure() -> Iterator[Measured]:
    """World the service's process without jobs, and with a hundred that sleep."""
    with Portal(gpus=JOBS) as portal:
        pid = portal.service_pid()
        time.sleep(5)
        empty, empty_memory = [cpu(pid) for _ in range(WINDOWS)], memory(pid)
        ana = portal.user("ana")
        for number in range(JOBS):
            ask = JobRequest(name=f"sleeper {number}", team="rnd", profile="gpu1", command=["sleep", "3600"])
            ana.submit(ask)
        deadline = time.monotonic() + TIMEOUT
        while len(ana.jobs(mine=True, state="running", limit=JOBS).jobs) < JOBS:
            if time.monotonic() > deadline:
                raise RuntimeError("The jobs did not start.")
            time.sleep(0.2)
        time.sleep(5)
        busy = [cpu(pid) for _ in range(WINDOWS)]
        full_memory = memory(pid)
        launchers = launcher_memory(portal)
    yield Measured(
        f"service CPU, {JOBS} running jobs, nothing happens",
        "% of a core",
        busy,
        "the same without jobs",
        sorted(empty)[len(empty) // 2],
        goal=1.0,
        note=f"Over {WINDOWS} times {WINDOW:.0f} s. The panel is closed.",
    )
    yield Measured(
        f"service memory, {JOBS} running jobs",
        "MiB",
        [full_memory],
        "the same without jobs",
        empty_memory,
        note=f"Beside it each job has its launcher, {launchers:.0f} MiB of its own (without what they share).",
        facts={"launcher_mib": launchers},
    )


def cpu(pid: int) -> float:
    """Return the share of a core that a process used over one window, in percent."""
    before, begin = ticks(pid), time.monotonic()
    time.sleep(WINDOW)
    return 100 * (ticks(pid) - before) / TICKS / (time.monotonic() - begin)


def ticks(pid: int) -> int:
    """Return the clock ticks that a process used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def memory(pid: int) -> float:
    """Return a process's resident memory in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"There is no process {pid}.")


def launcher_memory(portal: Portal) -> float:
    """Return the mean memory in MiB that belongs to one launcher alone."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                if b"/bin/launcher" not in command or str(portal.root).encode() not in (entry / "environ").read_bytes():
                    continue
                rollup = (entry / "smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            result.append(sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) / 1024)
    return sum(result) / len(result) if result else 0.0
