"""Who listens on a port of this machine, as far as /proc tells."""

from __future__ import annotations

import os
from pathlib import Path

_LISTEN = "0A"


def holder(port: int) -> str | None:
    """Name the process that listens on a TCP port ("node, process 4711"), or None when that cannot be seen."""
    inodes = _listening(port)
    if not inodes:
        return None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _has_any(entry, inodes):
            return f"{_name(entry)}, process {entry.name}"
    return None


def _listening(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _has_any(process: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir())
    except OSError:
        return False


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "a program"
