"""The cgroups of a real node: one in each hierarchy, below that of this process, and their removal.

Only cgroup v1, or both versions side by side, is supported: the node's own view is mounted controller by controller.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from .problems import KubeProblem, NotHere

MOUNTED = Path("/sys/fs/cgroup")
NEEDED = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
REMOVE_SECONDS = 10.0


def plan(name: str) -> list[Path]:
    """Return the paths of the cgroups that a node of this name will have, without making them."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller.removeprefix("name=")] = path
    missing = [name for name in NEEDED if name not in own or not (MOUNTED / name).is_dir()]
    if missing:
        raise NotHere(
            f"A real node needs cgroup v1, and this machine has no hierarchy of it for {', '.join(missing)}; "
            "cgroup v2 alone is not supported yet."
        )
    groups = [MOUNTED / controller / own[controller].strip("/") / name for controller in NEEDED]
    if closed := [str(group.parent) for group in groups if not os.access(group.parent, os.W_OK)]:
        raise NotHere(f"A real node needs cgroups that it can write to; these are read-only here: {', '.join(closed)}.")
    return groups


def create(groups: list[Path]) -> None:
    """Make the cgroups."""
    for group in groups:
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # a new cpuset takes no process before it has both
            if (group / file).exists():
                (group / file).write_text((group.parent / file).read_text(encoding="utf-8"), encoding="utf-8")


def enter(groups: list[Path]) -> None:
    """Move this process into the cgroups."""
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")


def remove(group: Path) -> None:
    """Remove a cgroup and all below it; its processes were killed, but the kernel may take a moment."""
    end = time.monotonic() + REMOVE_SECONDS
    while group.exists():
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):
                if (state := Path(folder, "freezer.state")).exists():
                    state.write_text("THAWED", encoding="utf-8")  # a frozen process ends only then
                os.rmdir(folder)
        if time.monotonic() > end:
            raise KubeProblem(f"The cgroup {group} cannot be removed: processes are left in it.")
        time.sleep(0.02)
