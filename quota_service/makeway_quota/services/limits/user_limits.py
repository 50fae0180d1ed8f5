"""Limit what one person can ask for: pending jobs, submissions per minute, log followers.

Counts are kept per replica; a limit of 0 is no limit. Each check costs the same however many jobs there are.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ...store.records import Workload
from ...store.store import Store
from ...wording import count
from ..refusals import busy, refuse

MAX_LIVE_BYTES = 64 * 2**20
"""Bytes of commands, environments and sources of one person's live jobs, which have not ended"""


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: how many submissions remained at a time; a minute refills it."""

    remaining: float
    filled_at: float


MAX_BUCKETS = 10_000
"""Token buckets beyond which unused ones are dropped"""

FILES_PER_SUBMISSION = 200
"""Files for which a submission counts once more against the rate limit, as each is a row to write"""

LOOKUPS_PER_MINUTE = 30
"""How often a minute the database is searched for an earlier submission with the key of a refused one, per person"""


class Reservation:
    """The part of a person's limits that jobs use while they are being written: each until the store has it.

    `job_bytes` are of one job.
    """

    def __init__(self, user: str, jobs: int, job_bytes: int, reservation_of: dict[str, Reservation]) -> None:
        self.user = user
        self.remaining_jobs = jobs
        self.job_bytes = job_bytes
        self._reservation_of = reservation_of

    def expect(self, id: str) -> None:
        """Expect the job with this id: once the store has it, it counts as pending and no longer as reserved."""
        self._reservation_of[id] = self


class UserLimits:
    """The counts of all users, updated by each commit of the store, in the thread that commits."""

    def __init__(
        self,
        store: Store,
        *,
        pending: int,
        submissions: int,
        followers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_pending = pending
        self._per_minute = submissions
        self._max_followers = followers
        self._clock = clock
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._pending_jobs: dict[str, tuple[str, int]] = {}
        """id of each pending job → owner and 1"""
        self._live_bytes: dict[str, tuple[str, int]] = {}
        """id of each live job → owner and bytes; a running one counts, too, as it may return to the queue"""
        self._pending_by_user: Counter[str] = Counter()
        self._bytes_by_user: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()
        self._reserved_bytes: Counter[str] = Counter()
        self._reservation_of: dict[str, Reservation] = {}
        """id of each job that is being written → its reservation"""
        self._buckets: dict[str, TokenBucket] = {}
        self._lookups: dict[str, TokenBucket] = {}
        self._followers: Counter[str] = Counter()
        self._counted_existing = False
        self._ended_before_count: set[str] = set()
        """jobs that ended before `count_existing`, which may get older rows of them: until then their versions stay"""
        store.on_change(self._count_changes)

    @property
    def counted_existing(self) -> bool:
        """Whether the jobs that existed at the start were counted (`count_existing`)."""
        return self._counted_existing

    @property
    def waiting(self) -> int:
        """Return the number of jobs that wait, of all users."""
        return len(self._pending_jobs)

    def count_existing(self, rows: Iterable[Workload]) -> None:
        """Count the jobs that existed before this process; newer rows that were committed meanwhile win."""
        self._count_changes(tuple(rows))
        with self._lock:
            self._counted_existing = True
            for id in self._ended_before_count:
                self._versions.pop(id, None)
            self._ended_before_count.clear()

    def _count_changes(self, changed: Sequence[Workload]) -> None:
        """Count the committed rows in place of their earlier versions."""
        with self._lock:
            for row in changed:
                if (reservation := self._reservation_of.pop(row.id, None)) is not None:
                    reservation.remaining_jobs -= 1
                    self._subtract(self._reserved, reservation.user)
                    self._subtract(self._reserved_bytes, reservation.user, reservation.job_bytes)
                if row.kind != "job" or self._versions.get(row.id, -1) >= row.version:
                    continue
                _count(self._pending_by_user, self._pending_jobs, row, 1 if row.state == "pending" else None)
                _count(self._bytes_by_user, self._live_bytes, row, row.weight if row.live else None)
                if row.live:
                    self._versions[row.id] = row.version
                    self._ended_before_count.discard(row.id)
                elif self._counted_existing:
                    self._versions.pop(row.id, None)
                else:
                    self._versions[row.id] = row.version
                    self._ended_before_count.add(row.id)

    @contextmanager
    def submitting(self, user: str, jobs: int, job_bytes: int = 0, files: int = 0) -> Iterator[Reservation]:
        """Reserve a number of jobs of `job_bytes` each while they are written; refuse what exceeds a limit.

        Each job has this number of `files`, and counts once more in the rate for each FILES_PER_SUBMISSION of them.
        """
        reservation = Reservation(user, jobs, job_bytes, self._reservation_of)
        with self._lock:
            self._check_pending(user, jobs)
            self._check_bytes(user, jobs * job_bytes)
            self._check_rate(user, jobs * (1 + files // FILES_PER_SUBMISSION))
            self._reserved[user] += jobs
            self._reserved_bytes[user] += jobs * job_bytes
        try:
            yield reservation
        finally:
            with self._lock:
                self._subtract(self._reserved, user, reservation.remaining_jobs)
                self._subtract(self._reserved_bytes, user, reservation.remaining_jobs * job_bytes)
                for id in [id for id, other in self._reservation_of.items() if other is reservation]:
                    del self._reservation_of[id]

    def count_request(self, user: str) -> None:
        """Count a request that changes the queue like a submission; refuse it beyond the rate limit."""
        with self._lock:
            self._check_rate(user, 1)

    def _check_pending(self, user: str, jobs: int) -> None:
        current, maximum = self._pending_by_user[user] + self._reserved[user], self._max_pending
        if maximum and current + jobs > maximum:
            raise refuse(
                f"{user} has {count(current, 'pending job')}, and {maximum} is the most for one person"
                + (f": {jobs} more do not fit. " if jobs > 1 else ". ")
                + "Submit more when some have started, or cancel some.",
                "too_many_pending",
                429,
                pending=current,
                submitted=jobs,
                most=maximum,
            )

    def _check_bytes(self, user: str, size: int) -> None:
        current = self._bytes_by_user[user] + self._reserved_bytes[user]
        if self._max_pending and size and current + size > MAX_LIVE_BYTES:
            raise refuse(
                f"The commands, environments and sources of {user}'s pending and running jobs have "
                f"{current // 2**20} MiB, and {MAX_LIVE_BYTES // 2**20} MiB is the most for one person: put long ones "
                "into a file of the job, or wait until some jobs have ended.",
                "pending_too_large",
                429,
                bytes=current,
                submitted=size,
                limit_bytes=MAX_LIVE_BYTES,
            )

    def _check_rate(self, user: str, jobs: int) -> None:
        if not self._per_minute:
            return
        maximum = float(self._per_minute)
        bucket = self._refilled(self._buckets, user, maximum)
        if bucket.remaining < min(jobs, maximum):
            wait = (min(jobs, maximum) - bucket.remaining) * 60 / maximum
            raise busy(
                f"{user} submits more than {count(self._per_minute, 'job')} a minute: "
                f"try again in {max(1, round(wait))} s.",
                "too_many_submissions",
                429,
                wait,
                per_minute=self._per_minute,
            )
        bucket.remaining -= min(jobs, maximum)

    @contextmanager
    def following(self, user: str) -> Iterator[None]:
        """Count a request as a log follower while it waits for a log; refuse it beyond the limit."""
        with self._lock:
            maximum = self._max_followers
            if maximum and self._followers[user] >= maximum:
                raise busy(
                    f"{user} follows {count(maximum, 'log')} already, the most for one person: "
                    "stop following one first.",
                    "too_many_followers",
                    429,
                    5,
                    most=maximum,
                )
            self._followers[user] += 1
        try:
            yield
        finally:
            with self._lock:
                self._subtract(self._followers, user)

    def may_repeat_lookup(self, user: str) -> bool:
        """Whether the database may be searched once more for a refused submission of this person; count the search."""
        with self._lock:
            bucket = self._refilled(self._lookups, user, LOOKUPS_PER_MINUTE)
            if bucket.remaining < 1:
                return False
            bucket.remaining -= 1
            return True

    def _refilled(self, buckets: dict[str, TokenBucket], user: str, limit: float) -> TokenBucket:
        """Return the bucket of a user, refilled at `limit` a minute since the last time."""
        now = self._clock()
        bucket = buckets.setdefault(user, TokenBucket(limit, now))
        bucket.remaining = min(limit, bucket.remaining + max(0.0, now - bucket.filled_at) * limit / 60)
        bucket.filled_at = max(bucket.filled_at, now)
        if len(buckets) > MAX_BUCKETS:  # one that was not used for a minute is full
            for name in [name for name, other in buckets.items() if now - other.filled_at >= 60]:
                del buckets[name]
        return bucket

    @staticmethod
    def _subtract(counter: Counter[str], name: str, amount: int = 1) -> None:
        counter[name] -= amount
        if counter[name] <= 0:
            del counter[name]


def _count(counter: Counter[str], counted: dict[str, tuple[str, int]], row: Workload, amount: int | None) -> None:
    """Count an amount of a job for its owner in place of the one in `counted`; None removes it."""
    if (before := counted.pop(row.id, None)) is not None:
        UserLimits._subtract(counter, *before)
    if amount is not None:
        counted[row.id] = row.owner, amount
        counter[row.owner] += amount
