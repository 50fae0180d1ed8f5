"""Remove what is older than the settings allow: workloads with everything they left, decisions and events.

Run by the service beside the loop. A pass removes in small transactions and rests between them, so that the loop's
commits never wait long. It can be killed at any point: rows go in whole transactions, and a job's folder is purged by a
note that is written with the removal of its rows and goes last. Policy versions are kept for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from makeway_api.quantities import count

from ..backends.base import BackendError
from ..settings import ServiceSettings
from ..store.contents import Collected
from ..store.errors import NotLeading, StoreError
from ..store.pruning import Sweep
from ..store.store import Store

T = TypeVar("T")
log = logging.getLogger("makeway.retention")

DAY = 86_400.0
EVERY_SECONDS = 600.0
PROBE_SECONDS = 10.0
"""How often the database is written to where nothing else does, for /readyz."""

FASTEST = 10.0
"""Seconds that ages may grow in one second: an hour of a wrong clock costs ten hours of history at most, not all."""

PURGED_AT_ONCE = 100
LOOKED_AT_ONCE = 1000
MEASURED_AT_ONCE = 2000
BYTES_AT_ONCE = 4_000_000
PAGES_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Keep:
    """How many seconds are kept, 0 for ever: of workloads from their end; and how many events at most.

    Keys of submissions are kept for `keys` seconds.
    """

    workloads: float = 90 * DAY
    decisions: float = 90 * DAY
    events: float = 7 * DAY
    most_events: int = 500_000
    keys: float = DAY
    most_decisions: int = 2_000_000
    most_removals: int = 200_000


def keep_of(settings: ServiceSettings) -> Keep:
    """Return what the settings say is kept."""
    days = settings.keep_workloads_days, settings.keep_decisions_days, settings.keep_events_days
    workloads, decisions, events = (each * DAY for each in days)
    keys = settings.keep_keys_hours * 3600
    return Keep(workloads, decisions, events, settings.keep_events, keys, settings.keep_decisions)


@dataclass(slots=True)
class Pace:
    """The rows of one transaction, adapted to what the database removes in `target` seconds, and the rest after it."""

    rows: int = 50
    target: float = 0.02
    rest: float = 4.0
    """seconds of rest for each second of work"""
    threads: Executor | None = None
    """None: asyncio's own"""

    longest: float = field(default=0.0, init=False)

    async def run(self, work: Callable[[int], T]) -> T:
        """Call `work` with a number of rows in a thread, adapt the number, and rest."""
        began = time.perf_counter()
        found = await asyncio.get_running_loop().run_in_executor(self.threads, work, self.rows)
        took = time.perf_counter() - began
        self.longest = max(self.longest, took)
        wanted = self.rows * self.target / max(took, 1e-6)
        self.rows = int(min(max(wanted, self.rows / 4, 1), self.rows * 2, 10_000))
        await asyncio.sleep(took * self.rest)
        return found


class AgeClock:
    """The time that ages are counted to: the wall clock, which it never follows back, nor faster than FASTEST."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float], known: float | None) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._now = clock() if known is None else min(known, clock())
        self._at = monotonic()

    def now(self) -> float:
        """Return the time up to which everything has aged."""
        at = self._monotonic()
        furthest = self._now + FASTEST * (at - self._at)
        self._at = at
        self._now = max(self._now, min(self._clock(), furthest))
        return self._now


class Retention:
    """The passes over one store. `purge` is a backend's; `term` is None while another replica leads."""

    def __init__(
        self,
        store: Store,
        keep: Keep,
        purge: Callable[[str, str], Awaitable[bool]],
        term: Callable[[], int | None],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        rest: float = 4.0,
        threads: Executor | None = None,
        measure: Callable[[str], int | None] | None = None,
        room: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`measure` returns the bytes of a job's folder on this machine, None where it has none.

        `room` returns the bytes that may still be written to the fullest disk, None where that is not known.
        """
        self._store = store
        self._measure = measure
        self._room = room
        self.keep = keep
        self._purge = purge
        self._term = term
        self._clock = clock
        self._monotonic = monotonic
        self._rest = rest
        self._threads = threads
        self._ages: AgeClock | None = None
        self._failing: set[str] = set()
        self.longest = 0.0
        """Seconds of the longest transaction of the last pass."""

    async def run(self) -> None:
        """Make a pass every EVERY_SECONDS while this replica leads, until cancelled; after an error, too."""
        due = self._monotonic()
        while True:
            try:
                await self._call(self._store.probe, PROBE_SECONDS)
                if self._term() is not None:
                    if self._monotonic() >= due:
                        due = self._monotonic() + EVERY_SECONDS
                        await self.sweep()
                    else:
                        await self.clear()
            except NotLeading:
                pass  # the next pass is the new leader's
            except (StoreError, OSError) as error:
                log.warning("What is too old could not be removed; the next try is in 10 min: %s", error)
            await asyncio.sleep(PROBE_SECONDS)

    async def clear(self) -> int:
        """Remove the folders and large files of what was deleted on any replica; return how many went.

        Between two passes; a folder that could not be purged waits for the next one.
        """
        folders = await self._purge_folders(self._term(), leave=self._failing)
        removed = folders + await self._clear_contents()
        if removed:
            await self._call(self._store.fill_reserve)
            log.info("Removed %s of what was deleted", count(removed, "folder or file", "folders and files"))
        return removed

    async def sweep(self) -> Sweep:
        """Remove everything that is too old, purge folders, return free space, and write the report."""
        now = await self._now()
        term = self._term()
        pruning, keep = self._store.pruning, self.keep
        self.longest = 0.0
        removed = {
            "workloads": await self._forget_workloads(now - keep.workloads, term) if keep.workloads else 0,
            "decisions": await self._all(
                1.0,
                lambda n: pruning.forget_decisions(
                    now - keep.decisions if keep.decisions else 0.0, n, term, most=keep.most_decisions
                ),
            ),
            "events": await self._all(
                1.0,
                lambda n: pruning.forget_events(now - keep.events if keep.events else 0.0, keep.most_events, n, term),
            ),
            "removals": await self._all(
                1.0,
                lambda n: pruning.forget_removals(
                    now - 2 * keep.workloads if keep.workloads else 0.0, n, term, most=keep.most_removals
                ),
            ),
            "keys": await self._all(keep.keys, lambda n: pruning.forget_keys(now - keep.keys, n, term)),
            "files": await self._forget_blobs(term),
            "folders": await self._purge_folders(term),
        }
        removed["names"] = await self._call(self._store.people.forget)
        cleared, collected = await self._clear_contents(), await self._collect_artifacts(now)
        await self._count()
        await self._call(lambda: self._store.growth.note(now, self._room()))
        removed["artifacts"] = cleared + collected.removed
        pages = await self._all(1.0, lambda n: pruning.give_back(min(n, PAGES_AT_ONCE)))
        report: dict[str, Any] = {"removed": removed, "pages_returned": pages, "folders_failed": len(self._failing)}
        report["holdings"] = await self._call(pruning.holdings)
        report["bytes"] = await self._call(self._store.size)
        report["artifacts"], report["artifact_bytes"] = collected.left, collected.left_bytes
        report["free_bytes"] = await self._call(self._store.free_bytes)
        sweep = Sweep(self._clock(), now, report)
        await self._call(pruning.note, sweep, term)
        if any(removed.values()):
            log.info("Removed what was too old: %s", ", ".join(f"{n} {what}" for what, n in removed.items() if n))
        return sweep

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def _now(self) -> float:
        if self._ages is None:
            last = await self._call(self._store.pruning.last)
            self._ages = AgeClock(self._clock, self._monotonic, last.clock if last else None)
        return self._ages.now()

    async def _all(self, kept: float, remove: Callable[[int], int]) -> int:
        """Call `remove` with a number of rows until nothing is left, unless all is kept; return how many went."""
        pace, total = Pace(rest=self._rest, threads=self._threads), 0
        while kept and (count := await pace.run(remove)):
            total += count
        self.longest = max(self.longest, pace.longest)
        return total

    async def _forget_workloads(self, before: float, term: int | None) -> int:
        """Remove workloads, their outputs first: each transaction is short, and none is done again."""
        total = 0
        whole, parts = Pace(rest=self._rest, threads=self._threads), Pace(rest=self._rest, threads=self._threads)
        while True:
            among = whole.rows
            while await parts.run(partial(self._forget_outputs, before, among, term)):
                pass
            count = await whole.run(partial(self._forget_these_workloads, before, among, term))
            if not count:
                break
            total += count
        self.longest = max(self.longest, whole.longest, parts.longest)
        return total

    def _forget_outputs(self, before: float, among: int, term: int | None, rows: int) -> int:
        return self._store.pruning.forget_outputs(before, among, rows, term)

    def _forget_these_workloads(self, before: float, among: int, term: int | None, rows: int) -> int:
        return self._store.pruning.forget_workloads(before, min(rows, among), term)

    async def _forget_blobs(self, term: int | None) -> int:
        """Remove the file contents that no workload refers to any more, some megabytes in one transaction."""
        pruning, pace, total = self._store.pruning, Pace(rest=self._rest, threads=self._threads), 0
        after: str | None = ""
        while after is not None:
            found, after = await self._call(pruning.orphans, after, LOOKED_AT_ONCE)
            while found:
                some = [found.pop()]
                while found and len(some) < pace.rows and sum(size for _, size in [*some, found[-1]]) <= BYTES_AT_ONCE:
                    some.append(found.pop())
                digests = [digest for digest, _ in some]
                total += await pace.run(partial(self._forget_these, digests, term))
        self.longest = max(self.longest, pace.longest)
        return total

    async def _collect_artifacts(self, now: float) -> Collected:
        """Remove the large files that no workload refers to; while their storage is unavailable, the rest goes on."""
        try:
            return await self._call(self._store.contents.collect, now)
        except OSError as error:
            log.warning("The large files that no workload refers to could not be removed: %s", error)
            return Collected(0, 0, 0)

    async def _clear_contents(self) -> int:
        """Remove the large files whose last row was removed; while their storage is unavailable, the rest goes on."""
        try:
            return await self._call(self._store.contents.clear, self._clock())
        except OSError as error:
            log.warning("The large files of what was deleted could not be removed: %s", error)
            return 0

    async def _count(self) -> None:
        """Measure the folders of jobs on this disk, count every account anew, and take room on the disk again."""
        if self._measure is not None:
            jobs = await self._call(self._store.accounts.unmeasured, MEASURED_AT_ONCE)
            sizes = {id: size for id in jobs if (size := await self._call(self._measure, id)) is not None}
            if sizes:
                await self._call(self._store.accounts.measured, sizes, self._clock())
        pace = Pace(rest=self._rest, threads=self._threads)
        for owner in await self._call(self._store.accounts.people):
            await pace.run(partial(self._recount, owner))
        await self._call(self._store.fill_reserve)

    def _recount(self, owner: str, _: int) -> None:
        self._store.accounts.recount(owner)

    def _forget_these(self, digests: Sequence[str], term: int | None, _: int) -> int:
        return self._store.pruning.forget_blobs(digests, self._clock(), term)

    async def _purge_folders(self, term: int | None, leave: Collection[str] = ()) -> int:
        """Purge the folders of removed jobs; return how many are gone. The next pass asks again for all others."""
        pruning, total, after = self._store.pruning, 0, ""
        failing = set(leave)
        while found := await self._call(pruning.to_purge, PURGED_AT_ONCE, after):
            after, done = found[-1].workload, []
            for id, team in found:
                if id in leave:
                    continue
                try:
                    if await self._purge(id, team):
                        done.append(id)
                except (BackendError, OSError) as error:
                    failing.add(id)
                    if id not in self._failing:
                        log.warning("The folder of the removed job %s could not be purged: %s", id, error)
            if done:
                await self._call(pruning.purged, done, term)
            total += len(done)
        self._failing = failing
        return total
