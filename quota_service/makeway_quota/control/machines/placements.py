"""Keep which attempts are placed on machines, and wake the requests of agents that wait for a change there.

Follows the store from commit to commit. What an agent is told follows from these rows alone; a replica that shares the
database reads what others have committed before it answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...backends.base import Key
from ...backends.machines.machine_source import BACKEND, PlacedAttempt
from ...engine.snapshot import ADMITTED
from ...store.records import Workload
from ..transitions import TIME_LIMIT

REPORT_GRACE = 15.0
"""Seconds after the deadline of a notice for which a launcher may still report its end, before its agent ends it"""


@dataclass(slots=True)
class MachineFollower:
    """A request that waits for a change on one machine."""

    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_change(self, timeout: float) -> None:
        """Wait for a change since the last time, or until time is up."""
        try:
            async with asyncio.timeout(timeout):
                await self.changed.wait()
        except TimeoutError:
            return
        self.changed.clear()


class MachinePlacements:
    """The rows of attempts that are placed on machines, by machine. Commits come from any thread."""

    def __init__(self, rows: Iterable[Workload] = ()) -> None:
        self.version = 0
        """grows with every change"""
        self._rows: dict[str, Workload] = {}
        self._by_machine: dict[str, set[str]] = {}
        self._waiting: dict[str, list[MachineFollower]] = {}
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self.committed(tuple(rows))

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` with each change; also from other threads."""
        self._wake = wake

    def committed(self, changed: Sequence[Workload]) -> None:
        """Apply what a commit changed, in the thread that wrote."""
        touched: set[str] = set()
        with self._lock:
            for row in changed:
                touched |= self._apply(row)
            self.version += bool(touched)
        if touched:
            self.wake(touched)
            self._wake()

    def _apply(self, row: Workload) -> set[str]:
        """Apply one row; return the machines where it changes something."""
        before = self._rows.get(row.id)
        if before is not None and row.version < before.version:
            return set()
        machines = _machines_of(row)
        if before is None and not machines:
            return set()
        left_machines = set() if before is None else _machines_of(before) - machines
        for machine in left_machines:
            self._by_machine[machine].discard(row.id)
            if not self._by_machine[machine]:
                del self._by_machine[machine]
        if machines:
            self._rows[row.id] = row
        else:
            self._rows.pop(row.id, None)
        for machine in machines:
            self._by_machine.setdefault(machine, set()).add(row.id)
        unchanged = before is not None and _agent_view(before) == _agent_view(row) and before.attempt == row.attempt
        return left_machines if unchanged else left_machines | machines

    def on(self, machine: str) -> list[Workload]:
        """Return the rows that are placed on a machine, in the order of their ids."""
        with self._lock:
            return [self._rows[id] for id in sorted(self._by_machine.get(machine, ()))]

    def placed(self, now: float) -> Mapping[Key, PlacedAttempt]:
        """Return all attempts that are placed on machines."""
        with self._lock:
            rows = list(self._rows.values())
        return {(row.id, row.attempt): PlacedAttempt(row.placement, is_wanted(row, now)) for row in rows}

    def with_notice(self) -> list[Workload]:
        """Return the rows that are to end by the deadline of a notice."""
        with self._lock:
            return [row for row in self._rows.values() if row.notice is not None]

    @contextmanager
    def follow(self, machine: str) -> Iterator[MachineFollower]:
        """Follow every change on one machine, from now on."""
        follower = MachineFollower(asyncio.get_running_loop())
        with self._lock:
            self._waiting.setdefault(machine, []).append(follower)
        try:
            yield follower
        finally:
            with self._lock:
                self._waiting[machine].remove(follower)
                if not self._waiting[machine]:
                    del self._waiting[machine]

    def wake(self, machines: Iterable[str]) -> None:
        """Wake the requests that follow these machines; from any thread."""
        with self._lock:
            followers = [follower for machine in machines for follower in self._waiting.get(machine, ())]
        for follower in followers:
            if not follower.loop.is_closed():
                follower.loop.call_soon_threadsafe(follower.changed.set)


def is_wanted(row: Workload, now: float) -> bool:
    """Whether an attempt is to run: it is not cancelled, nor over its time or its notice."""
    if row.cancel_requested or row.reason_code == TIME_LIMIT:
        return False
    return row.notice is None or now < row.notice.deadline + REPORT_GRACE


def unwanted_at(row: Workload, now: float) -> float | None:
    """Return when an attempt stops being wanted by time alone, in Unix seconds; None where it does not."""
    return row.notice.deadline + REPORT_GRACE if row.notice is not None and is_wanted(row, now) else None


def _agent_view(row: Workload) -> tuple[object, ...]:
    """Return what an agent is told of a row."""
    return row.placement, row.cancel_requested, row.reason_code == TIME_LIMIT, row.notice


def _machines_of(row: Workload) -> set[str]:
    """Return the machines that an attempt holds GPUs of."""
    if row.kind != "job" or row.state not in ADMITTED:
        return set()
    return {place.node for place in row.placement if place.backend == BACKEND}
