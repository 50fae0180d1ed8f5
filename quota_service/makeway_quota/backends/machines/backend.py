"""Run jobs on machines of autoscaled pools: their agents start a launcher for each worker that is placed there.

Nothing is ordered here: what a machine has to run follows from the placements in the store, so that each replica and a
new leader answer its agent the same. What runs is read back from the newest reports of the agents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace

from makeway_api.durations import duration

from ..base import LOST_AFTER, BackendError, Key, NodeStatus, Observation, StartOrder, TerminationProgress, WorkloadPod
from ..remote.backend import REPORT_WITHIN, RemoteBackend
from ..remote.worker_hosts import WorkerHosts
from .machine_source import BACKEND, NODES, Condition, HostedWorker, MachineSource, MachineStatus, PlacedAttempt

GPU = 1000
"""Milli-GPUs of a device"""
START_WITHIN = 1800.0
"""Seconds that an agent may take to start a launcher, as for a large image, before a report of it is missed"""
STARTING = "container"
"""The code of the cause why a worker waits for its agent"""

LOSING: frozenset[Condition] = frozenset({"lost", "ending"})
"""The conditions in which a machine loses what it runs"""
HostedWorkers = Mapping[int, HostedWorker]
"""The workers of one attempt by number, as their agents report them"""
_NONE: HostedWorkers = {}


class MachinesBackend(RemoteBackend):
    """The machines that have joined; see `base.Backend` for what each method guarantees."""

    name = BACKEND
    worker_kind = "process"

    def __init__(
        self,
        *,
        durable_checkpoints: bool = False,
        report_within: float = REPORT_WITHIN,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`durable_checkpoints`: whether all machines share a folder of checkpoints."""
        super().__init__(report_within=report_within, monotonic=monotonic, clock=clock)
        self.durable_checkpoints = durable_checkpoints
        self.source: MachineSource
        self._version: int | None = None
        """that of the source for which the hosts and nodes were made"""
        self._hosted: dict[Key, dict[int, HostedWorker]] = {}
        self._nodes: dict[str, tuple[MachineStatus, NodeStatus]] = {}
        self._machine_hosts: dict[Key, WorkerHosts] = {}
        self._at_risk: dict[Key, PlacedAttempt] = {}
        """attempts with a worker on a machine that is gone, lost or ending"""
        self._starting: dict[Key, float] = {}
        """since when agents start workers of these attempts (monotonic)"""

    def follow_machines(self, machines: MachineSource) -> None:
        """Read the machines, and what is placed there, from this."""
        self.source = machines

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a worker or an agent reports something new."""
        super().on_change(wake)
        self.source.on_change(wake)

    async def observe(self, since: int | None = None) -> Observation:
        """Return the machines, and the attempts that are placed there or that a launcher reports."""
        await self.source.refresh()
        return await super().observe(since)

    async def nodes(self) -> Mapping[str, NodeStatus]:
        """Return the machines that are ready, drain or are lost; one without a pool would get one of this host's."""
        machines, known, self._nodes = self.source.machines(), self._nodes, {}
        for name, machine in machines.items():
            if machine.condition in NODES and machine.pool and not machine.of_cluster:
                before = known.get(name)
                unchanged = before is not None and before[0] is machine
                self._nodes[name] = before if before and unchanged else (machine, _node(machine))
        return {name: node for name, (_, node) in self._nodes.items()}

    async def hosts(self) -> Mapping[Key, WorkerHosts] | None:
        """Return what the agents report of each attempt; None before all machines were read once."""
        if not self.source.synced:
            return None
        if self.source.version != self._version or self._starting:
            self._version = self.source.version
            self._make_hosts()
        return self._machine_hosts

    def _make_hosts(self) -> None:
        machines, placed = self.source.machines(), self.source.placed()
        self.lost_after = max([LOST_AFTER, *(machine.lost_after for machine in machines.values())])
        self._hosted = _hosted(machines.values(), placed)
        self._starting = {
            key: self._starting.get(key, self._monotonic())
            for key, workers in self._hosted.items()
            if any(worker.state == "starting" for worker in workers.values())
        }
        sound = {name for name, machine in machines.items() if machine.condition not in LOSING}
        self._at_risk = {
            key: item for key, item in placed.items() if not all(place.node in sound for place in item.places)
        }
        self._machine_hosts = {key: self._hosts_of(key, item, machines) for key, item in placed.items()}

    def _hosts_of(self, key: Key, placed: PlacedAttempt, machines: Mapping[str, MachineStatus]) -> WorkerHosts:
        """Return what is on the machines of a placed attempt.

        A worker that is wanted, and that its agent does not report, is not started yet: agents name what is wanted
        until it is not any more.
        """
        hosted, reported = self._hosted.get(key, _NONE), self.channel.worker_statuses().get(key, {})
        result = WorkerHosts(len(placed.places))
        there: list[bool] = []
        for number, place in enumerate(placed.places):
            machine, worker = machines.get(place.node), hosted.get(number)
            if machine is None or machine.condition in LOSING:
                what = "is not heard of" if machine is not None and machine.condition == "lost" else "was ended"
                result = replace(result, node_lost=True, worker=number, message=f"its machine {place.node} {what}")
            if (claimed := reported.get(number)) is not None and claimed.ended:
                continue
            there.append(machine is not None and (placed.wanted if worker is None else worker.state != "exited"))
            if worker is not None and worker.state == "exited":
                result = replace(result, never_ran=result.never_ran or claimed is None)
                if not result.message:
                    result = replace(result, worker=number, message=_ended(worker, place.node))
        if not there:  # all have reported their ends
            return replace(result, present=any(worker.state != "exited" for worker in hosted.values()))
        # One that ended without a report keeps a gang from going on; one that is to end is waited for.
        if not (all(there) if placed.wanted else any(there)):
            return replace(result, present=False)
        waiting_reason, message = self._waits(key, hosted)
        return replace(result, waiting_reason=waiting_reason, message=message)

    def _waits(self, key: Key, hosted: HostedWorkers) -> tuple[str, str]:
        """Return the reason code and message of an attempt whose worker is being started; empty after START_WITHIN."""
        since = self._starting.get(key)
        if since is None or self._monotonic() - since >= START_WITHIN:
            return "", ""
        number = min(number for number, worker in hosted.items() if worker.state == "starting")
        return STARTING, f"Worker {number} is being started on its machine."

    def cut_off(self) -> Mapping[Key, tuple[int, str]]:
        """Return the attempts with a worker on a machine that is gone, or is lost and the worker silent with it.

        A launcher that has not claimed its worker runs nothing: it needs no silence.
        """
        if not self.source.synced or not self._at_risk:
            return {}
        machines, reported = self.source.machines(), self.channel.worker_statuses()
        times = {machine.lost_after for machine in machines.values() if machine.condition in LOSING}
        silent = {after: self.channel.silent(after).keys() for after in times}
        result: dict[Key, tuple[int, str]] = {}
        for key, placed in self._at_risk.items():
            workers = reported.get(key, {})
            alive = {
                number: place.node
                for number, place in enumerate(placed.places)
                if (worker := workers.get(number)) is None or not worker.ended
            }
            if cut := next(_cut_off(key, alive, machines, silent, workers.keys()), None):
                result[key] = cut
        return result

    def lost_after_of(self, workload: str, attempt: int) -> float:
        """Return the shortest time of the machines where an attempt is placed; it is lost with any of them."""
        placed, machines = self.source.placed().get((workload, attempt)), self.source.machines()
        nodes = {place.node for place in placed.places} if placed is not None else set()
        return min((machines[node].lost_after for node in nodes if node in machines), default=self.lost_after)

    def unreported_message(self, key: Key, worker: int) -> str:
        """Return which machine did not start a worker in time."""
        placed = self.source.placed().get(key)
        node = placed.places[worker].node if placed is not None and worker < len(placed.places) else "its machine"
        return (
            f"the launcher of worker {worker} on {node} did not reach the service within "
            f"{duration(self.report_within)}: check MAKEWAY_MACHINE_URL and the agent's log there"
        )

    async def start(self, order: StartOrder) -> None:
        """Accept an attempt: its agents read that they have to start it."""
        if not order.command:
            raise BackendError("There is no command to run.")

    async def remove(self, workload: str, attempt: int) -> None:
        """Do nothing: agents end what the store does not want any more, and are told again with each request."""

    def termination_progress(self, workload: str) -> TerminationProgress | None:
        """Return which machines still run what is to end; None where none does."""
        remaining = sorted(
            f"worker {worker.worker} of attempt {worker.attempt} on {name}"
            for name, machine in self.source.machines().items()
            for worker in machine.workers
            if worker.job == workload and worker.state != "exited"
        )
        result = super().termination_progress(workload)
        if not remaining:
            return result
        return replace(result or TerminationProgress(), targets=tuple(remaining))


def _hosted(
    machines: Iterable[MachineStatus], placed: Mapping[Key, PlacedAttempt]
) -> dict[Key, dict[int, HostedWorker]]:
    """Return the workers that are where they were placed; others are of no attempt, and their agents end them.

    A machine is believed for its own workers alone.
    """
    result: dict[Key, dict[int, HostedWorker]] = {}
    for machine in machines:
        for worker in machine.workers:
            places = placed[worker.key].places if worker.key in placed else ()
            if worker.worker < len(places) and places[worker.worker].node == machine.name:
                result.setdefault(worker.key, {})[worker.worker] = worker
    return result


def _cut_off(
    key: Key,
    alive: Mapping[int, str],
    machines: Mapping[str, MachineStatus],
    silent: Mapping[float, Set[Key]],
    claimed: Set[int],
) -> Iterator[tuple[int, str]]:
    """Yield the workers that are certainly lost with their machines, of those that have not ended (`alive`)."""
    for number, name in alive.items():
        machine = machines.get(name)
        if machine is None:
            yield number, f"its machine {name} was ended"
        elif machine.condition in LOSING:
            if number not in claimed:
                yield number, f"its machine {name} was lost before worker {number} began"
            elif key in silent[machine.lost_after]:
                yield number, f"its machine {name} was not heard of for {duration(machine.lost_after)}"


def _node(machine: MachineStatus) -> NodeStatus:
    """Return a machine as a node; what its agent runs holds its GPUs there."""
    return NodeStatus(
        name=machine.name,
        pool=machine.pool,
        devices=tuple(range(machine.gpus)),
        model=machine.model,
        cpu=machine.cpu,
        memory=machine.memory,
        ready=machine.condition != "lost",
        virtual=machine.virtual,
        cordoned=machine.condition == "draining",
        down_since=machine.down_since if machine.condition == "lost" else None,
        sessions=False,
        pods=tuple(_pod(worker) for worker in machine.workers if worker.state != "exited"),
    )


def _pod(worker: HostedWorker) -> WorkloadPod:
    milli = worker.milli if len(worker.milli) == len(worker.devices) else (GPU,) * len(worker.devices)
    return WorkloadPod(
        workload=worker.job,
        gpus=sum(milli),
        attempt=worker.attempt,
        worker=worker.worker,
        devices=worker.devices,
        milli=milli,
    )


def _ended(worker: HostedWorker, node: str) -> str:
    if worker.message:
        return f"worker {worker.worker} did not start on {node}: {worker.message}"
    code = "" if worker.exit_code is None else f" with exit code {worker.exit_code}"
    return f"the launcher of worker {worker.worker} on {node} ended{code} and without a report"
