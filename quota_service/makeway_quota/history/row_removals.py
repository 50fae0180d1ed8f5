"""Remove old rows in transactions of a fitting size, and pass over those that cannot be removed.

Called by `retention`. Where a transaction fails, smaller ones find the row that it fails with: that one is quarantined,
and all others go. The next pass tries it again. A failure that concerns the database as a whole is raised.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

from ..quarantine import Kind, Quarantine
from ..store.errors import NotLeading, StoreError, Unremovable

T = TypeVar("T")
Skip = Collection[tuple[object, ...]]
"""The primary keys of rows that are left alone"""

MAX_SKIPPED = 100
"""Rows of one table that a pass passes over; beyond them the table counts as damaged, and its step as failed"""
REPORTED_SECONDS = 1200.0
"""Seconds for which a failure is told, unless the next pass succeeds, which begins within ten minutes of this one"""


@dataclass(slots=True)
class Pace:
    """The rows of one transaction, adapted to what the database removes in `target` seconds, and the rest after it."""

    rows: int = 50
    target: float = 0.02
    rest: float = 4.0
    """seconds of rest for each second of work"""
    threads: Executor | None = None
    """None: asyncio's own"""

    slowest: float = field(default=0.0, init=False)

    async def run(self, work: Callable[[int], T]) -> T:
        """Call `work` with a number of rows in a thread, adapt the number, and rest."""
        began = time.perf_counter()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, work, self.rows)
        finally:
            took = time.perf_counter() - began
            self.slowest = max(self.slowest, took)
            wanted = self.rows * self.target / max(took, 1e-6)
            self.rows = int(min(max(wanted, self.rows / 4, 1), self.rows * 2, 10_000))
            await asyncio.sleep(took * self.rest)


class RowRemovals:
    """What one pass removes. `probe` raises StoreError where the database cannot be written at all."""

    def __init__(
        self, quarantine: Quarantine, probe: Callable[[], None], rest: float, threads: Executor | None = None
    ) -> None:
        self.quarantine = quarantine
        self._probe = probe
        self._rest = rest
        self._threads = threads
        self.slowest = 0.0
        """seconds of the longest transaction"""
        self._failed: Counter[str] = Counter()

    def pace(self) -> Pace:
        """Return the pace of one kind of rows."""
        return Pace(rest=self._rest, threads=self._threads)

    async def step(self, name: str, work: Callable[[], Awaitable[T]], otherwise: T, *, may_rest: bool = False) -> T:
        """Return what a step returns; `otherwise` where it fails, which stops no other step.

        `may_rest`: it is left alone for a while after it failed.
        """
        if may_rest and self.quarantine.is_backing_off(name, "step", name):
            return otherwise
        return await self.guarded(name, "step", name, work, otherwise)

    async def guarded(self, step: str, kind: Kind, name: str, work: Callable[[], Awaitable[T]], otherwise: T) -> T:
        """Return what a step returns for one thing; `otherwise` where it fails, which is told until the next pass."""
        try:
            result = await work()
        except NotLeading:
            raise
        except Exception as error:
            await self.check(error)
            self.quarantine.add(step, kind, name, error, REPORTED_SECONDS)
            return otherwise
        self.quarantine.passed(step, kind, name)
        return result

    async def check(self, error: Exception) -> None:
        """Raise an error where it concerns the database as a whole, which then cannot be written."""
        if isinstance(_cause(error), RecursionError | MemoryError | OSError):
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._probe)
        except StoreError as failure:
            raise failure from error

    async def all(self, step: str, remove: Callable[[int, Skip], int]) -> int:
        """Call `remove` with a number of rows, and those to skip, until nothing is left; return how many went."""
        rows, total = Rows(self, step), 0
        while count := await rows.remove(remove):
            total += count
        rows.end()
        return total

    async def in_batches(
        self, step: str, table: str, keys: Sequence[str], work: Callable[[Sequence[str]], int], pace: Pace | None = None
    ) -> int:
        """Do something for rows together, and, where that fails, for all but those with which it does.

        Return the sum of what `work` returns.
        """
        pace = pace or self.pace()
        try:
            result = await pace.run(lambda _: work(keys))
        except NotLeading:
            raise
        except Exception as error:
            await self.check(error)
            if len(keys) < 2:
                self._failed[step] += 1
                if self._failed[step] > MAX_SKIPPED:
                    raise
                for key in keys:
                    self.quarantine.add(step, "row", f"{table} {key}", _cause(error), REPORTED_SECONDS)
                return 0
            middle = len(keys) // 2
            first = await self.in_batches(step, table, keys[:middle], work, pace)
            return first + await self.in_batches(step, table, keys[middle:], work, pace)
        finally:
            self.slowest = max(self.slowest, pace.slowest)
        for key in keys if self.quarantine.size else ():
            self.quarantine.passed(step, "row", f"{table} {key}")
        return result

    def note_failed(self, step: str, kind: Kind, failed: Mapping[str, Exception], still: Collection[str] = ()) -> None:
        """Quarantine what a step fails with until the next pass, and end the quarantine of all but those in `still`."""
        for name, error in failed.items():
            self.quarantine.add(step, kind, name, error, REPORTED_SECONDS)
        for name in self.quarantine.names(step, kind) - failed.keys() - set(still):
            self.quarantine.passed(step, kind, name)


class Rows:
    """The old rows of one table, of which some may have to be skipped."""

    def __init__(self, removals: RowRemovals, step: str) -> None:
        self._removals = removals
        self._step = step
        self._pace = removals.pace()
        self._skip: dict[tuple[object, ...], Exception] = {}
        self._names: dict[str, Exception] = {}

    @property
    def at_once(self) -> int:
        """The rows that the next transaction removes at most."""
        return self._pace.rows

    @property
    def skipped(self) -> Skip:
        """The keys of the rows that cannot be removed."""
        return frozenset(self._skip)

    async def remove(self, remove: Callable[[int, Skip], int]) -> int:
        """Remove some rows and return how many; 0 where none are left that can be removed."""
        while True:
            try:
                return await self._pace.run(lambda rows: remove(rows, frozenset(self._skip)))
            except Unremovable as error:
                await self._removals.check(error)
                if len(error.keys) > 1:
                    self._pace.rows = len(error.keys) // 2
                    continue
                if len(self._skip) >= MAX_SKIPPED:
                    raise
                [key] = error.keys
                self._skip[key] = self._names[f"{error.table} {'/'.join(map(str, key))}"] = _cause(error)
            finally:
                self._removals.slowest = max(self._removals.slowest, self._pace.slowest)

    def end(self) -> None:
        """Quarantine the rows that cannot be removed; all others were, or are not old any more."""
        self._removals.note_failed(self._step, "row", self._names)


def _cause(error: Exception) -> Exception:
    """Return why rows cannot be removed; the error itself where it is another."""
    return error.__cause__ if isinstance(error, Unremovable) and isinstance(error.__cause__, Exception) else error
