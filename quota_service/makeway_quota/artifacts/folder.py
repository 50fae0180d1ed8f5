"""Keep large contents in a folder: one file each, named by its SHA-256.

A content is written to a temporary name, synced and renamed before a row refers to it, so that a row never refers to
half a file. `put` refreshes one that is there by its modification time. The folder may be shared by the replicas on
several machines. Its file `lock` is made once, by `set_up`: a folder without it counts as not mounted.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .base import CHUNK, DIGEST, ArtifactsUnavailable, ContentUnreadable, StoredContent, valid_digest, verified_chunks

LOCK = "lock"


class ArtifactFolder:
    """The contents in one folder that only its owner can read; see `base.Artifacts`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def where(self) -> str:
        """What and where it is, for messages."""
        return f"the folder {self.root}"

    def put(self, digest: str, size: int, chunks: Iterable[bytes], *, refresh: bool = False) -> None:
        """Write a content; one that is there and complete is refreshed instead, with or without `refresh`."""
        path = self._path(digest)
        self.check()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(OSError, ContentUnreadable):  # one that cannot be read, or is damaged, is written anew
            with self._locked():
                os.utime(path)
            for _ in verified_chunks(digest, _chunks(path)):
                pass
            return
        number, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                for chunk in verified_chunks(digest, chunks):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        _sync(path.parent)

    def read(self, digest: str) -> Iterator[bytes]:
        """Yield a content in chunks; ContentUnreadable where it is missing or damaged."""
        try:
            yield from verified_chunks(digest, _chunks(self._path(digest)))
        except FileNotFoundError:
            self.check()
            raise ContentUnreadable("its content is missing") from None

    def list_pages(self) -> Iterator[list[StoredContent]]:
        """Yield the contents and what interrupted writes left, folder by folder.

        The error of a folder that cannot be read comes after all others.
        """
        try:
            folders = sorted(path for path in self.root.iterdir() if path.is_dir())
        except FileNotFoundError:
            return
        failed: OSError | None = None
        for folder in folders:
            try:
                part = [result for path in sorted(folder.iterdir()) if (result := self._stored(path)) is not None]
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = failed or error
                continue
            yield part
        if failed is not None:
            raise failed

    def entries(self, digest: str) -> list[StoredContent]:
        """Return the file of a content, if it is there."""
        self.check()
        stored = self._stored(self._path(digest))
        return [] if stored is None else [stored]

    def remove(self, stored: StoredContent, before: float) -> bool:
        """Remove an entry unless it was written or refreshed since `before` (Unix seconds); return whether it went."""
        path = self.root / stored.place
        with self._locked(), suppress(FileNotFoundError):  # renamed or removed meanwhile
            if path.stat().st_mtime < before:
                path.unlink()
                return True
        return False

    def now(self) -> float:
        """Return the time by the clock that stamps the files (Unix seconds), which may be a file server's."""
        with self._locked():
            os.utime(self.root / LOCK)
            return (self.root / LOCK).stat().st_mtime

    def set_up(self, used: bool, installation: str) -> None:
        """Make the folder and its lock; OSError where that fails, or where it is gone though `used` by rows."""
        if self._is_set_up():
            return
        if used:
            raise ArtifactsUnavailable(
                f"{self.where} is not there or not mounted; mount or restore it, or, "
                f"if its contents are lost, create it with an empty file “{LOCK}”: jobs with such files then fail"
            )
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.root / LOCK).touch(0o600)
        except OSError as error:
            raise ArtifactsUnavailable(f"{self.where} cannot be made: {error.strerror or error}") from error

    def check(self) -> None:
        """Raise ArtifactsUnavailable unless the folder can be reached."""
        if not self._is_set_up():
            raise ArtifactsUnavailable(f"{self.where} is not there or not mounted: it has no file “{LOCK}”")

    def _is_set_up(self) -> bool:
        try:
            (self.root / LOCK).stat()
        except OSError:
            return False
        return True

    def _path(self, digest: str) -> Path:
        return self.root / valid_digest(digest)[:2] / digest

    def _stored(self, path: Path) -> StoredContent | None:
        """Describe a file; None for what is no file, or gone meanwhile."""
        try:
            result = path.stat()
        except FileNotFoundError:
            return None
        if not path.is_file():
            return None
        digest = path.name if DIGEST.match(path.name) else ""
        return StoredContent(digest, path.relative_to(self.root).as_posix(), result.st_size, result.st_mtime)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, so that no process removes what another one has just refreshed."""
        self.check()
        with open(self.root / LOCK, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _sync(folder: Path) -> None:
    """Write a renamed entry to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
