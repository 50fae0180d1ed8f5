"""Connect the service with the machines of its deployments: their rows, the reports of their agents, their placements.

Agents send to any replica (`services/cluster/agents.py`); what changes reaches the others by the store, and wakes the
loop. The backend reads here what it shows, and the requests of agents what they answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...autoscale.deployment import CLUSTER, provisioning_class
from ...autoscale.document import read_deployment
from ...autoscale.machine import Machine, MachineState, MachineTimeouts
from ...backends import untrusted
from ...backends.base import Key
from ...backends.machines.machine_source import (
    Condition,
    HostedWorker,
    MachineStatus,
    PlacedAttempt,
    WorkerState,
)
from ...quarantine import Quarantine
from ...store.machines.reports import MachineReport
from ...store.store import Store
from .placements import MachinePlacements, unwanted_at
from .tokens import MachineTokens

READING = "reading what its agent reports"
HEARD_INTERVAL = 20.0
"""Seconds between two writes of when agents were heard of, for other replicas and for a later process"""
DOCUMENTS_INTERVAL = 30.0
"""Seconds after which the documents of deployments are read again"""
MAX_WORKERS = 4096
CONDITIONS: Mapping[MachineState, Condition] = {
    "requested": "starting",
    "booting": "starting",
    "joining": "starting",
    "ready": "ready",
    "draining": "draining",
    "lost": "lost",
    "terminating": "ending",
}
"""What a machine's state is to the backend; one that is gone or failed is not there"""
STATES: Mapping[str, WorkerState] = {"starting": "starting", "running": "running", "exited": "exited"}


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """What the document of its deployment said about a machine when it was requested."""

    init_script: str = ""
    image: str | None = None
    cpu_only: bool = False
    orphan_after: float = 900.0
    cpu: int = 0
    memory: int = 0
    """both as the machine type states them, by which machines are sized; 0: not stated"""
    of_cluster: bool = False
    provisioning_class: str = ""


class MachineChannel:
    """The machines as they were read last, and when each was heard of. For the event loop only."""

    def __init__(
        self,
        store: Store,
        tokens: MachineTokens,
        placements: MachinePlacements,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens = tokens
        self.placements = placements
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self._store = store
        self._clock = clock
        self._monotonic = monotonic
        self._wake: Callable[[], None] = lambda: None
        self._rows: dict[str, Machine] = {}
        self._reports: dict[str, MachineReport] = {}
        self._statuses: dict[str, MachineStatus] = {}
        self._shown_from: dict[str, tuple[Machine, int, float]] = {}
        """what the status of each machine was made from: its row, the serial of its report, and `lost_after`"""
        self._options: dict[str, tuple[str, MachineOptions]] = {}
        self._lost_after: dict[str, float] = {}
        """by deployment"""
        self._documents_at = -DOCUMENTS_INTERVAL
        self._heard: dict[str, float] = {}
        """Unix seconds, of those that were heard of here"""
        self._unwritten: dict[str, float] = {}
        self._written_at = monotonic()
        self._serial = 0
        self._synced = False
        self._changes = 0
        self._due_at: float | None = None
        """when a placed attempt stops being wanted by time alone (Unix seconds)"""
        self._placed: tuple[int, Mapping[Key, PlacedAttempt]] = (-1, {})
        self._lock = asyncio.Lock()

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a machine, or what it runs, changes."""
        self._wake = wake
        self.placements.on_change(wake)

    def wake(self) -> None:
        """Report that an agent has written something new."""
        self._wake()

    # -- for the backend

    @property
    def synced(self) -> bool:
        """Whether all machines were read once."""
        return self._synced

    @property
    def version(self) -> int:
        """Return a number that grows with every change of the machines and of what is placed there."""
        if self._due_at is not None and self._clock() >= self._due_at:
            self._changes += 1
            self._due_at = None
        return self._changes + self.placements.version

    async def refresh(self) -> None:
        """Read the rows, and the reports that changed; write when agents were heard of, from time to time."""
        async with self._lock:
            rows, reports = await asyncio.to_thread(self._read)
            for report in reports:
                self._serial = max(self._serial, report.serial)
                self._reports[report.machine] = report
            before, self._rows = self._rows, {row.id: row for row in rows}
            for name in (before.keys() | self._reports.keys()) - self._rows.keys():
                self._forget(name)
            await self._read_documents()
            for row in rows:
                if self._is_shown(row):
                    continue
                if not self.quarantine.is_backing_off(READING, "node", row.id):
                    with self.quarantine.guard(READING, "node", row.id):
                        self._take(row)
                if row.id not in self._statuses:  # one that is missing would count as gone, with its work
                    condition = CONDITIONS.get(row.state, "lost")
                    self._statuses[row.id] = MachineStatus(row.id, row.pool, condition, row.gpus)
                    self._changed({row.id})
            self._synced = True
            await self._write_heard()

    def machines(self) -> Mapping[str, MachineStatus]:
        """Return the machines that are not over by name."""
        return self._statuses

    def live_machines(self) -> list[Machine]:
        """Return the rows of the machines that are not over, as they were read last."""
        return list(self._rows.values())

    def cluster_machines(self) -> Mapping[str, str]:
        """Return the machines that are nodes of the cluster, by node: of two on one node that which is ready."""
        ours = [status for status in self._statuses.values() if status.node]
        return {
            status.node: status.name
            for status in sorted(ours, key=lambda status: (status.condition == "ready", status.requested_at))
        }

    def placed(self) -> Mapping[Key, PlacedAttempt]:
        """Return the attempts that hold GPUs of machines."""
        version, now = self.version, self._clock()
        if self._placed[0] != version:
            self._placed = version, self.placements.placed(now)
            times = [unwanted_at(row, now) for row in self.placements.with_notice()]
            self._due_at = min((at for at in times if at is not None), default=None)
        return self._placed[1]

    # -- for the requests of agents

    async def row(self, machine: str) -> Machine | None:
        """Return the row of a machine as it is committed, also of one that is over."""
        return await asyncio.to_thread(self._store.machines.machine, machine)

    def known(self, machine: str) -> Machine | None:
        """Return the row of a machine that is not over, as it was read last."""
        return self._rows.get(machine)

    def status(self, machine: str) -> MachineStatus | None:
        """Return a machine as it was read last; None where it is over or not known here."""
        return self._statuses.get(machine)

    def report(self, machine: str) -> MachineReport | None:
        """Return the newest report of a machine that was read here."""
        return self._reports.get(machine)

    def record_contact(self, machine: str) -> None:
        """Note that an agent was heard of now."""
        self._heard[machine] = self._unwritten[machine] = self._clock()

    def heard_at(self, machine: str) -> float | None:
        """Return when an agent was heard of last, here or as it is stored, in Unix seconds."""
        report = self._reports.get(machine)
        times = [self._heard.get(machine), None if report is None else report.heard_at]
        return max((at for at in times if at is not None), default=None)

    def options(self, row: Machine) -> MachineOptions:
        """Return what the document said about a machine when it was requested."""
        known = self._options.get(row.id)
        if known is None or known[0] != row.request:
            known = row.request, options_of(row.request)
            self._options[row.id] = known
        return known[1]

    async def lost_after(self, deployment: str) -> float:
        """Return the seconds of silence after which a machine of a deployment is lost."""
        if deployment not in self._lost_after:
            self._documents_at = -DOCUMENTS_INTERVAL
            async with self._lock:
                await self._read_documents()
        return self._lost_after.get(deployment, MachineTimeouts().lost_after)

    # -- inside

    def _read(self) -> tuple[list[Machine], list[MachineReport]]:
        """Read the reports before the rows: those of a machine that is over then are dropped with its row."""
        reports = self._store.machine_reports.after(self._serial)
        return list(self._store.machines.live()), list(reports)

    async def _read_documents(self) -> None:
        unknown = any(row.deployment not in self._lost_after for row in self._rows.values())
        now = self._monotonic()
        if not unknown and now - self._documents_at < DOCUMENTS_INTERVAL:
            return
        self._documents_at = now
        for deployment in await asyncio.to_thread(self._store.deployments.list):
            try:
                known = read_deployment(deployment.document, deployment.name, stored=True)
                self._lost_after[deployment.name] = known.lost_after
            except Exception:  # a document of another release: what it said before, or the default, holds
                self._lost_after.setdefault(deployment.name, MachineTimeouts().lost_after)
        for row in self._rows.values():
            self._lost_after.setdefault(row.deployment, MachineTimeouts().lost_after)

    def _parts(self, row: Machine) -> tuple[Machine, int, float]:
        """Return what the status of a machine is made from."""
        report = self._reports.get(row.id)
        lost_after = self._lost_after.get(row.deployment, MachineTimeouts().lost_after)
        return row, -1 if report is None else report.serial, lost_after

    def _is_shown(self, row: Machine) -> bool:
        """Whether a machine is shown as its row and its newest report are, neither of which is damaged."""
        report = self._reports.get(row.id)
        damaged = report is not None and report.damaged
        return not damaged and row.id in self._statuses and self._shown_from.get(row.id) == self._parts(row)

    def _take(self, row: Machine) -> None:
        """Show a machine as its row and its newest report are; one that is damaged stays as it was read before."""
        report, before = self._reports.get(row.id), self._statuses.get(row.id)
        parts = self._parts(row)
        if self._shown_from.get(row.id) == parts:
            return
        status = _status(row, self.options(row), parts[2])
        if report is not None and not report.damaged:
            status = _with_facts(status, report.facts)
        elif before is not None:
            status = replace(status, workers=before.workers, model=before.model, virtual=before.virtual)
        if status != before:
            self._statuses[row.id] = status
            self._changed({row.id})
        self._shown_from[row.id] = parts
        if report is not None and report.damaged:
            raise ValueError(report.damaged)

    def _forget(self, name: str) -> None:
        """Forget a machine that is over."""
        by_machine: tuple[dict[str, Any], ...] = (self._statuses, self._shown_from, self._reports, self._options)
        by_machine = (*by_machine, self._heard, self._unwritten)
        for kept in by_machine:
            kept.pop(name, None)
        self._changed({name})

    def _changed(self, machines: set[str]) -> None:
        self._changes += 1
        self.placements.wake(machines)

    async def _write_heard(self) -> None:
        now = self._monotonic()
        if not self._unwritten or now - self._written_at < HEARD_INTERVAL:
            return
        self._written_at = now
        times, self._unwritten = self._unwritten, {}
        await asyncio.to_thread(self._store.machine_reports.heard, times)


def _status(row: Machine, options: MachineOptions, lost_after: float) -> MachineStatus:
    """Return a machine of which nothing was reported yet.

    What the document says of CPU and memory counts, as machines are sized by it: one that has less of them would have
    another one launched for the same work.
    """
    return MachineStatus(
        name=row.id,
        pool=row.pool,
        condition=CONDITIONS[row.state],
        gpus=row.gpus,
        cpu=options.cpu,
        memory=options.memory,
        image=options.image,
        cpu_only=options.cpu_only,
        lost_after=lost_after,
        down_since=row.state_since if row.state == "lost" else None,
        of_cluster=options.of_cluster,
        node=row.cluster_node,
        requested_at=row.requested_at,
        provisioning_class=options.provisioning_class,
    )


def _with_facts(status: MachineStatus, facts: Mapping[str, Any]) -> MachineStatus:
    """Return a machine with what its agent reported; what is not possible counts as not reported."""
    gpus = untrusted.whole(facts.get("gpus"), 1024)
    cpu, memory = untrusted.whole(facts.get("cpu")), untrusted.whole(facts.get("memory"))
    listed = facts.get("attempts")
    workers = (_worker(item) for item in (listed if isinstance(listed, list) else [])[:MAX_WORKERS])
    return replace(
        status,
        gpus=status.gpus if gpus is None or gpus < 0 else gpus,
        cpu=status.cpu or max(0, cpu or 0),
        memory=status.memory or max(0, memory or 0),
        model=untrusted.text(facts.get("model"), 200),
        virtual=facts.get("virtual") is True,
        address=untrusted.text(facts.get("address"), 200),
        workers=tuple(sorted({(*w.key, w.worker): w for w in workers if w is not None}.values())),
    )


def _worker(item: object) -> HostedWorker | None:
    """Return one worker of a report; None for what is none."""
    if not isinstance(item, dict):
        return None
    job = untrusted.text(item.get("job"), 63)
    attempt, worker = untrusted.whole(item.get("attempt")), untrusted.whole(item.get("worker"))
    state = STATES.get(str(item.get("state")))
    if not job or attempt is None or worker is None or attempt < 1 or worker < 0 or state is None:
        return None
    devices, milli = _numbers(item.get("devices")), _numbers(item.get("milli"))
    code = untrusted.whole(item.get("exit_code"), 1000)
    message = untrusted.text(item.get("message"), 1000)
    return HostedWorker(job, attempt, worker, state, code if state == "exited" else None, devices, milli, message)


def _numbers(value: object) -> tuple[int, ...]:
    """Return a list of small numbers; an empty one for anything else."""
    if not isinstance(value, list) or len(value) > 1024:
        return ()
    result = [untrusted.whole(item, 4095) for item in value]
    return tuple(item for item in result if item is not None and item >= 0)


def options_of(request: str) -> MachineOptions:
    """Read the request of a machine, which this service wrote, maybe another release of it."""
    try:
        known = untrusted.read_table(request, 2**22)
    except untrusted.UnreadableJson:
        return MachineOptions()
    image = known.get("image")
    return MachineOptions(
        init_script=untrusted.text(known.get("init_script"), 2**20),
        image=untrusted.text(image, 1000) or None,
        cpu_only=known.get("cpu_only") is True,
        orphan_after=max(0.0, untrusted.number(known.get("orphan_after")) or 0.0) or 900.0,
        cpu=max(0, untrusted.whole(known.get("cpu")) or 0),
        memory=max(0, untrusted.whole(known.get("memory")) or 0),
        of_cluster=known.get("provider") == CLUSTER,
        provisioning_class=_provisioning_class(known),
    )


def _provisioning_class(known: Mapping[str, Any]) -> str:
    settings = known.get("settings")
    if known.get("provider") != CLUSTER or not isinstance(settings, dict):
        return ""
    return provisioning_class({key: value for key, value in settings.items() if isinstance(value, str)})
