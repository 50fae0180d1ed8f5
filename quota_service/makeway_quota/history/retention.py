"""Remove what is older than the settings allow: workloads and machines with all that they left, decisions and events.

Run by the service beside the loop. A pass removes in small transactions and rests between them, so that the loop's
commits never wait long. It can be killed at any point: rows go in whole transactions, and a job's folder is purged by a
note that is written with the removal of its rows and goes last. What cannot be removed is quarantined, and tried again
by the next pass; every other step, row, folder and file goes on. Policy versions are kept for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from makeway_api.quantities import count

from ..quarantine import Quarantine
from ..settings import ServiceSettings
from ..store.errors import NotLeading, StoreError
from ..store.storage.contents import Collected
from ..store.storage.pruning import Sweep
from ..store.store import Store
from .row_removals import REPORTED_SECONDS, RowRemovals, Rows, Skip

T = TypeVar("T")
log = logging.getLogger("makeway.retention")

DAY = 86_400.0
EVERY_SECONDS = 600.0
PROBE_SECONDS = 10.0
"""How often the database is written to where nothing else does, for /readyz."""

FASTEST = 10.0
"""Seconds that ages may grow in one second: an hour of a wrong clock costs ten hours of history at most, not all."""

WHOLE = "removing what is too old"
OLD_WORKLOADS, OLD_OUTPUTS = "removing old workloads", "removing old results and logs"
UNUSED_CONTENTS = "removing unused files"
UNUSED_FILES, DELETED_FILES = "removing unused large files", "removing deleted large files"
FOLDERS, PURGING = "removing folders of deleted jobs", "removing it"
RESERVE = "keeping room on the disk"
"""The steps that may fail by themselves, or with one thing"""

PURGED_AT_ONCE = 100
ORPHANS_AT_ONCE = 1000
MEASURED_AT_ONCE = 2000
FAILED = -1
"""Stands for the size of a folder that could not be measured"""
BYTES_AT_ONCE = 4_000_000
PAGES_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Keep:
    """How many seconds are kept, 0 for ever: of workloads from their end; and how many events at most.

    Keys of submissions are kept for `keys` seconds; machines that are over and deployments that were deleted as long as
    workloads, their events as long as decisions.
    """

    workloads: float = 90 * DAY
    decisions: float = 90 * DAY
    events: float = 7 * DAY
    max_events: int = 500_000
    keys: float = DAY
    max_decisions: int = 2_000_000
    max_removals: int = 200_000
    max_machines: int = 100_000
    max_machine_outputs: int = 2_000
    max_machine_events: int = 1_000_000


def keep_of(settings: ServiceSettings) -> Keep:
    """Return what the settings say is kept."""
    days = settings.keep_workloads_days, settings.keep_decisions_days, settings.keep_events_days
    workloads, decisions, events = (item * DAY for item in days)
    keys = settings.keep_keys_hours * 3600
    return Keep(workloads, decisions, events, settings.keep_events, keys, settings.keep_decisions)


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
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self.slowest = 0.0
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
                        self.quarantine.passed(WHOLE, "step", WHOLE)
                    else:
                        await self.clear()
            except NotLeading:
                pass  # the next pass is the new leader's
            except StoreError as error:
                log.warning("What is too old could not be removed; the next try is in 10 min: %s", error)
            except Exception as error:
                self.quarantine.add(WHOLE, "step", WHOLE, error, REPORTED_SECONDS)
            await asyncio.sleep(PROBE_SECONDS)

    async def clear(self) -> int:
        """Remove the folders and large files of what was deleted on any replica; return how many went.

        Between two passes; what could not be removed waits for the next one.
        """
        removals, term, failing = self._removals(), self._term(), frozenset(self._failing)
        folders, files = FOLDERS, DELETED_FILES
        removed = await removals.step(folders, lambda: self._purge_folders(removals, term, failing), 0, may_rest=True)
        removed += await removals.step(files, lambda: self._clear_contents(removals, again=False), 0, may_rest=True)
        if removed:
            await removals.step(RESERVE, lambda: self._call(self._store.fill_reserve), None)
            log.info("Removed %s of what was deleted", count(removed, "folder or file", "folders and files"))
        return removed

    async def sweep(self) -> Sweep:
        """Remove everything that is too old, purge folders, return free space, and write the report."""
        now, term, removals = await self._now(), self._term(), self._removals()
        removed = await self._remove_rows(removals, now, term)
        removed["folders"] = await removals.step(FOLDERS, lambda: self._purge_folders(removals, term), 0)
        removed["names"] = await removals.step(
            "removing unused names", lambda: self._call(self._store.people.forget), 0
        )
        cleared = await removals.step(DELETED_FILES, lambda: self._clear_contents(removals), 0)
        collected = await removals.step(UNUSED_FILES, lambda: self._collect(removals, now), Collected(0, 0, 0))
        removed["artifacts"] = cleared + collected.removed
        await self._count(removals, now)
        report: dict[str, Any] = {"removed": removed, "folders_failed": len(self._failing)}
        report["artifacts"], report["artifact_bytes"] = collected.remaining, collected.remaining_bytes
        report |= await self._figures(removals)
        sweep = Sweep(self._clock(), now, report)
        await self._call(self._store.pruning.note, sweep, term)
        self.slowest = removals.slowest
        if any(removed.values()):
            log.info("Removed what was too old: %s", ", ".join(f"{n} {what}" for what, n in removed.items() if n))
        return sweep

    async def _remove_rows(self, removals: RowRemovals, now: float, term: int | None) -> dict[str, int]:
        """Remove the rows that are too old, and the contents that no row refers to; return how many by kind."""
        pruning, keep = self._store.pruning, self.keep
        decided, told, noted = (
            now - kept if kept else 0.0 for kept in (keep.decisions, keep.events, 2 * keep.workloads)
        )
        drains: dict[str, Callable[[int, Skip], int]] = {
            "decisions": lambda n, skip: pruning.forget_decisions(
                decided, n, term, maximum=keep.max_decisions, skip=skip
            ),
            "events": lambda n, skip: pruning.forget_events(told, keep.max_events, n, term, skip=skip),
            "removals": lambda n, skip: pruning.forget_removals(noted, n, term, maximum=keep.max_removals, skip=skip),
            "keys": lambda n, skip: pruning.forget_keys(now - keep.keys, n, term, skip=skip) if keep.keys else 0,
        }
        drains |= self._machine_drains(now, term)
        removed = {"workloads": 0}
        if keep.workloads:
            before = now - keep.workloads
            removed["workloads"] = await removals.step(
                OLD_WORKLOADS, lambda: self._forget_workloads(removals, before, term), 0
            )
        for kind, remove in drains.items():
            name = f"removing old {kind.replace('_', ' ')}"
            removed[kind] = await removals.step(name, partial(removals.all, name, remove), 0)
        removed["files"] = await removals.step(UNUSED_CONTENTS, lambda: self._forget_blobs(removals, term), 0)
        return removed

    def _machine_drains(self, now: float, term: int | None) -> dict[str, Callable[[int, Skip], int]]:
        """Return what removes old rows of machines, by kind."""
        pruning, keep = self._store.machine_pruning, self.keep
        over, told = (now - kept if kept else 0.0 for kept in (keep.workloads, keep.decisions))
        outputs, events = keep.max_machine_outputs, keep.max_machine_events
        return {
            "machines": lambda n, skip: pruning.forget_machines(over, n, term, maximum=keep.max_machines, skip=skip),
            "machine_outputs": lambda n, skip: pruning.forget_machine_outputs(n, term, maximum=outputs, skip=skip),
            "machine_events": lambda n, skip: pruning.forget_machine_events(told, n, term, maximum=events, skip=skip),
            "deployments": lambda n, skip: pruning.forget_deployments(over, n, term, skip=skip),
        }

    async def _figures(self, removals: RowRemovals) -> dict[str, Any]:
        """Return free space of the database's file, and what there is then."""
        pruning, name = self._store.pruning, "returning free space"
        pages = partial(removals.all, name, lambda n, _: pruning.give_back(min(n, PAGES_AT_ONCE)))
        figures: dict[str, tuple[Callable[[], Any], Any]] = {
            "holdings": (pruning.holdings, {}),
            "bytes": (self._store.size, 0),
            "free_bytes": (self._store.free_bytes, 0),
        }
        result: dict[str, Any] = {"pages_returned": await removals.step(name, pages, 0)}
        for name, (figure, unknown) in figures.items():
            words = f"measuring {name.replace('_', ' ')}"
            result[name] = await removals.step(words, partial(self._call, figure), unknown)
        return result

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def _now(self) -> float:
        if self._ages is None:
            last = await self._call(self._store.pruning.last)
            self._ages = AgeClock(self._clock, self._monotonic, last.clock if last else None)
        return self._ages.now()

    def _removals(self) -> RowRemovals:
        return RowRemovals(self.quarantine, partial(self._store.probe, 0.0), self._rest, self._threads)

    async def _forget_workloads(self, removals: RowRemovals, before: float, term: int | None) -> int:
        """Remove workloads, their outputs first: each transaction is short, and none is done again."""
        pruning, total, gone = self._store.pruning, 0, 1
        whole, parts = Rows(removals, OLD_WORKLOADS), Rows(removals, OLD_OUTPUTS)
        while gone:
            among, but = whole.at_once, whole.skipped

            def outputs(rows: int, skip: Skip, among: int = among, but: Skip = but) -> int:
                return pruning.forget_outputs(before, among, rows, term, skip=skip, but=but)

            def workloads(rows: int, skip: Skip, among: int = among) -> int:
                return pruning.forget_workloads(before, min(rows, among), term, skip=skip)

            while await parts.remove(outputs):
                pass
            gone = await whole.remove(workloads)
            total += gone
        whole.end()
        parts.end()
        return total

    async def _forget_blobs(self, removals: RowRemovals, term: int | None) -> int:
        """Remove the file contents that no workload refers to any more, some megabytes in one transaction."""
        pruning, pace, total = self._store.pruning, removals.pace(), 0
        after: str | None = ""
        while after is not None:
            result, after = await self._call(pruning.orphans, after, ORPHANS_AT_ONCE)
            while result:
                some = [result.pop()]
                while (
                    result and len(some) < pace.rows and sum(size for _, size in [*some, result[-1]]) <= BYTES_AT_ONCE
                ):
                    some.append(result.pop())
                forget = partial(self._forget_these, term)
                total += await removals.in_batches(
                    UNUSED_CONTENTS, "blobs", [digest for digest, _ in some], forget, pace
                )
        return total

    def _forget_these(self, term: int | None, digests: Sequence[str]) -> int:
        return self._store.pruning.forget_blobs(digests, self._clock(), term)

    async def _collect(self, removals: RowRemovals, now: float) -> Collected:
        """Remove the large files that no workload refers to."""
        contents = self._store.contents
        result = await self._call(contents.collect, now)
        removals.note_failed(UNUSED_FILES, "file", contents.unremovable)
        return result

    async def _clear_contents(self, removals: RowRemovals, *, again: bool = True) -> int:
        """Remove the large files whose last row was removed; `again`: those, too, that could not be removed before."""
        contents = self._store.contents
        known = frozenset[str]() if again else frozenset(self.quarantine.names(DELETED_FILES, "file"))
        result = await self._call(contents.clear, self._clock(), known)
        removals.note_failed(DELETED_FILES, "file", contents.unremovable, known)
        return result

    async def _count(self, removals: RowRemovals, now: float) -> None:
        """Measure the folders of jobs on this disk, count every account anew, and take room on the disk again."""
        accounts, store, none = self._store.accounts, self._store, list[str]()
        await removals.step("measuring folders of jobs", lambda: self._measure_folders(removals), None)
        pace = removals.pace()
        for owner in await removals.step("listing accounts", lambda: self._call(accounts.people), none):
            recount = partial(pace.run, partial(self._recount, owner))
            await removals.guarded("counting what is kept", "person", owner, recount, None)
        await removals.step(RESERVE, lambda: self._call(store.fill_reserve), None)
        await removals.step("noting what grows", lambda: self._call(lambda: store.growth.note(now, self._room())), None)

    async def _measure_folders(self, removals: RowRemovals) -> None:
        """Measure the folders of jobs; one that has none, as of a pod, counts as empty, and is not asked for again."""
        accounts, sizes, folder_bytes = self._store.accounts, dict[str, int](), self._measure
        if folder_bytes is None:
            return

        async def measure(id: str) -> int:
            return await self._call(folder_bytes, id) or 0

        for id in await self._call(accounts.unmeasured, MEASURED_AT_ONCE):
            size = await removals.guarded("measuring its size", "folder", id, partial(measure, id), FAILED)
            if size != FAILED:
                sizes[id] = size
        if sizes:
            await self._call(accounts.measured, sizes, self._clock())

    def _recount(self, owner: str, _: int) -> None:
        self._store.accounts.recount(owner)

    async def _purge_folders(self, removals: RowRemovals, term: int | None, leave: Collection[str] = ()) -> int:
        """Purge the folders of removed jobs; return how many are gone. The next pass asks again for all others."""
        pruning, total, after = self._store.pruning, 0, ""
        failing, forget = dict.fromkeys(leave), partial(self._forget_purges, term)
        while purges := await self._call(pruning.to_purge, PURGED_AT_ONCE, after):
            after, done = purges[-1].workload, list[str]()
            for id, team in purges:
                if id in leave:
                    continue
                gone = await removals.guarded(PURGING, "folder", id, partial(self._purge, id, team), None)
                if gone is None:
                    failing[id] = None
                elif gone:
                    done.append(id)
            if done:
                total += await removals.in_batches(FOLDERS, "purges", done, forget)
        self._failing = set(failing)
        return total

    def _forget_purges(self, term: int | None, ids: Sequence[str]) -> int:
        self._store.pruning.purged(ids, term)
        return len(ids)
