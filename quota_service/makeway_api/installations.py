"""Detect on one machine that a portal runs which has the same data as another one, as a restored copy has.

The service holds a name of its installation as long as it lives; one that starts on a copy of its data finds it taken.
The name is a socket that is no file: the kernel releases it with the process, and no copy has it. Used by the service,
and by the Hub before it touches notebooks.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningService:
    """The service that holds an installation: its process, and the folder it works in ("": not known)."""

    pid: int
    folder: str

    def __str__(self) -> str:
        return f"in {self.folder} (process {self.pid})" if self.folder else f"as the process {self.pid}"


def hold(installation: str) -> socket.socket | None:
    """Hold an installation until the socket is closed; None where another process does."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(_address(installation))
        held.listen(1)
    except OSError:
        held.close()
        return None
    return held


def holder(installation: str) -> RunningService | None:
    """Return the process that holds an installation now, None where none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # connected by the kernel; BlockingIOError where others just ask, too
        try:
            probe.connect(_address(installation))
        except BlockingIOError:
            return RunningService(0, "")
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    folder = ""
    with suppress(OSError):
        folder = os.readlink(f"/proc/{pid}/cwd")
    return RunningService(pid, folder)


def is_a_copy(holder: RunningService, folder: str) -> str:
    """Return why a portal cannot start beside the one that has its data."""
    return (
        f"{folder} is a copy of the data of a portal that runs on this machine, {holder}: both would run the same jobs "
        "and stop each other's notebooks. Stop that one first; for a second portal, begin with an empty "
        "MAKEWAY_STATE_DIR."
    )


def _address(installation: str) -> str:
    """Return the address in the kernel's own namespace (a NUL in front): there is no file to copy or to clean up."""
    return f"\0makeway-installation-{installation}"
