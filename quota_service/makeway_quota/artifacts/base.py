"""The protocol of content-addressed storage, in which the store keeps large file contents by their SHA-256.

A content is stored as a whole or not at all, whatever happens to its writer, and is verified whenever it is read. Only
contents that were neither written nor refreshed for a while are removed, because the row that refers to a content is
written after it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

DIGEST = re.compile(r"^[0-9a-f]{64}$")
CHUNK = 2**20
"""Bytes of a content that are in memory at a time when it is read"""
ORPHAN_AGE = 86_400.0
"""Seconds for which a content to which no row refers is kept: its row may be about to be written"""


class ContentUnreadable(Exception):
    """A content is missing or damaged; the sentence says which."""


class ArtifactsUnavailable(OSError):
    """The storage is unavailable, so that nothing is known about its contents; the sentence says why."""


class StoredContent(NamedTuple):
    """A content, or what an interrupted write left (`digest` is empty), as `Artifacts.list_pages` finds it."""

    digest: str
    place: str
    size: int
    at: float
    """when it was written or refreshed, by the storage's own clock (Unix seconds)"""


class Artifacts(Protocol):
    """A storage of contents that all replicas share. Blocking and thread-safe; any method may raise OSError."""

    @property
    def where(self) -> str:
        """What and where it is, for messages: `the folder /srv/artifacts`."""

    def put(self, digest: str, size: int, chunks: Iterable[bytes], *, refresh: bool = False) -> None:
        """Write a content, or refresh the one that is there; ContentUnreadable if the chunks are not that content.

        Any number of writers may put the same content at once. `refresh`: the content may be about to be removed, so
        that a recent one is not enough where a storage cannot refresh it.
        """

    def read(self, digest: str) -> Iterator[bytes]:
        """Yield a content in chunks, the last one only if the digest is right; ContentUnreadable otherwise."""

    def list_pages(self) -> Iterator[list[StoredContent]]:
        """Yield all contents and what interrupted writes left, page by page."""

    def entries(self, digest: str) -> list[StoredContent]:
        """Return what there is of one content."""

    def remove(self, stored: StoredContent, before: float) -> bool:
        """Remove an entry unless it was written or refreshed since `before` (Unix seconds); return whether it went."""

    def now(self) -> float:
        """Return the time by the clock of `StoredContent.at`."""

    def set_up(self, used: bool, installation: str) -> None:
        """Prepare the storage; OSError with a sentence where that fails, or where it is gone though `used` by rows."""

    def check(self) -> None:
        """Raise ArtifactsUnavailable unless the storage is available."""


def valid_digest(digest: str) -> str:
    """Return a digest that is safe as a name; ValueError for anything else."""
    if not DIGEST.match(digest):
        raise ValueError(f"{digest!r} is no SHA-256")
    return digest


def verified_chunks(digest: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield chunks, the last one only if all of them are the content of this digest; ContentUnreadable otherwise."""
    known, held = hashlib.sha256(), b""
    for chunk in chunks:
        if held:
            yield held
        known.update(chunk)
        held = chunk
    if known.hexdigest() != digest:
        raise ContentUnreadable("its content is damaged")
    yield held


def read_whole(artifacts: Artifacts, digest: str) -> bytes:
    """Return a content in one piece; ContentUnreadable, or OSError while it cannot be read."""
    return b"".join(artifacts.read(digest))


def put_bytes(artifacts: Artifacts, digest: str, data: bytes, *, refresh: bool = False) -> None:
    """Write a content that is in memory, as `Artifacts.put`."""
    artifacts.put(digest, len(data), [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)], refresh=refresh)
