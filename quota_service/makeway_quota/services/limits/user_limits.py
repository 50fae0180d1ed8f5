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

MAX_BYTES = 64 * 2**20
"""Bytes of commands, environments and sources of one person's jobs that have not ended"""


@dataclass(slots=True)
class Bucket:
    """A token bucket: how many submissions are left, and since when."""

    remaining: float
    at: float


MAX_BUCKETS = 10_000
"""Token buckets that are kept without looking for unused ones"""

FILES_OF_ONE = 200
"""Files that a job has at most to count as a single submission of a minute"""

LOOKUPS_PER_MINUTE = 30
"""Times a minute that a refused submission of one person is looked for in the database"""


class Reservation:
    """Room for jobs that are being written: each takes its part until the store has it."""

    def __init__(self, user: str, remaining: int, size: int, expected: dict[str, Reservation]) -> None:
        self.user = user
        self.remaining = remaining
        self.size = size
        """bytes of each"""
        self._expected = expected

    def expect(self, id: str) -> None:
        """Count one of the jobs as pending, no longer as reserved, when the store has this id."""
        self._expected[id] = self


class UserLimits:
    """The counts of all users. Follows the store's commits, in the threads that write."""

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
        self._guard = threading.Lock()
        self._versions: dict[str, int] = {}
        self._waits: dict[str, tuple[str, int]] = {}
        """job id to owner and 1, for jobs that wait"""
        self._live: dict[str, tuple[str, int]] = {}
        """job id to owner and bytes, for jobs that have not ended: each of them may return to the queue"""
        self._pending: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._arriving: Counter[str] = Counter()
        self._arriving_bytes: Counter[str] = Counter()
        self._expected: dict[str, Reservation] = {}
        self._buckets: dict[str, Bucket] = {}
        self._lookups: dict[str, Bucket] = {}
        self._followers: Counter[str] = Counter()
        self._known = False
        self._ended_unlearned: set[str] = set()
        """jobs that ended before `learn`: it may bring older rows of theirs, so their versions stay until then"""
        store.on_change(self._take)

    @property
    def known(self) -> bool:
        """Whether the jobs that waited at the start were counted (`learn`)."""
        return self._known

    @property
    def waiting(self) -> int:
        """Return the number of jobs that wait, of all users."""
        return len(self._waits)

    def learn(self, rows: Iterable[Workload]) -> None:
        """Count the jobs that wait already; those that were committed meanwhile are newer."""
        self._take(tuple(rows))
        with self._guard:
            self._known = True
            for id in self._ended_unlearned:
                self._versions.pop(id, None)
            self._ended_unlearned.clear()

    def _take(self, changed: Sequence[Workload]) -> None:
        with self._guard:
            for row in changed:
                if (reservation := self._expected.pop(row.id, None)) is not None:
                    reservation.remaining -= 1
                    self._less(self._arriving, reservation.user)
                    self._less(self._arriving_bytes, reservation.user, reservation.size)
                if row.kind != "job" or self._versions.get(row.id, -1) >= row.version:
                    continue
                _count(self._pending, self._waits, row, 1 if row.state == "pending" else None)
                _count(self._bytes, self._live, row, row.weight if row.live else None)
                if row.live:
                    self._versions[row.id] = row.version
                    self._ended_unlearned.discard(row.id)
                elif self._known:
                    self._versions.pop(row.id, None)
                else:
                    self._versions[row.id] = row.version
                    self._ended_unlearned.add(row.id)

    @contextmanager
    def submitting(self, user: str, many: int, size: int = 0, files: int = 0) -> Iterator[Reservation]:
        """Reserve room for `many` jobs of `size` bytes each while they are written; refuse what exceeds a limit.

        Each has so many `files`: many of them count as further submissions of a minute, as each is a row to write.
        """
        reservation = Reservation(user, many, size, self._expected)
        with self._guard:
            self._check_pending(user, many)
            self._check_bytes(user, many * size)
            self._check_rate(user, many * (1 + files // FILES_OF_ONE))
            self._arriving[user] += many
            self._arriving_bytes[user] += many * size
        try:
            yield reservation
        finally:
            with self._guard:
                self._less(self._arriving, user, reservation.remaining)
                self._less(self._arriving_bytes, user, reservation.remaining * size)
                for id in [id for id, other in self._expected.items() if other is reservation]:
                    del self._expected[id]

    def count_request(self, user: str) -> None:
        """Count a request that changes the queue as a submission of a minute; refuse it beyond the limit."""
        with self._guard:
            self._check_rate(user, 1)

    def _check_pending(self, user: str, many: int) -> None:
        there, maximum = self._pending[user] + self._arriving[user], self._max_pending
        if maximum and there + many > maximum:
            raise refuse(
                f"{user} has {count(there, 'pending job')}, and {maximum} is the most for one person"
                + (f": {many} more do not fit. " if many > 1 else ". ")
                + "Submit more when some have started, or cancel some.",
                "too_many_pending",
                429,
                pending=there,
                submitted=many,
                most=maximum,
            )

    def _check_bytes(self, user: str, size: int) -> None:
        there = self._bytes[user] + self._arriving_bytes[user]
        if self._max_pending and size and there + size > MAX_BYTES:
            raise refuse(
                f"The commands, environments and sources of {user}'s pending and running jobs have "
                f"{there // 2**20} MiB, and {MAX_BYTES // 2**20} MiB is the most for one person: put long ones into a "
                "file of the job, or wait until some jobs have ended.",
                "pending_too_large",
                429,
                bytes=there,
                submitted=size,
                limit_bytes=MAX_BYTES,
            )

    def _check_rate(self, user: str, many: int) -> None:
        if not self._per_minute:
            return
        maximum = float(self._per_minute)
        bucket = self._filled(self._buckets, user, maximum)
        if bucket.remaining < min(many, maximum):
            wait = (min(many, maximum) - bucket.remaining) * 60 / maximum
            raise busy(
                f"{user} submits more than {count(self._per_minute, 'job')} a minute: "
                f"try again in {max(1, round(wait))} s.",
                "too_many_submissions",
                429,
                wait,
                per_minute=self._per_minute,
            )
        bucket.remaining -= min(many, maximum)

    @contextmanager
    def following(self, user: str) -> Iterator[None]:
        """Count a request that waits for a log; refuse it beyond the limit."""
        with self._guard:
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
            with self._guard:
                self._less(self._followers, user)

    def may_repeat_lookup(self, user: str) -> bool:
        """Whether one more look-up of a refused submission of this person is allowed; counts it."""
        with self._guard:
            bucket = self._filled(self._lookups, user, LOOKUPS_PER_MINUTE)
            if bucket.remaining < 1:
                return False
            bucket.remaining -= 1
            return True

    def _filled(self, buckets: dict[str, Bucket], user: str, limit: float) -> Bucket:
        """Return the bucket of a user, with what a minute's `limit` has added since the last time."""
        now = self._clock()
        bucket = buckets.setdefault(user, Bucket(limit, now))
        bucket.remaining = min(limit, bucket.remaining + max(0.0, now - bucket.at) * limit / 60)
        bucket.at = max(bucket.at, now)
        if len(buckets) > MAX_BUCKETS:  # one that was not used for a minute is full
            for name in [name for name, other in buckets.items() if now - other.at >= 60]:
                del buckets[name]
        return bucket

    @staticmethod
    def _less(counter: Counter[str], name: str, by: int = 1) -> None:
        counter[name] -= by
        if counter[name] <= 0:
            del counter[name]


def _count(counter: Counter[str], counted: dict[str, tuple[str, int]], row: Workload, amount: int | None) -> None:
    """Count an amount of a job for its owner in place of what was counted of it before; None: not any more."""
    if (before := counted.pop(row.id, None)) is not None:
        UserLimits._less(counter, *before)
    if amount is not None:
        counted[row.id] = row.owner, amount
        counter[row.owner] += amount
