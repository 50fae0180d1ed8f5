"""Keep what people leave within limits: a quota for a person, a team and all, and free space on the disk.

Submissions, results and long logs are large writes, which a limit refuses; whatever ends, cancels or deletes is not.
One person may keep a part of a team's quota only (`max_kept_share_percent`), so that the others always have the rest.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from makeway_api.errors import MakewayError
from makeway_api.quantities import size as written

from ...settings import ServiceSettings
from ...store.accounts import KINDS, WHICH
from ...store.database.reserve import disk_bytes, free_bytes
from ...store.errors import TooMuchKept
from ...store.records import KeptLimits
from ...store.store import Store
from ..refusals import refuse

KNOWN_SECONDS = 1.0
"""How long sums that were read count, with what was taken since"""
DELETE = (
    "Delete ended jobs that are not needed any more: `%quota` and the page Storage list those that keep the most, "
    "`%delete ID` deletes one"
)
PART_OF_DISK = 10
"""The free space that is kept is at most this part of the disk"""


@dataclass(frozen=True, slots=True)
class Room:
    """The fullest disk that data is on: bytes that are free, and how many of them are kept for small writes."""

    free: int
    reserve: int


@dataclass(slots=True)
class _Sums:
    at: float
    person: int
    team: int
    whole: int
    share: int
    """of the team's bytes, those of this person"""
    kinds: str | None = None
    """the person's bytes by kind, in words; None: not read yet"""


class StorageLimits:
    """The limits of what is kept. Blocking and thread-safe: call it through `Context.call`."""

    def __init__(self, store: Store, settings: ServiceSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._guard = threading.Lock()
        self._known: dict[tuple[str, str], _Sums] = {}
        self.limits = KeptLimits(
            person=settings.max_kept_person_bytes,
            team=settings.max_kept_team_bytes,
            whole=settings.max_kept_bytes,
            share=settings.max_kept_share_bytes,
        )
        """what the transaction that adds bytes checks again"""

    def check(self, owner: str, team: str, size: int) -> None:
        """Take `size` bytes for a person in a team; 507 where they exceed a limit, or the disk has little room."""
        self.check_disk(size)
        if (refused := self.beyond(owner, team, size)) is not None:
            raise refused
        with self._guard:
            sums = self._sums(owner, team)
            person, share = sums.person + size, sums.share + size
            taken = replace(sums, person=person, team=sums.team + size, whole=sums.whole + size, share=share)
            self._known[owner, team] = taken

    def check_disk(self, size: int) -> None:
        """Refuse (507) `size` bytes that would use the free space that is kept for small writes."""
        room = self.room()
        if room is not None and room.free - size < room.reserve:
            raise refuse(
                f"The disk of Makeway has {written(max(0, room.free))} free, and keeps {written(room.reserve)} for "
                f"ending, cancelling and deleting, so nothing large is taken now. {DELETE}, or ask an administrator to "
                "make room.",
                "disk_full",
                507,
                free_bytes=max(0, room.free),
                reserve_bytes=room.reserve,
                bytes=size,
            )

    def beyond(self, owner: str, team: str, size: int) -> MakewayError | None:
        """Return the refusal of `size` more bytes for a person in a team, None where they fit."""
        with self._guard:
            sums = self._sums(owner, team)
        for which in WHICH:
            limit, kept = getattr(self.limits, which), getattr(sums, which)
            if limit and kept + size > limit:
                return self.refusal(owner, team, TooMuchKept(which, kept, size))
        return None

    def refusal(self, owner: str, team: str, found: TooMuchKept) -> MakewayError:
        """Return the refusal of bytes that are too many, with what the person keeps by kind."""
        who, may = {
            "person": (f"{owner} keeps", "one person may keep"),
            "team": (f"The team {team} keeps", "one team may keep"),
            "whole": ("All people together keep", "all may keep"),
            "share": (f"{owner} keeps", f"one person may keep of the quota of {team}"),
        }[found.which]
        limit: int = getattr(self.limits, found.which)
        with self._guard:
            sums = self._sums(owner, team)
        own = self._in_words(owner, sums)
        whose = f" ({own})" if found.which in ("person", "share") else f", of which {owner}: {own}"
        more = f"{written(found.size)} more do not fit" if found.size else "nothing more fits"
        kept = f"{who} {written(found.kept)} of the {written(limit)} that {may}{whose if own else ''}"
        return refuse(
            f"{kept}: {more}. {DELETE}.",
            "storage_quota",
            507,
            kept_bytes=found.kept,
            bytes=found.size,
            limit_bytes=limit,
        )

    def _in_words(self, owner: str, sums: _Sums) -> str:
        """Return what a person keeps by kind, the largest first, as it is in the database."""
        if sums.kinds is None:
            found: Counter[str] = Counter()
            for line in self._store.accounts.listed(owner):
                found[line.kind] += line.bytes
            kinds = sorted(KINDS, key=lambda kind: (-found[kind], kind))
            sums.kinds = ", ".join(f"{kind} {written(found[kind])}" for kind in kinds if found[kind])
        return sums.kinds

    def room(self) -> Room | None:
        """Return the room on the fullest of the disks with data; None where none of them is of this machine."""
        found = [Room(free_bytes(path), self._kept_free(path)) for path in self._folders() if path.exists()]
        return min(found, key=lambda room: room.free - room.reserve, default=None)

    def left(self) -> int | None:
        """Return the bytes that large writes may still take of the disk; None where it is not of this machine."""
        room = self.room()
        return None if room is None else max(0, room.free - room.reserve)

    def _folders(self) -> Sequence[Path]:
        local = [self._settings.state_dir] if self._settings.backend == "local" else []
        return [*self._store.folders, *local]

    def _kept_free(self, folder: Path) -> int:
        return min(self._settings.free_reserve_bytes, disk_bytes(folder) // PART_OF_DISK)

    def _sums(self, owner: str, team: str) -> _Sums:
        now = self._clock()
        known = self._known.get((owner, team))
        if known is None or not 0 <= now - known.at < KNOWN_SECONDS:
            if len(self._known) > 10_000:
                self._known.clear()
            known = self._known[owner, team] = _Sums(now, *self._store.accounts.of(owner, team))
        return known
