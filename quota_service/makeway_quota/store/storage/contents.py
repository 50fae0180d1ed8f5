"""Keep the contents of files: small ones in the database, large ones in a folder or a bucket (`artifacts`)."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import bindparam, delete, insert, select, update

from ...artifacts.base import ORPHAN_AGE, Artifacts, ContentUnreadable, StoredContent, put_bytes
from ...artifacts.folder import ArtifactFolder
from ...values import File
from .. import reads
from ..database.database import Database
from ..errors import FilesUnavailable, FileUnreadable, StoreError
from ..tables import blobs, dropped, installation

UNDER_WAY, CLOCKS_DIFFER = 60.0, 60.0
"""Seconds that a submission takes from writing a content to its row, and by which the clocks of replicas may differ"""
DELETED_AGE = UNDER_WAY + CLOCKS_DIFFER
"""Seconds for which a content is kept whose last row was removed: a submission of the same may be under way"""
FORGET = delete(dropped).where(dropped.c.digest == bindparam("one"), dropped.c.at == bindparam("noted"))
"""Forget a removal, unless the content was used and removed once more since it was noted"""
CLEARED_AT_ONCE = 200
"""Such contents that one look at them removes"""
MAX_UNREMOVABLE = 100
"""Contents that cannot be removed, after which the storage counts as unavailable"""
MIN_ARTIFACT_BYTES = 256 * 1024
"""Bytes from which on a content is kept outside the database"""


class Collected(NamedTuple):
    """What a pass over the artifacts removed, and what remains."""

    removed: int
    remaining: int
    remaining_bytes: int


class Contents:
    """The contents of submitted files. `artifacts` None: all are in the database."""

    def __init__(
        self, database: Database, artifacts: Artifacts | None, min_artifact_bytes: int = MIN_ARTIFACT_BYTES
    ) -> None:
        self._database = database
        self._artifacts = artifacts
        self._min_artifact_bytes = min_artifact_bytes
        self._failed: str | None = None
        self.unremovable: dict[str, Exception] = {}
        """the contents outside that could not be removed the last time, by digest or place, and why"""

    @property
    def folders(self) -> list[Path]:
        """The folder of this machine that large contents are in, if they are in one."""
        return [self._artifacts.root] if isinstance(self._artifacts, ArtifactFolder) else []

    def keep(self, files: Sequence[tuple[str, bytes, bool]]) -> None:
        """Write the large contents of a submission before its rows; StoreError where they cannot be written."""
        for _, data, _ in files:
            if self.outside(data):
                self._put(hashlib.sha256(data).hexdigest(), data)

    def placed(self, contents: Mapping[File, str]) -> frozenset[str]:
        """Write the large ones among contents and return their digests; StoreError as `keep`."""
        large = {digest: file.data for file, digest in contents.items() if self.outside(file.data)}
        for digest, data in large.items():
            self._put(digest, data)
        return frozenset(large)

    def place(self, data: bytes) -> str | None:
        """Write a content outside the database if it is large and return its digest; None where it is for a row."""
        if not self.outside(data):
            return None
        digest = hashlib.sha256(data).hexdigest()
        self._put(digest, data)
        return digest

    def read(self, name: str, digest: str) -> bytes:
        """Return a content that `place` wrote; FileUnreadable and FilesUnavailable with `name`.

        It is in the database where the same content was there before: what is outside beside it is not kept.
        """
        inline = select(blobs.c.data).where(blobs.c.digest == digest, blobs.c.outside.is_(False))
        with self._database.read() as connection:
            data: bytes | None = connection.execute(inline).scalar_one_or_none()
        return self._read(name, data, digest)

    def outside(self, data: bytes) -> bool:
        """Whether a content is kept outside the database."""
        return self._artifacts is not None and len(data) >= self._min_artifact_bytes

    def files(self, id: str) -> tuple[File, ...]:
        """Return the files of a submission, by path; FileUnreadable and FilesUnavailable name one."""
        with self._database.read() as connection:
            stored = reads.files_of(connection, id)
        return tuple(
            File(path, self._read(path, data, digest), executable) for path, data, executable, digest in stored
        )

    def list_files(self, id: str) -> list[tuple[str, bool, str]]:
        """Return path, whether it is executable, and digest of each file of a submission, by path."""
        with self._database.read() as connection:
            return reads.digests_of(connection, id)

    def chunks(self, id: str, digest: str) -> Iterator[bytes] | None:
        """Return the content of one file of a submission in chunks, None if it has no such file.

        The chunks raise FileUnreadable and FilesUnavailable; the last one comes only if the whole is right.
        """
        with self._database.read() as connection:
            result = reads.content_of(connection, id, digest)
        if result is None:
            return None
        path, data = result
        return iter([data]) if data is not None else self._chunks(path, digest)

    def collect(self, now: float) -> Collected:
        """Remove the contents without a row that are older than ORPHAN_AGE at `now` and by the storage's own clock.

        OSError while the storage is unavailable; one that cannot be removed stays, and is in `unremovable`.
        """
        removed = remaining = remaining_bytes = 0
        artifacts, self.unremovable = self._artifacts, {}
        if artifacts is None:
            return Collected(0, 0, 0)
        at = min(now, artifacts.now())
        for part in artifacts.list_pages():
            used = self._used([stored.digest for stored in part if stored.digest])
            self._weigh({stored.digest: stored.size for stored in part if stored.digest in used})
            for stored in part:
                if stored.digest not in used and self._remove(stored, at - ORPHAN_AGE):
                    removed += 1
                else:
                    remaining_bytes += stored.size
                    remaining += 1
        return Collected(removed, remaining, remaining_bytes)

    def clear(self, now: float, skip: Collection[str] = ()) -> int:
        """Remove contents outside whose last row was removed DELETED_AGE ago, and return how many went.

        A submission of the same that began before writes its row within that time; one that begins later refreshes the
        content, or writes it anew. OSError while the storage is unavailable; one content that cannot be removed is in
        `unremovable`, and is tried again by the next call that does not `skip` it.
        """
        due = (dropped.c.at < now - DELETED_AGE) | (dropped.c.at > now + DELETED_AGE)
        removed, after, self.unremovable = 0, "", {}
        while True:
            later = (dropped.c.digest > after, dropped.c.digest.not_in(list(skip)))
            query = select(dropped.c.digest, dropped.c.at).where(due, *later).order_by(dropped.c.digest)
            with self._database.read() as connection:
                unused = connection.execute(query.limit(CLEARED_AT_ONCE)).all()
            if not unused:
                return removed
            after = unused[-1].digest
            removed += self._remove_unused([content.digest for content in unused])
            done = [
                {"one": content.digest, "noted": content.at}
                for content in unused
                if content.digest not in self.unremovable
            ]
            if done:
                with self._database.write(quiet=True) as connection:
                    connection.execute(FORGET, done)

    def _remove_unused(self, digests: Sequence[str]) -> int:
        """Remove those of the contents outside to which no row refers, unless they are newer than DELETED_AGE."""
        if self._artifacts is None:
            return 0
        before, used, removed = self._artifacts.now() - DELETED_AGE, self._used(digests), 0
        for digest in digests:
            if digest not in used:
                try:
                    result = self._artifacts.entries(digest)
                except Exception as error:
                    self._note(digest, error)
                    continue
                gone = [self._remove(stored, before) for stored in result]
                removed += any(gone)
        return removed

    def _remove(self, stored: StoredContent, before: float) -> bool:
        """Remove a content outside, and return whether it went; False where it cannot be removed."""
        assert self._artifacts is not None
        try:
            return self._artifacts.remove(stored, before)
        except Exception as error:
            self._note(stored.digest or stored.place, error)
            return False

    def _note(self, name: str, error: Exception) -> None:
        """Remember that a content cannot be removed; ArtifactsUnavailable where that is so of the whole storage."""
        assert self._artifacts is not None
        self._artifacts.check()
        if len(self.unremovable) >= MAX_UNREMOVABLE:
            raise error
        self.unremovable[name] = error

    def set_up(self) -> Contents:
        """Prepare the storage of large contents and return this object.

        StoreError where that fails, or where it is gone although rows refer to contents in it.
        """
        if self._artifacts is None:
            return self
        with self._database.read() as connection:
            used = connection.execute(select(blobs.c.digest).where(blobs.c.outside).limit(1)).first()
        try:
            self._artifacts.set_up(used is not None, self.installation())
        except OSError as error:
            raise StoreError(f"large files: {error}") from error
        return self

    def probe(self) -> None:
        """Check whether the storage of large contents is available, for `failure`."""
        try:
            if self._artifacts is not None:
                self._artifacts.check()
            self._failed = None
        except OSError as error:
            self._failed = str(error)

    def failure(self) -> str | None:
        """Return what `probe` found wrong with the storage of large contents, or None."""
        return self._failed

    def installation(self) -> str:
        """Return the name of this installation, which is the same for all replicas; it is made once."""
        known = select(installation.c.name)
        with self._database.read() as connection:
            name: str | None = connection.execute(known).scalar_one_or_none()
        if name is None:
            with self._database.write(quiet=True) as connection:
                name = connection.execute(known).scalar_one_or_none() or uuid.uuid4().hex
                connection.execute(delete(installation))
                connection.execute(insert(installation), {"id": 1, "name": name})
        return name

    def _used(self, names: Sequence[str]) -> set[str]:
        result: set[str] = set()
        with self._database.read() as connection:
            for begin in range(0, len(names), 500):
                some = names[begin : begin + 500]
                query = select(blobs.c.digest).where(blobs.c.digest.in_(some), blobs.c.outside)
                result.update(connection.execute(query).scalars())
        return result

    def _weigh(self, sizes: Mapping[str, int]) -> None:
        """Write the sizes of contents that rows of an older version do not have."""
        if not sizes:
            return
        unknown = select(blobs.c.digest).where(blobs.c.digest.in_(list(sizes)), blobs.c.size == 0)
        with self._database.read() as connection:
            result = list(connection.execute(unknown).scalars())
        if result:
            with self._database.write(quiet=True) as connection:
                for digest in result:
                    connection.execute(update(blobs).where(blobs.c.digest == digest).values(size=sizes[digest]))

    def _put(self, digest: str, data: bytes) -> None:
        assert self._artifacts is not None
        with self._database.read() as connection:
            refresh = connection.execute(select(dropped.c.digest).where(dropped.c.digest == digest)).first() is not None
        try:
            put_bytes(self._artifacts, digest, data, refresh=refresh)
        except OSError as error:
            raise StoreError(f"large files cannot be written: {error.strerror or error}") from error

    def _read(self, path: str, data: bytes | None, digest: str) -> bytes:
        return b"".join(self._chunks(path, digest)) if data is None else data

    def _chunks(self, path: str, digest: str) -> Iterator[bytes]:
        if self._artifacts is None:
            where = "MAKEWAY_ARTIFACTS_DIR, MAKEWAY_ARTIFACTS_S3"
            raise FileUnreadable(path, f"it is in a folder or bucket that this service does not know ({where})")
        try:
            yield from self._artifacts.read(digest)
        except ContentUnreadable as error:
            raise FileUnreadable(path, str(error)) from error
        except OSError as error:
            raise FilesUnavailable(path, str(error)) from error
