"""The folder of one cluster: its files, what it made elsewhere on the machine, and whether its owner still runs.

What a cluster makes outside of its folder (a bridge, namespaces, cgroups) is recorded here before it is made,
and its processes carry the folder's path in their environment: both are found again after a crash.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from .problems import KubeProblem

MARK = "MAKEWAY_KUBE_FOLDER"
"""The environment variable that every process of a cluster carries."""
MAX_PATH = 70
"""A Unix socket's path has 107 bytes at most; those of a cluster are up to 35 bytes longer than its folder's."""


def registry() -> Path:
    """Return the folder that holds the folders of this user's clusters."""
    place = Path(tempfile.gettempdir()) / f"makeway-kube-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    result = place.lstat()
    if result.st_uid != os.getuid() or result.st_mode & 0o077 or place.is_symlink():
        raise KubeProblem(
            f"{place} is not a private folder of yours: remove it, or set TMPDIR to a folder of your own."
        )
    if len(str(place)) > MAX_PATH - 9:
        raise KubeProblem(f"The path {place} is too long for sockets: set TMPDIR to a shorter one.")
    return place


class Folder:
    """The files and the records of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "log"
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        """the programs of the cluster that this process started, by name"""
        self.at_end = ExitStack()
        """what this process closes before the cluster is removed"""
        self._owner: IO[str] | None = None

    @classmethod
    def create(cls) -> Folder:
        """Make a folder that this process owns until it ends."""
        with locked_registry() as place:
            while (path := place / secrets.token_hex(4)).exists():
                pass
            path.mkdir(mode=0o700)
            folder = cls(path)
            folder.logs.mkdir()
            folder._owner = (path / "owner").open("w")
            fcntl.flock(folder._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder._owner.write(f"{os.getpid()}\n")
            folder._owner.flush()
        return folder

    @property
    def name(self) -> str:
        """Return the name of the cluster: eight hexadecimal digits."""
        return self.path.name

    def owner_lives(self) -> bool:
        """Whether the process that made this folder still runs; its lock ends with it, however it ends."""
        if self._owner is not None:
            return True
        try:
            with (self.path / "owner").open() as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def disown(self) -> None:
        """Release the owner's lock."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def facts(self) -> dict[str, Any]:
        """Return what was recorded."""
        try:
            result = json.loads((self.path / "facts.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return result if isinstance(result, dict) else {}

    def record(self, **facts: Any) -> None:
        """Add facts to the record, in one atomic write."""
        fresh = self.path / "facts.new"
        fresh.write_text(json.dumps(self.facts() | facts, indent=1), encoding="utf-8")
        fresh.replace(self.path / "facts.json")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from removing the cluster at the same time."""
        with (self.path.parent / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if not self.path.exists():  # a process that waits for it finds nothing left to do
                    Path(lock.name).unlink(missing_ok=True)


@contextmanager
def locked_registry() -> Iterator[Path]:
    """Keep other clusters from being added or numbered at the same time, and yield the registry."""
    place = registry()
    with (place / "registry.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


def folders() -> list[Folder]:
    """Return the folders of all clusters of this user, abandoned ones included."""
    return [Folder(path) for path in sorted(registry().iterdir()) if path.is_dir()]
