"""Back off from launches that failed: for one type, zone and market, by the class of the failure.

After a stock-out the next zone, market or type is tried in the same cycle; the first is tried again when its back-off
ends. Nothing here counts as a failure of a user's job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from .machine import Market

FailureClass = Literal["stock_out", "quota", "throttled", "denied", "invalid", "boot_failed", "spot_lost", "no_answer"]

ANY = "*"
"""In the place of a type, zone or market: all of them"""


class Delays(NamedTuple):
    """The first and the longest delay of a class of failures, in seconds; it doubles in between."""

    first_seconds: float
    max_seconds: float

    def after(self, failures: int) -> float:
        """Return the delay after so many failures in a row."""
        return min(self.max_seconds, self.first_seconds * 2.0 ** min(30, failures - 1))


DELAYS: Mapping[FailureClass, Delays] = {
    "stock_out": Delays(300, 1800),
    "quota": Delays(600, 3600),
    "throttled": Delays(5, 300),
    "denied": Delays(300, 1800),
    "invalid": Delays(300, 1800),
    "boot_failed": Delays(300, 1800),
    "spot_lost": Delays(300, 1800),
    "no_answer": Delays(60, 900),
}
WHOLE_DEPLOYMENT: frozenset[FailureClass] = frozenset({"throttled", "denied"})
"""Failures that say nothing of a type: no type is launched until they are over"""
WHOLE_TYPE: frozenset[FailureClass] = frozenset({"invalid", "boot_failed"})
"""Failures that other zones and markets would repeat"""
UNTIL_SUCCESS: frozenset[FailureClass] = frozenset({"boot_failed"})
"""Failures that are in a row until a machine succeeds, as each shows only after a boot, which may take long"""
EXPIRY_FACTOR = 4.0
"""An entry of another class is forgotten after so many times its delay without another failure"""


@dataclass(frozen=True, slots=True)
class LaunchBackoff:
    """A back-off of launches: one row for each type, zone, market and class of failure."""

    type: str
    zone: str
    market: str
    failure: FailureClass
    failures: int
    since: float
    until: float

    @property
    def key(self) -> tuple[str, str, str, FailureClass]:
        """What it is about."""
        return self.type, self.zone, self.market, self.failure

    def shifted(self, seconds: float) -> LaunchBackoff:
        """Return the back-off with its times moved, after the clock was set forward by so many seconds."""
        return replace(self, since=self.since + seconds, until=self.until + seconds)

    def covers(self, type_name: str, zone: str, market: Market) -> bool:
        """Whether it holds back a launch of a type in a zone and market."""
        return self.type in (ANY, type_name) and self.zone in (ANY, zone) and self.market in (ANY, market)

    def active(self, now: float) -> bool:
        """Whether it holds anything back: not after its end, nor before its begin, as the clock was set back."""
        return self.since <= now < self.until

    def expired(self, now: float) -> bool:
        """Whether the next failure counts as the first one again."""
        if self.failure in UNTIL_SUCCESS:
            return now < self.since
        return not self.since <= now < self.until + EXPIRY_FACTOR * (self.until - self.since)


def backoff_after_failure(
    known: Iterable[LaunchBackoff], type_name: str, zone: str, market: Market, failure: FailureClass, now: float
) -> LaunchBackoff:
    """Return the back-off after one more failure. Failures while it is active count as one."""
    key = _key(type_name, zone, market, failure)
    before = next((backoff for backoff in known if backoff.key == key and not backoff.expired(now)), None)
    if before is not None and before.active(now):
        return before
    failures = 1 if before is None else before.failures + 1
    return LaunchBackoff(*key, failures, now, now + DELAYS[failure].after(failures))


def _key(type_name: str, zone: str, market: str, failure: FailureClass) -> tuple[str, str, str, FailureClass]:
    if failure in WHOLE_DEPLOYMENT:
        return ANY, ANY, ANY, failure
    return (type_name, ANY, ANY, failure) if failure in WHOLE_TYPE else (type_name, zone, market, failure)


def active_backoff(
    known: Iterable[LaunchBackoff], type_name: str, zone: str, market: Market, now: float
) -> LaunchBackoff | None:
    """Return the back-off that holds back a launch for longest, None if there is none."""
    active = [backoff for backoff in known if backoff.active(now) and backoff.covers(type_name, zone, market)]
    return max(active, key=lambda backoff: (backoff.until, backoff.key), default=None)


def unexpired_backoffs(known: Iterable[LaunchBackoff], now: float) -> list[LaunchBackoff]:
    """Return the back-offs that still count; the others can be removed."""
    return [backoff for backoff in known if not backoff.expired(now)]
