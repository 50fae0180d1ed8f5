"""Observe, plan, apply, and again: the one writer of decisions.

A cycle is level-triggered: any number of wake-ups collapse into one, and a cycle over an unchanged world changes
nothing. Every decision is in the store before the backend hears of it, and what the backend is told follows from the
change_set alone, so that a service killed between any two lines converges when it is started again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from ..backends.base import BackendError
from ..metrics import CYCLE_SECONDS, count_decisions
from ..store.errors import Deposed
from .actuate import Actuator, Started
from .apply import change_set_of
from .components import Components
from .garbage import collect_less
from .names import names_of
from .planner import Planner
from .reasons import Reasons
from .reconcile import ChangeSet, note_launched, reconcile

log = logging.getLogger("makeway.loop")

MIN_CYCLE_SECONDS = 0.01
"""Seconds from one cycle to the next: what happens within them is decided together."""

CATCH_UP = 0.5
"""Seconds after which reasons that could not all be written are looked at again."""

PART = 200
"""Changes of a plan that are written and done together: where hundreds start at once, the first need not wait for the
last to be written."""

MOST_ROUNDS = 5
"""Turns in a row without looking at the clock, where each one changed something."""


class Loop:
    """The service's heart: woken by requests and by the backend, and at least every `tick` seconds."""

    def __init__(self, parts: Components) -> None:
        self.store = parts.store
        self.backend = parts.backend
        self.world = parts.world
        self.leases = parts.leases
        self.orders = Actuator(parts.store, parts.backend, parts.hub)
        self.tick = parts.config.tick_seconds
        self.lost_budget = parts.config.max_failures_lost
        self.clock = parts.clock
        self.term: int | None = None
        self.cycles = 0
        self.last_cycle_at: float | None = None

        self._planner = Planner(parts.world)
        self._reasons = Reasons()
        self._wake = asyncio.Event()
        self._told = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    def wake(self) -> None:
        """Ask for a cycle soon; may be called from any thread, any number of times."""
        loop = self._loop
        if loop is not None and not loop.is_closed() and not self._told:
            self._told = True  # until the cycle that follows begins to look
            loop.call_soon_threadsafe(self._wake.set)

    def stop(self) -> None:
        """End `run` after the cycle under way."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Turn until stopped. A cycle that fails is logged, told by `/readyz`, and tried again a second later."""
        self._loop = asyncio.get_running_loop()
        collect_less()
        self.backend.on_change(self.wake)
        self._wake.set()
        while not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP if self._reasons.behind else self.tick):
                    await self._wake.wait()
            if self._stopping:
                break
            self._told = False
            self._wake.clear()
            try:
                await self.converge()
                self.world.failure = None
            except Deposed:
                raise
            except Exception as error:
                log.exception("A cycle failed; it is tried again")
                self.world.failure = f"{type(error).__name__}: {error}"
                await asyncio.sleep(1.0)
                self._wake.set()

    async def converge(self) -> None:
        """Turn until nothing changes any more (at most MOST_ROUNDS times)."""
        for _ in range(MOST_ROUNDS):
            began = time.monotonic()
            if not await self.cycle():
                return
            await asyncio.sleep(max(0.0, began + MIN_CYCLE_SECONDS - time.monotonic()))
        self._wake.set()

    async def cycle(self) -> bool:
        """Look, reconcile, plan, write, act once; answer whether the store changed."""
        began = time.perf_counter()
        attention = self.world.attention
        self.world.see(await self.backend.observe(self.world.since))
        now = self.clock()
        rows = await self.world.rows()
        settled = reconcile(rows, attention.seen(now), now=now, lost_budget=self.lost_budget)
        note_launched(settled, attention.unwritten(now))
        expired = await self.leases.reconcile((await self.world.attended()).values(), now)
        changed = await self._commit(settled, now) | await self._commit(expired, now)
        rows = await self.world.rows()
        plan = await self._planner.plan(rows, now)
        change_set = change_set_of(
            plan,
            rows,
            now=now,
            lease_seconds=self.leases.seconds,
            reasons=self._reasons,
            names=names_of(self.world.document.policies, rows),
        )
        started_now = Started()
        changed |= await self._carry_out(change_set, started_now, now)
        await self.world.attended()  # with the commits so far
        started_now.expected = attention.expected(now)
        failed = await self.orders.give(attention.rows(), attention.seen(now), now, started_now)
        attention.ordered(now)
        changed |= await self._commit(failed, now)
        await self._keep_histories(now)
        attention.done()
        self.cycles += 1
        self.last_cycle_at = time.monotonic()
        CYCLE_SECONDS.observe(time.perf_counter() - began)
        return changed

    async def _carry_out(self, change_set: ChangeSet, started_now: Started, now: float) -> bool:
        """Write a plan down part by part, and start what each part starts; answer whether the store changed."""
        changed = False
        for part in change_set.parts(PART):
            if await self._commit(part, now):
                changed = True
                rows = await self.world.attended()
                await self.orders.begin(
                    [rows[c.workload] for c in part.changes if c.workload in rows], now, started_now
                )
        return changed

    async def _commit(self, change_set: ChangeSet, now: float) -> bool:
        if not change_set.changes and not change_set.decisions:
            return False
        applied = await asyncio.to_thread(
            self.store.commit, change_set.changes, change_set.decisions, now=now, term=self.term
        )
        count_decisions(d for d in change_set.decisions if d.workload is None or d.workload in applied)
        return bool(applied)

    async def _keep_histories(self, now: float, at_once: bool = False) -> None:
        """Write what was borrowed, where it is not what it would be without a word."""
        milli = self.world.accounting.news(at_once)
        if milli is not None:
            await asyncio.to_thread(self.store.keep_histories, milli, now=now, term=self.term)

    async def close(self, *, stop_jobs: bool) -> None:
        """Let the jobs save and stop, or leave them running, and write down how they ended."""
        try:
            await self.backend.close(stop_jobs=stop_jobs)
            if stop_jobs:
                seen = await self.backend.observe()
                rows = await self.world.rows()
                await self._commit(reconcile(rows, seen, now=self.clock(), lost_budget=self.lost_budget), self.clock())
                await self.world.rows()
            await self._keep_histories(self.clock(), at_once=True)
        except (BackendError, Deposed, OSError) as error:
            log.warning("Stopping the jobs did not go as it should: %s", error)
