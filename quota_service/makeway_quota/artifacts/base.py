"""Keep contents by their SHA-256: the protocol between the store and the place where large contents are.

A content is there whole or not at all, whatever happens to its writer, and is verified whenever it is read. It is
removed only when it is old: between `put` and the row that refers to it a content is young.
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
"""Seconds for which a content without a row is kept: its row may be about to be written"""


class Unreadable(Exception):
    """A content is missing or damaged; the sentence says which."""


class ArtifactsAway(OSError):
    """The place cannot be reached or used now, so that nothing is known about its contents; the sentence says why."""


class Stored(NamedTuple):
    """A content, or the rest of a broken write (`digest` is empty), as `Artifacts.listed` finds it."""

    digest: str
    place: str
    size: int
    at: float
    """when it was written or made young, by the clock of the place (Unix seconds)"""


class Artifacts(Protocol):
    """A place for contents that all replicas share. Blocking and thread-safe; any method may raise OSError."""

    @property
    def where(self) -> str:
        """What and where it is, for messages: `the folder /srv/artifacts`."""

    def put(self, digest: str, size: int, chunks: Iterable[bytes]) -> None:
        """Write a content, or make it young where it is there; Unreadable if the chunks are not that content.

        Any number of writers may put the same content at once.
        """

    def read(self, digest: str) -> Iterator[bytes]:
        """Yield a content in chunks, the last one only if the whole is right; Unreadable otherwise."""

    def listed(self) -> Iterator[list[Stored]]:
        """Yield all contents and the rests of broken writes, part by part."""

    def remove(self, stored: Stored, before: float) -> bool:
        """Remove something listed that was not written or made young since `before` (Unix seconds); whether it went."""

    def now(self) -> float:
        """Return the time by the clock of `Stored.at`."""

    def set_up(self, used: bool) -> None:
        """Make the place ready; OSError with a sentence where it is not, as where it is gone although it is `used`."""

    def check(self) -> None:
        """Raise ArtifactsAway unless the place can be reached."""


def checked(digest: str) -> str:
    """Return a digest that is safe as a name; ValueError for anything else."""
    if not DIGEST.match(digest):
        raise ValueError(f"{digest!r} is no SHA-256")
    return digest


def verified(digest: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield chunks, the last one only if all of them are the content of this digest; Unreadable otherwise."""
    known, held = hashlib.sha256(), b""
    for chunk in chunks:
        if held:
            yield held
        known.update(chunk)
        held = chunk
    if known.hexdigest() != digest:
        raise Unreadable("its content is damaged")
    yield held


def whole(artifacts: Artifacts, digest: str) -> bytes:
    """Return a content in one piece; Unreadable, or OSError while it cannot be read."""
    return b"".join(artifacts.read(digest))


def put_bytes(artifacts: Artifacts, digest: str, data: bytes) -> None:
    """Write a content that is in memory."""
    artifacts.put(digest, len(data), [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)])
