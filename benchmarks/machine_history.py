"""Measure what months of machines that are over cost a service: its start, its steps, its pages, and the retention.

The history is that of `MACHINES` machines, `EVENTS` lines of their logs and `DEPLOYMENTS` deployments of which all but
one were deleted; the baseline is the same without it, in the same run. All is counted in time of one processor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from tempfile import TemporaryDirectory

from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.control.garbage import collecting_less
from makeway_quota.services.machines.machines import timeline
from makeway_quota.store import Store, open_store

from .machine_cycle import DOCUMENT, Site, _machine
from .measure import Measured

MACHINES, EVENTS, DEPLOYMENTS = 10_000, 100_000, 300
DAYS = 90
LIVE, BOOTING, JOBS = 100, 10, 1_000
TIMES = 20
KEPT = 30 * 86_400.0
NAMES = (
    "start",
    "first step of a leader",
    "step",
    "page of a deployment",
    "list of deployments",
    "list of machines",
    "page of a machine",
    "mark of the pages",
    "retention with nothing to remove",
)


def add_history(store: Store, term: int, now: float, machines: int = MACHINES) -> None:
    """Add machines that are over, each with its request, its console and a line for each of its states."""
    for begin in range(0, machines, 500):
        batch = [_ended(number, now, machines) for number in range(begin, min(machines, begin + 500))]
        store.machines.commit("cloud", term, MachineChanges(launched=tuple(batch)))
        rows: list[Machine] = [replace(one, version=1) for one in batch]
        for state in ("booting", "joining", "ready", "draining", "ready", "draining", "ready", "draining", "gone"):
            rows = [replace(one, state=state) for one in rows]
            assert store.machines.commit("cloud", term, MachineChanges(changed=tuple(rows)))
            rows = [replace(one, version=one.version + 1) for one in rows]
        for one in rows[::10]:
            store.machine_log.write_output(one.id, "console", "boots\n" * 1000, None, one.state_since)
    for number in range(DEPLOYMENTS - 1):
        name = f"old-{number}"
        text = DOCUMENT.format(machines=5).replace("name: cloud", f"name: {name}", 1)
        saved = store.deployments.save(name, text, 0, "benchmark", now)
        store.deployments.delete(name, saved.version, "benchmark", now)
        store.deployments.close(name, term, now)


def _ended(number: int, now: float, machines: int) -> Machine:
    """Return a machine of the past days, as it was requested; the newest ended an hour ago."""
    at = now - 3600 - 86_400 * DAYS * (machines - number) / machines
    one = _machine(number, False, now)
    return replace(one, id=f"m-old-{number:06}", requested_at=at, state_since=at + 60, state="requested")


class _Parts:
    """What a service does with its machines, one after the other, in ms of one processor."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.samples: dict[str, list[float]] = {name: [] for name in NAMES}

    def timed(self, name: str, work: Callable[[], object]) -> None:
        began = time.process_time()
        work()
        self.samples[name].append(1000 * (time.process_time() - began))

    async def run(self) -> None:
        """Measure everything but the start."""
        with closing(open_store(self.file)) as store:
            site = Site(store, LIVE, BOOTING, JOBS)
            for number in range(TIMES):
                site.loop._term = None
                await site.loop._stop()
                began = time.process_time()
                await site.loop.turn()
                self.samples[NAMES[1]].append(1000 * (time.process_time() - began))
                await site.cycle()
                self.samples[NAMES[2]].append((await site.cycle())[1])
                self._pages(store, site, f"m-old-{number:06}")

    def _pages(self, store: Store, site: Site, old: str) -> None:
        def page() -> object:
            lines = timeline(store.machine_log.states("cloud", site.now - 3600), store.machines.read("cloud").machines)
            return lines, store.machine_log.events("cloud", limit=20), store.machines.machines("cloud", limit=100)

        def listed() -> object:
            return store.machines.live(), store.deployments.list(), store.machines.spend("cloud")

        def machine() -> object:
            return store.machines.machine(old), store.machine_log.events(machine=old), store.machine_log.outputs(old)

        def retention() -> object:
            before = site.now - 10 * 365 * 86_400
            forget = store.machine_pruning
            return (
                forget.forget_machines(before, 500, maximum=10 * MACHINES),
                forget.forget_machine_outputs(500, maximum=10 * MACHINES),
                forget.forget_machine_events(before, 500, maximum=10 * EVENTS),
                forget.forget_deployments(before, 500),
            )

        def newest() -> object:
            return store.machines.machines("cloud", limit=100)

        every: tuple[Callable[[], object], ...] = (page, listed, newest, machine, store.machine_log.mark, retention)
        for name, work in zip(NAMES[3:], every, strict=True):
            self.timed(name, work)


def measure() -> Iterator[Measured]:
    """Measure the parts with the history, and without as the baseline."""
    with collecting_less(), TemporaryDirectory() as folder:
        results = []
        for machines in (0, MACHINES):
            file = f"sqlite:///{folder}/makeway-{machines}.sqlite"
            with closing(open_store(file)) as store:
                add_history(store, store.take_term("benchmark", time.time()), time.time(), machines)
            parts = _Parts(file)
            for _ in range(TIMES):
                parts.timed(NAMES[0], lambda file=file: open_store(file).close())  # type: ignore[misc]
            asyncio.run(parts.run())
            results.append(parts.samples)
        without, kept = results
        for name in NAMES:
            note = (
                f"{EVENTS:,} lines of the log, {DEPLOYMENTS - 1} deployments that were deleted; older ones are removed."
                if name == NAMES[0]
                else ""
            )
            base = sorted(without[name])[len(without[name]) // 2]
            title = f"{name}, after {MACHINES:,} machines in {DAYS} days"
            yield Measured(title, "ms", kept[name], "without them", base, note=note)
