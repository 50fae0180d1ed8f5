"""Keep what people leave within limits: a quota for a person, a team and all, and free space on the disk.

Submissions, results and long logs are large writes, which a limit refuses; whatever ends, cancels or deletes is not.
One person may keep a part of a team's quota only (`max_kept_share_percent`), so that the others always have the rest.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from makeway_api.errors import MakewayError
from makeway_api.quantities import size as written

from ...settings import ServiceSettings
from ...store.accounts import KINDS, Who, accounts_of
from ...store.database.reserve import disk_bytes, free_bytes
from ...store.errors import TooMuchKept, Which
from ...store.records import KeptLimits
from ...store.storage.contents import DELETED_AGE, LARGE
from ...store.store import Store
from ..refusals import busy, refuse

P = ParamSpec("P")
T = TypeVar("T")

KNOWN_SECONDS = 1.0
"""How long sums that were read count, with what was taken since"""
DELETE = (
    "Delete ended jobs that are not needed any more: `%quota` and the page Storage list those that keep the most, "
    "`%delete ID` deletes one"
)
SUMMED_SECONDS = 10.0
"""For how long deletions of a person are noted as one"""
REMOVED_SECONDS = DELETED_AGE + SUMMED_SECONDS + 30.0
"""After how long the large files of what was deleted are gone: they stay for submissions of the same"""
MAX_KNOWN = 10_000
"""Accounts that are kept in memory"""
MAX_WAIT_SECONDS = 20.0
"""How long a submission waits for others that are being written, and may leave it room"""
RECHECK_SECONDS = 0.5
PART_OF_DISK = 10
"""The free space that is kept is at most this part of the disk"""


@dataclass(frozen=True, slots=True)
class Room:
    """The fullest disk that data is on: bytes that are free, and how many of them are kept for small writes."""

    free: int
    reserve: int


class Call(Protocol):
    """Calls a blocking function in a thread (`Context.call`)."""

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...


@dataclass(slots=True)
class _Sum:
    """The bytes of one account, as they were read at a time, with what was taken since."""

    at: float
    bytes: int


@dataclass(slots=True, eq=False)
class Taken:
    """Room that one submission has until its rows are written, or refused."""

    owner: str
    team: str
    size: int
    released: bool = False

    @property
    def accounts(self) -> dict[Which, Who]:
        """The accounts that it counts in, by the limit of each."""
        return accounts_of(self.owner, self.team)


class StorageLimits:
    """The limits of what is kept. Blocking and thread-safe: call it through `Context.call`."""

    def __init__(self, store: Store, settings: ServiceSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._guard = threading.Lock()
        self._known: dict[Who, _Sum] = {}
        self._kinds: dict[str, tuple[float, str]] = {}
        """when a person's bytes by kind were read, and what they are, in words"""
        self._deleted: dict[str, deque[tuple[float, int]]] = {}
        """when a person deleted large files that may still be on the disk, and their bytes, those of 10 s together"""
        self._arriving: set[Taken] = set()
        """submissions that are being written: large files are on the disk before the row that tells of them"""
        self._released = asyncio.Event()
        self.limits = KeptLimits(
            person=settings.max_kept_person_bytes,
            team=settings.max_kept_team_bytes,
            whole=settings.max_kept_bytes,
            share=settings.max_kept_share_bytes,
        )
        """what the transaction that adds bytes checks again"""

    @asynccontextmanager
    async def room_for(self, owner: str, team: str, size: int, call: Call) -> AsyncIterator[None]:
        """Take room for `size` bytes while they are written; refuse (507) what exceeds a limit, or a full disk.

        Where only submissions that are being written at this moment are in the way, wait for them. `call` runs a
        function in a thread.
        """
        taken, ends = Taken(owner, team, size), self._clock() + MAX_WAIT_SECONDS
        try:
            while not await call(self.take, taken, patient=self._clock() < ends):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._released.wait(), RECHECK_SECONDS)
            yield
        finally:
            self.release(taken)

    def take(self, taken: Taken, *, patient: bool = False) -> bool:
        """Take room until `release`; refuse (507) what exceeds a limit, or fills the disk.

        False, where it is `patient` and only what is being written is in the way: that may be refused, and is counted
        twice in the moment between its rows and its release.
        """
        owner, team, size = taken.owner, taken.team, taken.size
        arriving = sum(other.size for other in tuple(self._arriving))
        if patient and arriving and not self._fits(size + arriving) and self._fits(size):
            return False  # their large files may be on the disk already, and are counted twice then
        self.check_disk(size + arriving)
        with self._guard:
            self._check_deleted(owner, size)
            result = self._too_much(taken)
            if result is None:
                for who in taken.accounts.values():
                    self._known[who].bytes += size
                self._arriving.add(taken)
                if taken.released:  # the request was cancelled meanwhile
                    self._arriving.discard(taken)
                return True
            mine = taken.accounts[result.which]
            if patient and any(other.accounts[result.which] == mine for other in tuple(self._arriving)):
                return False
        raise self.refusal(owner, team, result)

    def deleted(self, owner: str, size: int) -> None:
        """Note large files of a person whose last row was deleted: they go some time after it."""
        with self._guard:
            now, known = self._clock(), self._deleted.get(owner)
            if known and 0 <= now - known[-1][0] < SUMMED_SECONDS:
                known[-1] = known[-1][0], known[-1][1] + size
                return
            for other in list(self._deleted):
                self._drop_removed(other, now)
            self._deleted.setdefault(owner, deque()).append((now, size))

    def _drop_removed(self, owner: str, now: float) -> deque[tuple[float, int]]:
        """Forget what a person deleted so long ago that it is removed, and return the rest."""
        deleted = self._deleted.get(owner, deque())
        while deleted and not 0 <= now - deleted[0][0] < REMOVED_SECONDS:
            deleted.popleft()
        if not deleted:
            self._deleted.pop(owner, None)
        return deleted

    def _check_deleted(self, owner: str, size: int) -> None:
        """Refuse (429) large files of who deletes and submits in turn.

        So the disk has at most twice what a person may keep.
        """
        now, limit = self._clock(), self.limits.person
        deleted = self._drop_removed(owner, now)
        if deleted and limit and size >= LARGE and (there := sum(bytes for _, bytes in deleted)) + size > limit:
            wait = REMOVED_SECONDS - (now - deleted[0][0])
            raise busy(
                f"{owner} deleted {written(there)} in the last minutes, which are removed from the disk by and by: "
                f"try again in {max(1, round(wait))} s.",
                "deleted_lately",
                429,
                wait,
                bytes=size,
                deleted_bytes=there,
            )

    def release(self, taken: Taken) -> None:
        """Forget room that was taken: its rows are written, and count by themselves, or were refused. On the loop."""
        taken.released = True  # without the guard, which a thread may hold while the database does not answer
        self._arriving.discard(taken)
        self._released.set()
        self._released = asyncio.Event()

    def check(self, owner: str, team: str) -> None:
        """Refuse (507) a person who is at a limit already, or a full disk."""
        self.check_disk(0)
        if (refused := self.beyond(owner, team, 0)) is not None:
            raise refused

    def _fits(self, size: int) -> bool:
        room = self.room()
        return room is None or room.free - size >= room.reserve

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
        """Return the refusal of `size` more bytes for a person in a team, None where they fit beside what is kept.

        What is being written is left out where it decides: it may be counted twice, and be refused.
        """
        more = Taken(owner, team, size)
        with self._guard:
            if self._exceeded(more) is None:
                return None
        for which, kept in zip(more.accounts, self._store.accounts.of(owner, team), strict=True):
            if (limit := getattr(self.limits, which)) and kept + size > limit:
                return self.refusal(owner, team, TooMuchKept(which, kept, size))
        return None

    def _too_much(self, more: Taken) -> TooMuchKept | None:
        """Return which limit these bytes exceed.

        They fit into what was read at most KNOWN_SECONDS ago, and was taken since, or are refused by what is read now:
        others may have deleted, or been refused.
        """
        if self._exceeded(more) is None:
            return None
        for who in more.accounts.values():
            self._known.pop(who, None)
        return self._exceeded(more)

    def _exceeded(self, more: Taken) -> TooMuchKept | None:
        self._read(more)
        for which, who in more.accounts.items():
            limit, kept = getattr(self.limits, which), self._known[who].bytes
            if limit and kept + more.size > limit:
                return TooMuchKept(which, kept, more.size)
        return None

    def refusal(self, owner: str, team: str, result: TooMuchKept) -> MakewayError:
        """Return the refusal of bytes that are too many, with what the person keeps by kind."""
        who, may = {
            "person": (f"{owner} keeps", "one person may keep"),
            "team": (f"The team {team} keeps", "one team may keep"),
            "whole": ("All people together keep", "all may keep"),
            "share": (f"{owner} keeps", f"one person may keep of the quota of {team}"),
        }[result.which]
        limit: int = getattr(self.limits, result.which)
        own = self._in_words(owner)
        whose = f" ({own})" if result.which in ("person", "share") else f", of which {owner}: {own}"
        more = f"{written(result.size)} more do not fit" if result.size else "nothing more fits"
        kept = f"{who} {written(result.kept)} of the {written(limit)} that {may}{whose if own else ''}"
        return refuse(
            f"{kept}: {more}. {DELETE}.",
            "storage_quota",
            507,
            kept_bytes=result.kept,
            bytes=result.size,
            limit_bytes=limit,
        )

    def _in_words(self, owner: str) -> str:
        """Return what a person keeps by kind, the largest first, as it is in the database."""
        known = self._kinds.get(owner)
        if known is None or not 0 <= self._clock() - known[0] < KNOWN_SECONDS:
            result: Counter[str] = Counter()
            for line in self._store.accounts.listed(owner):
                result[line.kind] += line.bytes
            kinds = sorted(KINDS, key=lambda kind: (-result[kind], kind))
            words = ", ".join(f"{kind} {written(result[kind])}" for kind in kinds if result[kind])
            if len(self._kinds) > MAX_KNOWN:
                self._kinds.clear()
            known = self._kinds[owner] = self._clock(), words
        return known[1]

    def room(self) -> Room | None:
        """Return the room on the fullest of the disks with data; None where none of them is of this machine."""
        rooms = [Room(free_bytes(path), self._kept_free(path)) for path in self._folders() if path.exists()]
        return min(rooms, key=lambda room: room.free - room.reserve, default=None)

    def remaining(self) -> int | None:
        """Return the bytes that large writes may still take of the disk; None where it is not of this machine."""
        room = self.room()
        return None if room is None else max(0, room.free - room.reserve)

    def _folders(self) -> Sequence[Path]:
        local = [self._settings.state_dir] if "local" in self._settings.backends else []
        return [*self._store.folders, *local]

    def _kept_free(self, folder: Path) -> int:
        return min(self._settings.free_reserve_bytes, disk_bytes(folder) // PART_OF_DISK)

    def _read(self, more: Taken) -> None:
        """Read the accounts that these bytes count in, unless they are known; what is being written is added."""
        now, whose = self._clock(), more.accounts
        known = [self._known.get(who) for who in whose.values()]
        if all(account is not None and 0 <= now - account.at < KNOWN_SECONDS for account in known):
            return
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        read = self._store.accounts.of(more.owner, more.team)
        for (which, who), kept in zip(whose.items(), read, strict=True):
            arriving = sum(other.size for other in tuple(self._arriving) if other.accounts[which] == who)
            self._known[who] = _Sum(now, kept + arriving)
