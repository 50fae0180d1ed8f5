"""Show what our pods hold that outlive their workload's attempt: as terminating, on the devices that it was planned on.

A workload holds what was planned for it. Its pod can outlive that: a worker that has reported its end, containers
beside it, a notebook that saves, a node out of reach, a process that cannot be killed. Until it is gone it keeps the
devices of its attempt, and what is nominated there waits for it. Called by `World` for each node that changed.

A label is believed for what was planned only: a second pod with the labels of the first, and GPUs beyond the plan, are
foreign.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...backends.base import NodePart, NodeStatus, WorkloadPod
from ...engine.snapshot import GPU, Terminating
from ...store.records import Workload
from ...values import Place

MAX_PLANNED = 20_000
"""Ended attempts whose places are remembered, the newest."""

Planned = tuple[str, int | None]
"""A workload and its attempt; None for a session."""


@dataclass(slots=True)
class _Devices:
    """The milli-GPUs of a node's devices that are spoken for, while its pods are looked at."""

    held: dict[int, int]
    starting: set[int]
    """those of workloads that have not started yet"""
    nominated: set[int]

    def free(self, device: int) -> int:
        """Return what nothing holds of a device; 0 where there is no such device."""
        return GPU - self.held.get(device, GPU)

    def hold(self, device: int, milli: int) -> None:
        """Count a device, as far as nothing else holds it."""
        if device in self.held:
            self.held[device] = min(GPU, self.held[device] + milli)

    def others(self, count: int, among: Collection[int] | None = None) -> tuple[int, ...]:
        """Return devices that nothing holds, at most so many, those first that are nominated for nothing.

        `among`: those of the pool whose GPUs the pod holds, where its node is in several.
        """
        free = [device for device, milli in self.held.items() if not milli and (among is None or device in among)]
        return tuple(sorted(sorted(free, key=lambda device: (device in self.nominated, device))[:count]))


@dataclass(slots=True)
class WorkloadPods:
    """The places of attempts that ended, and by when their pods should be gone. `clock` returns Unix seconds."""

    clock: Callable[[], float]
    _planned: OrderedDict[Planned, tuple[Place, ...]] = field(default_factory=OrderedDict)
    _deadlines: dict[str, dict[WorkloadPod, float]] = field(default_factory=dict)
    """node to its pods that outlive their attempts, and by when they should be gone"""
    _down_since: dict[str, float] = field(default_factory=dict)
    """the nodes that are not ready, and since when"""

    def stepped(self, seconds: float) -> None:
        """Convert all times, as the clock was set forward by so many seconds."""
        for deadlines in self._deadlines.values():
            for pod in deadlines:
                deadlines[pod] += seconds
        for node in self._down_since:
            self._down_since[node] += seconds

    def note(self, known: Workload | None, row: Workload) -> None:
        """Remember where an attempt was placed that holds its place no more."""
        if known is None or not known.placement or (row.live and _attempt(row) == _attempt(known) and row.placement):
            return
        self._planned[known.id, _attempt(known)] = known.placement
        self._planned.move_to_end((known.id, _attempt(known)))
        if len(self._planned) > MAX_PLANNED:
            self._planned.popitem(last=False)

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        self._deadlines.pop(node, None)
        self._down_since.pop(node, None)

    def shown(
        self,
        node: NodeStatus,
        rows: Mapping[str, Workload] | None,
        here: Iterable[Workload],
        nominated: Callable[[], Iterable[Workload]],
    ) -> NodeStatus:
        """Return a node with what its pods of ended attempts hold, without the pods themselves.

        `rows` are the active ones (None: not known yet), `here` those of them that are placed on the node, `nominated`
        returns those that wait for a nomination.
        """
        node = self._with_down_since(node)
        if not node.pods:
            self._deadlines.pop(node.name, None)
            return node
        if rows is None:
            return replace(node, pods=())
        present, ended = _split_by_plan(node, rows)
        foreign = _beyond_plan(present, rows, node.name)
        known, now = self._deadlines.get(node.name, {}), self.clock()
        deadlines = {pod: known[pod] if pod in known else _deadline(pod, now) for pod in ended}
        self._deadlines[node.name] = deadlines
        result: list[Terminating] = []
        if ended:
            devices = _devices(node, here, nominated() if any(self._is_unknown(pod) for pod in ended) else ())
            for pod in ended:
                result += self._terminating(pod, node, devices, deadlines[pod])
        return replace(
            node,
            pods=(),
            terminating=tuple(result),
            parts=tuple(_with_foreign(part, foreign) for part in node.parts),
            foreign_gpus=node.foreign_gpus + sum(pod.gpus for pod in foreign),
            foreign_cpu=node.foreign_cpu + sum(pod.cpu for pod in foreign),
            foreign_memory=node.foreign_memory + sum(pod.memory for pod in foreign),
            foreign_pods=node.foreign_pods + sum(pod in present for pod in foreign),
        )

    def _with_down_since(self, node: NodeStatus) -> NodeStatus:
        """Return a node that is not ready with when that was first seen: its cluster has a clock of its own."""
        if node.ready or node.down_since is None:
            self._down_since.pop(node.name, None)
            return node
        return replace(node, down_since=self._down_since.setdefault(node.name, self.clock()))

    def _is_unknown(self, pod: WorkloadPod) -> bool:
        return not pod.devices and (pod.workload, pod.attempt) not in self._planned

    def _terminating(self, pod: WorkloadPod, node: NodeStatus, devices: _Devices, deadline: float) -> list[Terminating]:
        """Return what a pod holds: on its devices, where they are known, or those of its attempt, else on free ones.

        A device that was given to a start meanwhile counts once: the new pod waits for the old one.
        """
        planned = self._planned.get((pod.workload, pod.attempt), ())
        places = [place for at, place in enumerate(planned) if place.node == node.name and pod.worker in (None, at)]
        if pod.devices:
            places = [Place(node.name, pod.devices, pod.milli)]
        if not planned and not pod.devices and pod.ends_at is None:
            deadline = 0.0  # neither known nor about to end
        result: list[Terminating] = []
        remaining = pod.gpus
        for device, milli in [pair for place in places for pair in zip(place.devices, place.milli, strict=False)]:
            taken = min(milli, remaining)
            if taken and (devices.free(device) >= taken or device in devices.starting):
                remaining -= taken
                if held := min(taken, devices.free(device)):
                    devices.hold(device, held)
                    result.append(Terminating(pod.workload, (device,), held, deadline=deadline))
        among = next((part.devices for part in node.parts if part.pool == pod.pool), None)
        others = () if pod.devices else devices.others(remaining // GPU, among)
        for device in others:
            devices.hold(device, GPU)
        if others or pod.cpu or pod.memory or (node.max_pods and not result):
            result.append(Terminating(pod.workload, others, GPU, pod.cpu, pod.memory, deadline))
        return [*result[:-1], *(replace(item, pods=int(node.max_pods > 0)) for item in result[-1:])]


def _deadline(pod: WorkloadPod, now: float) -> float:
    """Return by when a pod that is seen for the first time should be gone.

    Its whole grace counts from now where the time that its cluster says is not within it: clocks differ.
    """
    if pod.ends_at is None:
        return now
    return pod.ends_at if now <= pod.ends_at <= now + pod.grace else now + pod.grace


def _attempt(row: Workload) -> int | None:
    return None if row.kind == "session" else row.attempt


def _split_by_plan(node: NodeStatus, rows: Mapping[str, Workload]) -> tuple[list[WorkloadPod], list[WorkloadPod]]:
    """Return the pods whose workloads hold something here, and those of ended attempts."""
    present: list[WorkloadPod] = []
    ended: list[WorkloadPod] = []
    for pod in node.pods:
        (present if _placed(pod, rows.get(pod.workload), node.name) else ended).append(pod)
    return present, ended


def _placed(pod: WorkloadPod, row: Workload | None, node: str) -> bool:
    if row is None or pod.attempt not in (None, row.attempt):
        return False
    return any(place.node == node for place in row.placement)


def _beyond_plan(present: Sequence[WorkloadPod], rows: Mapping[str, Workload], node: str) -> list[WorkloadPod]:
    """Return what pods hold beyond what was planned for their workers: second pods whole, the GPUs of others."""
    result: list[WorkloadPod] = []
    seen: set[tuple[str, int | None]] = set()
    for pod in sorted(present, key=lambda item: item.gpus):
        places = [p for at, p in enumerate(rows[pod.workload].placement) if p.node == node and pod.worker in (None, at)]
        planned = sum(sum(place.milli) for place in places)
        if (pod.workload, pod.worker) in seen or (not places and pod.gpus):
            result.append(pod)
        elif pod.gpus > planned and planned % GPU == 0:  # a share of a GPU is requested as what its pool calls one
            result.append(replace(pod, gpus=pod.gpus - planned, cpu=0, memory=0))
        seen.add((pod.workload, pod.worker))
    return result


def _with_foreign(part: NodePart, foreign: Sequence[WorkloadPod]) -> NodePart:
    """Return what a node offers to a pool, with the GPUs that pods hold there beyond their plan."""
    return replace(part, foreign_gpus=part.foreign_gpus + sum(pod.gpus for pod in foreign if pod.pool == part.pool))


def _devices(node: NodeStatus, here: Iterable[Workload], nominated: Iterable[Workload]) -> _Devices:
    devices = _Devices({device: node.foreign.get(device, 0) for device in node.devices}, set(), set())
    for row in here:
        for place in row.placement if row.live else ():
            for device, milli in zip(place.devices, place.milli, strict=False) if place.node == node.name else ():
                devices.hold(device, milli)
                if row.state == "starting":
                    devices.starting.add(device)
    for row in nominated:
        devices.nominated.update(d for place in row.nomination if place.node == node.name for d in place.devices)
    return devices
