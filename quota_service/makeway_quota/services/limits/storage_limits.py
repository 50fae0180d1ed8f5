"""Limit the bytes that are stored: quotas of a person, of a team and of all together, and free space on the disk.

Submissions, results and long logs are large writes, which a limit refuses; ending, cancelling and deleting never are.
One person may use only a share of a team's quota (`max_kept_share_percent`), so that its other members have the rest.
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
from makeway_api.quantities import size as format_bytes

from ...settings import ServiceSettings
from ...store.accounts import KINDS, AccountKey, accounts_of
from ...store.database.reserve import disk_bytes, free_bytes
from ...store.errors import StorageLimit, StorageLimitExceeded
from ...store.records import ByteLimits
from ...store.storage.contents import DELETED_AGE, MIN_ARTIFACT_BYTES
from ...store.store import Store
from ..refusals import busy, refuse

P = ParamSpec("P")
T = TypeVar("T")

ACCOUNT_CACHE_SECONDS = 1.0
"""How long the bytes of an account that were read stay in the cache; reservations made since are added to them"""
DELETE_HINT = (
    "Delete ended jobs that are not needed any more: `%quota` and the page Storage list those that keep the most, "
    "`%delete ID` deletes one"
)
DELETIONS_MERGED_SECONDS = 10.0
"""Deletions of one person within this time are noted as one"""
DELETED_FILES_SECONDS = DELETED_AGE + DELETIONS_MERGED_SECONDS + 30.0
"""How long large files of deleted jobs stay on the disk, so that submissions of the same contents can use them"""
MAX_CACHED_ACCOUNTS = 10_000
"""Accounts in the cache"""
MAX_WAIT_SECONDS = 20.0
"""How long a submission waits for others that are being written, and may be refused and free their space"""
RECHECK_SECONDS = 0.5
MAX_RESERVE_DIVISOR = 10
"""The free space that is reserved is at most the size of the disk divided by this"""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The fullest disk with data: its free bytes, and how many of them are reserved for small writes."""

    free: int
    reserve: int


class Call(Protocol):
    """Calls a blocking function in a thread (`Context.call`)."""

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...


@dataclass(slots=True)
class _CachedAccount:
    """The bytes of one account as read from the database at `read_at`, with the reservations made since."""

    read_at: float
    bytes: int


@dataclass(slots=True, eq=False)
class StorageReservation:
    """The bytes that one submission reserves until its rows are written, or refused."""

    owner: str
    team: str
    size: int
    released: bool = False

    @property
    def accounts(self) -> dict[StorageLimit, AccountKey]:
        """Return the accounts that its bytes count in, by the limit that applies to each."""
        return accounts_of(self.owner, self.team)


class StorageLimits:
    """The limits of stored bytes. Blocking and thread-safe: call it through `Context.call`."""

    def __init__(self, store: Store, settings: ServiceSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[AccountKey, _CachedAccount] = {}
        self._usage_texts: dict[str, tuple[float, str]] = {}
        """person → when their bytes by kind were read, and the sentence about them"""
        self._deleted_files: dict[str, deque[tuple[float, int]]] = {}
        """person → times and bytes of deleted large files that may still be on the disk"""
        self._reservations: set[StorageReservation] = set()
        """submissions that are being written: their large files are on the disk before the database has their rows"""
        self._released = asyncio.Event()
        self.limits = ByteLimits(
            person=settings.max_kept_person_bytes,
            team=settings.max_kept_team_bytes,
            whole=settings.max_kept_bytes,
            share=settings.max_kept_share_bytes,
        )
        """the limits that the transaction which adds the bytes checks again"""

    @asynccontextmanager
    async def room_for(self, owner: str, team: str, size: int, call: Call) -> AsyncIterator[None]:
        """Reserve `size` bytes while they are written; refuse (507) what exceeds a limit, or a full disk.

        Where they would fit without submissions that are being written at this moment, wait for these, which may be
        refused. `call` runs a function in a thread.
        """
        reservation, deadline = StorageReservation(owner, team, size), self._clock() + MAX_WAIT_SECONDS
        try:
            while not await call(self.reserve, reservation, may_wait=self._clock() < deadline):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._released.wait(), RECHECK_SECONDS)
            yield
        finally:
            self.release(reservation)

    def reserve(self, reservation: StorageReservation, *, may_wait: bool = False) -> bool:
        """Reserve bytes until `release`; refuse (507) what exceeds a limit, or fills the disk.

        Return False, with `may_wait`, where the bytes would fit without other reservations: these may be refused, and
        are counted twice between the commit of their rows and their release.
        """
        owner, team, size = reservation.owner, reservation.team, reservation.size
        reserved = sum(other.size for other in tuple(self._reservations))
        if may_wait and reserved and not self._fits(size + reserved) and self._fits(size):
            return False  # their large files may be on the disk already, and are counted twice then
        self.check_disk(size + reserved)
        with self._lock:
            self._check_deleted(owner, size)
            result = self._exceeded_when_reread(reservation)
            if result is None:
                for key in reservation.accounts.values():
                    self._accounts[key].bytes += size
                self._reservations.add(reservation)
                if reservation.released:  # the request was cancelled meanwhile
                    self._reservations.discard(reservation)
                return True
            account = reservation.accounts[result.which]
            if may_wait and any(other.accounts[result.which] == account for other in tuple(self._reservations)):
                return False
        raise self.refusal(owner, team, result)

    def note_deleted(self, owner: str, size: int) -> None:
        """Note large files that no job uses any more: they are removed from the disk some time later."""
        with self._lock:
            now, deleted = self._clock(), self._deleted_files.get(owner)
            if deleted and 0 <= now - deleted[-1][0] < DELETIONS_MERGED_SECONDS:
                deleted[-1] = deleted[-1][0], deleted[-1][1] + size
                return
            for other in list(self._deleted_files):
                self._drop_removed(other, now)
            self._deleted_files.setdefault(owner, deque()).append((now, size))

    def _drop_removed(self, owner: str, now: float) -> deque[tuple[float, int]]:
        """Forget deleted files of a person that are gone from the disk, and return the others."""
        deleted = self._deleted_files.get(owner, deque())
        while deleted and not 0 <= now - deleted[0][0] < DELETED_FILES_SECONDS:
            deleted.popleft()
        if not deleted:
            self._deleted_files.pop(owner, None)
        return deleted

    def _check_deleted(self, owner: str, size: int) -> None:
        """Refuse (429) large files that exceed a person's quota with deleted files that are still on the disk.

        So the disk holds at most twice the quota of a person.
        """
        now, limit = self._clock(), self.limits.person
        deleted = self._drop_removed(owner, now)
        deleted_bytes = sum(bytes for _, bytes in deleted)
        if deleted and limit and size >= MIN_ARTIFACT_BYTES and deleted_bytes + size > limit:
            wait = DELETED_FILES_SECONDS - (now - deleted[0][0])
            raise busy(
                f"{owner} deleted {format_bytes(deleted_bytes)} in the last minutes, which are removed from the disk "
                f"by and by: try again in {max(1, round(wait))} s.",
                "deleted_lately",
                429,
                wait,
                bytes=size,
                deleted_bytes=deleted_bytes,
            )

    def release(self, reservation: StorageReservation) -> None:
        """Drop a reservation: its rows are written and count themselves, or were refused. Runs on the event loop."""
        reservation.released = True  # without the lock, which a thread may hold while the database does not answer
        self._reservations.discard(reservation)
        self._released.set()
        self._released = asyncio.Event()

    def check(self, owner: str, team: str) -> None:
        """Refuse (507) where a person or a team has reached a limit already, or the disk is full."""
        self.check_disk(0)
        if (refused := self.quota_refusal(owner, team, 0)) is not None:
            raise refused

    def _fits(self, size: int) -> bool:
        disk = self.disk_space()
        return disk is None or disk.free - size >= disk.reserve

    def check_disk(self, size: int) -> None:
        """Refuse (507) `size` bytes that would use the free space that is reserved for small writes."""
        disk = self.disk_space()
        if disk is not None and disk.free - size < disk.reserve:
            raise refuse(
                f"The disk of Makeway has {format_bytes(max(0, disk.free))} free, and keeps "
                f"{format_bytes(disk.reserve)} for ending, cancelling and deleting, so nothing large is taken now. "
                f"{DELETE_HINT}, or ask an administrator to make room.",
                "disk_full",
                507,
                free_bytes=max(0, disk.free),
                reserve_bytes=disk.reserve,
                bytes=size,
            )

    def quota_refusal(self, owner: str, team: str, size: int) -> MakewayError | None:
        """Return the refusal of `size` more bytes for a person in a team, None where they fit beside the stored ones.

        Where other reservations would make the difference they are not counted: they may be counted twice, or refused.
        """
        reservation = StorageReservation(owner, team, size)
        with self._lock:
            if self._exceeded_limit(reservation) is None:
                return None
        for which, kept in zip(reservation.accounts, self._store.accounts.of(owner, team), strict=True):
            if (limit := getattr(self.limits, which)) and kept + size > limit:
                return self.refusal(owner, team, StorageLimitExceeded(which, kept, size))
        return None

    def _exceeded_when_reread(self, reservation: StorageReservation) -> StorageLimitExceeded | None:
        """Return which limit the bytes exceed, None where they fit.

        Bytes that do not fit by the cached accounts are checked again by accounts that are read now: since then people
        may have deleted jobs, and reservations may have been refused.
        """
        if self._exceeded_limit(reservation) is None:
            return None
        for key in reservation.accounts.values():
            self._accounts.pop(key, None)
        return self._exceeded_limit(reservation)

    def _exceeded_limit(self, reservation: StorageReservation) -> StorageLimitExceeded | None:
        self._refresh_accounts(reservation)
        for which, key in reservation.accounts.items():
            limit, kept = getattr(self.limits, which), self._accounts[key].bytes
            if limit and kept + reservation.size > limit:
                return StorageLimitExceeded(which, kept, reservation.size)
        return None

    def refusal(self, owner: str, team: str, result: StorageLimitExceeded) -> MakewayError:
        """Return the refusal for an exceeded limit, with what the person keeps by kind."""
        subject, allowance = {
            "person": (f"{owner} keeps", "one person may keep"),
            "team": (f"The team {team} keeps", "one team may keep"),
            "whole": ("All people together keep", "all may keep"),
            "share": (f"{owner} keeps", f"one person may keep of the quota of {team}"),
        }[result.which]
        limit: int = getattr(self.limits, result.which)
        usage = self._usage_text(owner)
        breakdown = f" ({usage})" if result.which in ("person", "share") else f", of which {owner}: {usage}"
        more = f"{format_bytes(result.size)} more do not fit" if result.size else "nothing more fits"
        kept = f"{subject} {format_bytes(result.kept)} of the {format_bytes(limit)} that {allowance}"
        kept += breakdown if usage else ""
        return refuse(
            f"{kept}: {more}. {DELETE_HINT}.",
            "storage_quota",
            507,
            kept_bytes=result.kept,
            bytes=result.size,
            limit_bytes=limit,
        )

    def _usage_text(self, owner: str) -> str:
        """Return a text of the bytes a person has in the database by kind, the largest first."""
        cached = self._usage_texts.get(owner)
        if cached is None or not 0 <= self._clock() - cached[0] < ACCOUNT_CACHE_SECONDS:
            usage: Counter[str] = Counter()
            for line in self._store.accounts.list_lines(owner):
                usage[line.kind] += line.bytes
            kinds = sorted(KINDS, key=lambda kind: (-usage[kind], kind))
            text = ", ".join(f"{kind} {format_bytes(usage[kind])}" for kind in kinds if usage[kind])
            if len(self._usage_texts) > MAX_CACHED_ACCOUNTS:
                self._usage_texts.clear()
            cached = self._usage_texts[owner] = self._clock(), text
        return cached[1]

    def disk_space(self) -> DiskSpace | None:
        """Return the space on the fullest disk with data, None where no data is on a disk of this machine."""
        disks = [DiskSpace(free_bytes(path), self._reserve_of(path)) for path in self._data_folders() if path.exists()]
        return min(disks, key=lambda disk: disk.free - disk.reserve, default=None)

    def writable_bytes(self) -> int | None:
        """Return the bytes that large writes may still use, None where no data is on a disk of this machine."""
        disk = self.disk_space()
        return None if disk is None else max(0, disk.free - disk.reserve)

    def _data_folders(self) -> Sequence[Path]:
        local = [self._settings.state_dir] if "local" in self._settings.backends else []
        return [*self._store.folders, *local]

    def _reserve_of(self, folder: Path) -> int:
        return min(self._settings.free_reserve_bytes, disk_bytes(folder) // MAX_RESERVE_DIVISOR)

    def _refresh_accounts(self, reservation: StorageReservation) -> None:
        """Read the accounts that the bytes count in unless they are cached, and add the bytes of reservations."""
        now, accounts = self._clock(), reservation.accounts
        cached = [self._accounts.get(key) for key in accounts.values()]
        if all(account is not None and 0 <= now - account.read_at < ACCOUNT_CACHE_SECONDS for account in cached):
            return
        if len(self._accounts) > MAX_CACHED_ACCOUNTS:
            self._accounts.clear()
        stored = self._store.accounts.of(reservation.owner, reservation.team)
        for (which, key), kept in zip(accounts.items(), stored, strict=True):
            reserved = sum(other.size for other in tuple(self._reservations) if other.accounts[which] == key)
            self._accounts[key] = _CachedAccount(now, kept + reserved)
