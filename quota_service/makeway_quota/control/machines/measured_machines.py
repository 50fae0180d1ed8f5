"""Count what the steps of a leader commit: how long machines took until they were ready, and what failed.

A driver reads and commits through this store, so that what a deposed leader could not write is not counted, and what
was written is counted once. A commit follows its read in the same thread; it is refused where another one was between.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from ... import metrics
from ...autoscale.backoff import LaunchBackoff
from ...autoscale.machine import Machine
from ...autoscale.step import MachineChanges, MachineRows, MachineStore

ALREADY_READY = frozenset({"ready", "draining", "lost"})
"""States of machines that were ready before: what follows is no boot"""


class _Read(threading.local):
    """What the thread has read last."""

    rows = MachineRows()


class DriverStore(MachineStore, Protocol):
    """The rows of the machines, those that are over too."""

    def machines(self, deployment: str | None = None, *, limit: int = 100) -> list[Machine]:
        """Return the newest machines of a deployment."""


class MeasuredMachines:
    """A store of machines that counts boots and failures. `read`, and `commit` after it, are for worker threads."""

    def __init__(self, store: DriverStore) -> None:
        self._store = store
        self._read = _Read()

    def read(self, deployment: str) -> MachineRows:
        """Return the rows of a deployment as they are committed."""
        self._read.rows = MachineRows()
        self._read.rows = self._store.read(deployment)
        return self._read.rows

    def commit(self, deployment: str, term: int, changes: MachineChanges) -> bool:
        """Write all changes or none; count them if they were written."""
        rows = self._read.rows
        if not self._store.commit(deployment, term, changes):
            return False
        _count_boots(deployment, {one.id: one for one in rows.machines}, changes)
        _count_failures(deployment, {one.key: one for one in rows.backoffs}, changes)
        return True

    def machines(self, deployment: str | None = None, *, limit: int = 100) -> list[Machine]:
        """Return the newest machines of a deployment."""
        return self._store.machines(deployment, limit=limit)

    def peek(self, deployment: str) -> tuple[Machine, ...]:
        """Return the machines of a deployment that are not over, of which nothing is committed."""
        return self._store.read(deployment).machines


def _count_boots(deployment: str, before: Mapping[str, Machine], changes: MachineChanges) -> None:
    for machine in changes.changed:
        known = before.get(machine.id)
        if machine.state == "ready" and known is not None and known.state not in ALREADY_READY:
            metrics.count_boot(deployment, (machine.ready_at or machine.state_since) - machine.requested_at)


def _count_failures(deployment: str, before: Mapping[object, LaunchBackoff], changes: MachineChanges) -> None:
    """Count each back-off that is new or has grown: failures while it is active are of the same time.

    A time that moved because the clock was set is no failure.
    """
    for back in changes.backoffs or ():
        known = before.get(back.key)
        if known is None or known.failures != back.failures or known.expired(back.since):
            metrics.count_failure(deployment, back.failure)
