"""Keep what an agent remembers in a folder: who it is, its token, and that no other agent uses the folder.

`lock`, `machine.json` (secret), `init/`, `programs/`, `workers/`, `trash/`. What cannot be written now, as on a full
disk, is kept in memory and tried again; the agent goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import threading

from ..launcher.attempt import boot_id
from ..launcher.files import read_json, write_json
from ..launcher.removal import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NO_BOOT_ID = "unknown-boot"
"""The boot of machines whose kernel does not show one"""
LOCK_FOLDERS = ("/run/lock", "/tmp")
"""Where the locks of machines are: folders that are the same for all agents, and empty after a boot"""


class FolderInUse(OSError):
    """Another agent uses the folder."""


class MachineInUse(OSError):
    """Another agent is this machine, with a folder of its own."""


def lock_folders() -> tuple[str, ...]:
    """Return where the lock of this machine may be. The local provider's machines are folders, with one agent each."""
    local = os.environ.get("LOCAL_MACHINE_FOLDER", "")
    return (local,) if local else LOCK_FOLDERS


def lock_machine(machine: str, url: str, folders: tuple[str, ...] = ()) -> int | None:
    """Return a lock that one agent of a machine and service holds, whatever its folder; None where none can be had.

    Others' files in a folder for all are passed over, and what they link to: the lock's file is emptied.
    """
    name = f"makeway-agent-{machine}-{re.sub('[^A-Za-z0-9.]+', '_', url)}"[:250]
    for folder in folders or lock_folders():
        descriptor = -1
        try:
            path = os.path.join(folder, f"{name}.lock")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
            os.close(descriptor)
        except BlockingIOError as error:
            other = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            message = f"another agent is {machine} already, with a folder of its own: end process {other} first"
            raise MachineInUse(message) from error
        except OSError:  # such as a disk that is full: without it a machine does not stay without an agent
            if descriptor >= 0:
                os.close(descriptor)
    return None


class MachineFolder:
    """The folder of one agent, locked as long as the process lives."""

    def __init__(self, path: str, machine: str) -> None:
        self.path = path
        self.machine = machine
        self.boot = boot_id() or NO_BOOT_ID
        os.makedirs(path, mode=0o700, exist_ok=True)
        self._lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            advice = "end it first (only the agent of another machine may have a --state of its own)"
            raise FolderInUse(f"another agent runs with {path}: {advice}") from error
        self.joined = self._read()
        self._unwritten = False
        self._writing = threading.Lock()

    def close(self) -> None:
        """Release the folder for another agent."""
        os.close(self._lock)

    def file(self, *names: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, *names)

    def _read(self) -> dict[str, Any]:
        """Return the answer to the join of this boot of this machine; empty if it has not joined."""
        kept = read_json(self.file("machine.json"))
        if (kept.get("machine"), kept.get("boot")) != (self.machine, self.boot):
            return {}
        joined = kept.get("joined")
        return joined if isinstance(joined, dict) and isinstance(joined.get("token"), str) else {}

    def keep(self, joined: dict[str, Any]) -> None:
        """Keep the answer to the join, or one with a newer token."""
        with self._writing:
            self.joined = joined
            self._unwritten = True
        self.write_again()

    def write_again(self) -> bool:
        """Write what could not be written before; return whether all is written."""
        with self._writing:
            if self._unwritten:
                with contextlib.suppress(OSError):
                    kept = {"machine": self.machine, "boot": self.boot, "joined": self.joined}
                    write_json(self.file("machine.json"), kept)
                    self._unwritten = False
            return not self._unwritten

    def discard(self, path: str) -> None:
        """Take a folder away at once; what is in it is removed later."""
        os.makedirs(self.file("trash"), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self.file("trash", f"{os.path.basename(path)}.{os.urandom(6).hex()}"))

    def empty_trash(self) -> None:
        """Remove what was taken away; what cannot be removed stays, and is tried again the next time."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.file("trash")):
                with contextlib.suppress(OSError, RecursionError):
                    remove_tree(self.file("trash", name))
