"""Keep large file contents outside the database: one file each, named by its SHA-256.

A content is written to a temporary name, synced and renamed before a row refers to it, so that a row never refers to
half a file. A content without a row is removed once it is old enough; `put` makes one that is there young again. The
folder may be shared by the replicas on several machines. Its file `lock` is made once, by `set_up`: a folder without
it is not mounted, and says nothing about contents.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DIGEST = re.compile(r"^[0-9a-f]{64}$")


LOCK = "lock"


class Unreadable(Exception):
    """A content is missing or damaged; the sentence says which."""


class FolderAway(OSError):
    """The folder cannot be reached, so that nothing is known about its contents."""


class ArtifactFolder:
    """The contents in one folder that only its owner can read. Blocking and thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, digest: str, data: bytes) -> None:
        """Write a content, or make it young where it is there and whole; raises OSError where that fails."""
        place = self._place(digest)
        self.check()
        place.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(OSError):  # one that cannot be read is written anew
            with self._locked():
                os.utime(place)
            if place.read_bytes() == data:
                return
        number, name = tempfile.mkstemp(prefix=".new-", dir=place.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, place)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        _sync(place.parent)

    def get(self, digest: str) -> bytes:
        """Return a content; raises Unreadable, or OSError while it cannot be read."""
        try:
            data = self._place(digest).read_bytes()
        except FileNotFoundError:
            self.check()
            raise Unreadable("its content is missing") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise Unreadable("its content is damaged")
        return data

    def listed(self) -> Iterator[list[Path]]:
        """Yield the contents and the rests of broken writes, folder by folder."""
        try:
            folders = sorted(path for path in self.root.iterdir() if path.is_dir())
        except FileNotFoundError:
            return
        for folder in folders:
            with suppress(FileNotFoundError):
                yield sorted(path for path in folder.iterdir() if path.is_file())

    def remove(self, path: Path, before: float) -> bool:
        """Remove a content that was not written or made young since `before` (Unix seconds); whether it went."""
        with self._locked(), suppress(FileNotFoundError):  # renamed or removed meanwhile
            if path.stat().st_mtime < before:
                path.unlink()
                return True
        return False

    def is_set_up(self) -> bool:
        """Whether the folder is there with its lock."""
        try:
            (self.root / LOCK).stat()
        except OSError:
            return False
        return True

    def set_up(self) -> None:
        """Make the folder and its lock, where they are not there yet; raises OSError where that fails."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.root / LOCK).touch(0o600)

    def check(self) -> None:
        """Raise FolderAway unless the folder can be reached."""
        if not self.is_set_up():
            raise FolderAway(f"{self.root} is not there or not mounted: it has no file “{LOCK}”")

    def now(self) -> float:
        """Return the time by the clock that stamps the files here (Unix seconds), which may be a server's."""
        with self._locked():
            os.utime(self.root / LOCK)
            return (self.root / LOCK).stat().st_mtime

    def _place(self, digest: str) -> Path:
        if not DIGEST.match(digest):
            raise ValueError(f"{digest!r} is no SHA-256")
        return self.root / digest[:2] / digest

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, so that no process removes what another one has just made young."""
        self.check()
        with open(self.root / LOCK, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _sync(folder: Path) -> None:
    """Write a renamed entry to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
