"""Keep the contents of files: small ones in the database, large ones in a folder (`artifacts`)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select

from ..artifacts.folder import ArtifactFolder, Unreadable
from . import reads
from .database import Database
from .errors import FileUnreadable, StoreError
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
        """Return the files of a submission, by path; FileUnreadable names the one whose content is gone or damaged."""
        with self._database.read() as connection:
            found = reads.files_of(connection, id)
        return tuple(File(path, self._read(path, data, digest), executable) for path, data, executable, digest in found)

    def collect(self, now: float | None = None) -> Collected:
        """Remove the contents without a row that are older than ORPHAN_AGE, by the clock of the file system."""
        removed = left = left_bytes = 0
        before = (time.time() if now is None else now) - ORPHAN_AGE
        for paths in self._folder.listed() if self._folder is not None else ():
            used = self._used([path.name for path in paths])
            for path in paths:
                if path.name not in used and self._folder is not None and self._folder.remove(path, before):
                    removed += 1
                else:
                    left, left_bytes = left + 1, left_bytes + path.stat().st_size
        return Collected(removed, left, left_bytes)

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
