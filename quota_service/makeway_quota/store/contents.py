"""Keep the contents of files: small ones in the database, large ones in a folder (`artifacts`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select

from ..artifacts.folder import LOCK, ArtifactFolder, Unreadable
from . import reads
from .database import Database
from .errors import FilesAway, FileUnreadable, StoreError
from .records import File
from .tables import blobs

LARGE = 256 * 1024
"""Bytes from which on a content is kept in the folder"""

ORPHAN_AGE = 86_400.0
"""Seconds for which a content without a row is kept: its row may be about to be written"""


class Collected(NamedTuple):
    """What a pass over the folder removed, and what it left."""

    removed: int
    left: int
    left_bytes: int


class Contents:
    """The contents of submitted files. `folder` None: all are in the database."""

    def __init__(self, database: Database, folder: Path | None, large: int = LARGE) -> None:
        self._database = database
        self._folder = None if folder is None else ArtifactFolder(folder)
        self._large = large
        self._failed: str | None = None

    def keep(self, files: Sequence[tuple[str, bytes, bool]]) -> None:
        """Write the large contents of a submission before its rows; StoreError where the folder cannot be written."""
        for _, data, _ in files:
            if self.outside(data):
                self._put(hashlib.sha256(data).hexdigest(), data)

    def placed(self, contents: Mapping[File, str]) -> frozenset[str]:
        """Write the large ones among contents and return their digests; StoreError as `keep`."""
        large = {digest: file.data for file, digest in contents.items() if self.outside(file.data)}
        for digest, data in large.items():
            self._put(digest, data)
        return frozenset(large)

    def outside(self, data: bytes) -> bool:
        """Whether a content belongs into the folder."""
        return self._folder is not None and len(data) >= self._large

    def files(self, id: str) -> tuple[File, ...]:
        """Return the files of a submission, by path; FileUnreadable and FilesAway name one."""
        with self._database.read() as connection:
            found = reads.files_of(connection, id)
        return tuple(File(path, self._read(path, data, digest), executable) for path, data, executable, digest in found)

    def collect(self, now: float) -> Collected:
        """Remove the contents without a row that are older than ORPHAN_AGE at `now` and by the folder's own clock.

        OSError while the folder cannot be reached.
        """
        removed = left = left_bytes = 0
        folder = self._folder
        if folder is None:
            return Collected(0, 0, 0)
        before = min(now, folder.now()) - ORPHAN_AGE
        for paths in folder.listed():
            used = self._used([path.name for path in paths])
            for path in paths:
                if path.name not in used and folder.remove(path, before):
                    removed += 1
                    continue
                with suppress(FileNotFoundError):  # a write that has ended since the folder was listed
                    left_bytes += path.stat().st_size
                    left += 1
        return Collected(removed, left, left_bytes)

    def set_up(self) -> Contents:
        """Make the folder and return this object.

        StoreError where that fails, or where the folder is gone although rows refer to contents in it.
        """
        if self._folder is None or self._folder.is_set_up():
            return self
        with self._database.read() as connection:
            used = connection.execute(select(blobs.c.digest).where(blobs.c.outside).limit(1)).first()
        if used is not None:
            raise StoreError(
                f"the folder of large files {self._folder.root} is not there or not mounted; mount or restore it, or, "
                f"if its contents are lost, create it with an empty file “{LOCK}”: jobs with such files then fail"
            )
        try:
            self._folder.set_up()
        except OSError as error:
            message = f"the folder of large files {self._folder.root} cannot be made: {error.strerror or error}"
            raise StoreError(message) from error
        return self

    def probe(self) -> None:
        """Check whether the folder can be reached, for `failure`."""
        try:
            if self._folder is not None:
                self._folder.check()
            self._failed = None
        except OSError as error:
            self._failed = str(error)

    def failure(self) -> str | None:
        """Return what is wrong with the folder, or None; it waits for nothing."""
        return self._failed

    def _used(self, names: Sequence[str]) -> set[str]:
        found: set[str] = set()
        with self._database.read() as connection:
            for begin in range(0, len(names), 500):
                some = names[begin : begin + 500]
                query = select(blobs.c.digest).where(blobs.c.digest.in_(some), blobs.c.outside)
                found.update(connection.execute(query).scalars())
        return found

    def _put(self, digest: str, data: bytes) -> None:
        assert self._folder is not None
        try:
            self._folder.put(digest, data)
        except OSError as error:
            raise StoreError(f"the folder of large files cannot be written: {error.strerror or error}") from error

    def _read(self, path: str, data: bytes | None, digest: str) -> bytes:
        if data is not None:
            return data
        if self._folder is None:
            raise FileUnreadable(path, "it is in a folder that this service does not know (MAKEWAY_ARTIFACTS_DIR)")
        try:
            return self._folder.get(digest)
        except Unreadable as error:
            raise FileUnreadable(path, str(error)) from error
        except OSError as error:
            raise FilesAway(path, str(error)) from error
