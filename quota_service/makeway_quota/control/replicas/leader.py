"""Decide whether this replica acts: one leader, candidates that wait, and a check before each action.

The loop plans and commits with the leader's term; the actuator asks `acting` before every order. Guarantees: the term
is taken only with the lock held, nothing is ordered when the last renewal is older than the deadline, and a leader that
lost the lock becomes a candidate again in the same process, without touching what runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from ...store.errors import NotLeading, StoreError
from ...store.replicas.leader_lock import LeaderLock

T = TypeVar("T")
log = logging.getLogger("makeway.leader")

RETRY = 0.5
"""Seconds between two tries of a candidate."""
STAND_BACK = 5.0
"""Seconds for which a replica that is not able to act leaves the lock to others; then it tries once."""
UNABLE = 30.0
"""Seconds that a replica leads which took the lock although it was not able to act: perhaps no other is, either."""


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment on two clocks: the monotonic one, and the one that also counts while the machine is suspended."""

    monotonic: float
    boottime: float

    @classmethod
    def now(cls) -> Instant:
        """Return this moment."""
        return cls(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))

    def age(self) -> float:
        """Return the seconds since this moment, by the clock that counted more."""
        now = Instant.now()
        return max(now.monotonic - self.monotonic, now.boottime - self.boottime)


@dataclass(frozen=True, slots=True)
class Leadership:
    """A term that this replica holds: when its last renewal was sent, and from when on it may act."""

    term: int
    renewed: Instant
    acts_in: float
    """seconds after the term was taken"""
    taken: Instant
    able: bool = True
    """whether this replica was able to act when it took the term"""


class Leader:
    """This replica's part in the leadership; `term` is None while it follows."""

    def __init__(self, lock: LeaderLock, deadline: float, able: Callable[[], bool] = lambda: True) -> None:
        """`able` tells whether this replica reaches what a leader gives orders to."""
        self._lock = lock
        self._deadline = deadline
        self._able = able
        self._handed_over: int | None = None
        """the term that ended while no order was under way"""
        self._leadership: Leadership | None = None
        self._changed: Callable[[], None] = lambda: None
        self._given_up = asyncio.Event()
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="makeway-leader")
        self._trouble = ""

    @property
    def term(self) -> int | None:
        """The term that this replica may act in now, None while it follows."""
        leadership = self._leadership
        if leadership is None or self._remaining(leadership) <= 0 or leadership.taken.age() < leadership.acts_in:
            return None
        return leadership.term

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever this replica begins or ceases to lead."""
        self._changed = changed

    def check(self, term: int | None = None) -> int:
        """Return the term; NotLeading unless the lock was renewed within the deadline, and in `term`, if given."""
        current = self.term
        if current is None:
            raise NotLeading("this replica does not lead")
        if term not in (None, current):
            raise NotLeading(f"this replica leads in term {current}, and the order is of term {term}")
        return current

    @asynccontextmanager
    async def acting(self, term: int | None = None) -> AsyncIterator[None]:
        """Guard one action: NotLeading unless this replica leads (in `term`), and as soon as it could lead no more."""
        self.check(term)
        leadership = self._leadership
        if leadership is None or not self._lock.expires:
            yield
            return
        try:
            async with asyncio.timeout(self._remaining(leadership)) as limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise NotLeading("the leader's lock was not renewed in time") from None
            raise

    def _remaining(self, leadership: Leadership) -> float:
        return self._deadline - leadership.renewed.age() if self._lock.expires else self._deadline

    async def acquire(self) -> bool:
        """Try once to take the lock; return whether this replica holds it."""
        sent = Instant.now()
        try:
            acquired = await self._call(self._lock.acquire)
        except StoreError as error:
            self._complain(f"The database cannot be reached, so this replica cannot lead: {error}")
            return False
        self._trouble = ""
        if acquired is None:
            return False
        log.info("This replica leads, term %s%s", acquired.term, f", in {acquired.wait:.1f} s" * bool(acquired.wait))
        self._given_up.clear()
        self._leadership = Leadership(acquired.term, sent, acquired.wait, Instant.now(), self._able())
        self._changed()
        return True

    async def run(self) -> None:
        """Stay a candidate or the leader until cancelled."""
        while True:
            if self._leadership is None:
                await self._stand_back()
                if not await self.acquire():
                    await asyncio.sleep(RETRY)
                    continue
            await self._lead()

    async def _stand_back(self) -> None:
        """Leave the lock to a replica that is able to act, for a while."""
        since = Instant.now()
        while self._lock.expires and not self._able() and since.age() < STAND_BACK:  # noqa: ASYNC110 - a matter of time
            await asyncio.sleep(RETRY)

    async def _lead(self) -> None:
        """Renew the lock until it is lost or given up."""
        while (leadership := self._leadership) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause(leadership)):
                    await self._given_up.wait()
            if self._leadership is None:
                break
            if self.term is not None and leadership.acts_in:
                leadership = self._leadership = replace(leadership, acts_in=0.0)
                self._changed()
            sent = Instant.now()
            try:
                await self._call(self._lock.renew, leadership.term)
            except StoreError as error:
                self.step_down(str(error))
                continue
            if self._leadership is leadership:
                self._leadership = replace(leadership, renewed=sent)
        term, self._handed_over = self._handed_over, None
        await self._release(term)

    def _pause(self, leadership: Leadership) -> float | None:
        """Return the seconds until the next renewal, None where a lock need not be renewed."""
        if not self._lock.expires:
            return None
        waiting = leadership.acts_in - leadership.taken.age() if leadership.acts_in else self._deadline
        return max(0.01, min(self._deadline / 3, waiting))

    def step_down(self, why: str, term: int | None = None) -> None:
        """Cease to lead at once (in `term`, if given); this replica is a candidate again, and touches nothing."""
        if self._leadership is None or term not in (None, self._leadership.term):
            return
        log.warning("This replica leads no more (term %s): %s", self._leadership.term, why)
        self._leadership = None
        self._given_up.set()
        self._changed()

    def hand_over(self) -> bool:
        """Cease to lead, if this replica is not able to act; to be called while no order is under way.

        Another one then acts at once. Where none is able, each leads for a while, for what needs no orders.
        """
        leadership = self._leadership
        if leadership is None or self._able() or not self._lock.expires:
            return False
        if not leadership.able and leadership.taken.age() < UNABLE:
            return False
        self._handed_over = leadership.term
        self.step_down("it cannot give orders at the moment, and another replica may")
        return True

    async def close(self) -> None:
        """Release the lock for good; the next leader need not wait."""
        leadership, self._leadership = self._leadership, None
        await self._release(leadership.term if leadership else None)
        self._hand.shutdown(wait=False)

    async def _release(self, term: int | None) -> None:
        with suppress(StoreError):
            await self._call(self._lock.release, term)

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._hand, function, *args)

    def _complain(self, trouble: str) -> None:
        """Log a trouble once, not twice a second."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s", trouble)
