"""Limit how fast one worker may write, so that none crowds out the others. Counted per replica."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

RATE = 2 * 2**20
"""Bytes a second"""
BURST = 16 * 2**20
"""Bytes that may come at once"""
RESULT_RATE = 16 * 2**20
"""The same for results and exceptions, which are sent once, while the GPUs of their job wait"""
RESULT_BURST = 32 * 2**20
MAX_BUCKETS = 10_000
"""Workers that are remembered without looking for those that were silent"""


@dataclass(slots=True)
class _Bucket:
    remaining: float
    at: float


class OutputRates:
    """A token bucket for each worker."""

    def __init__(self, rate: float = RATE, burst: float = BURST, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._buckets: dict[Hashable, _Bucket] = {}

    def take(self, worker: Hashable, size: int) -> float:
        """Take room for `size` bytes and return 0, or return the seconds after which there is room for them."""
        now = self._clock()
        if len(self._buckets) > MAX_BUCKETS:
            full = self._burst / self._rate
            self._buckets = {other: bucket for other, bucket in self._buckets.items() if now - bucket.at < full}
        bucket = self._buckets.setdefault(worker, _Bucket(self._burst, now))
        bucket.remaining = min(self._burst, bucket.remaining + (now - bucket.at) * self._rate)
        bucket.at = now
        if bucket.remaining < size:
            return (size - bucket.remaining) / self._rate
        bucket.remaining -= size
        return 0.0
