"""Consolidate: move jobs within a pool, so that scattered free GPUs become one block, or a gang's blocks (rule 5.6).

Called before any workload is stopped. Only the workers that must leave a node move; the others of their gang stay.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..index.devices import hosts
from ..index.nodes import Allocation, NodeState, WorkerPlacement
from ..placement.fit import find_placement, within_limits
from ..snapshot import GPU
from .victims.preemptor import Preemptor

_TRIES = 24
"""The number of nodes that are tried, the cheapest first."""
_GANG_TRIES = 6
"""The number of sets of nodes that are tried for a gang, each without the moves that failed before."""
_MAX_MOVES = 200
"""The most jobs that one preemptor makes move."""


@dataclass(frozen=True, slots=True)
class Moving:
    """One job with the parts of its workers that move and of those that stay."""

    allocation: Allocation
    to: tuple[WorkerPlacement, ...]

    @property
    def changes(self) -> tuple[tuple[WorkerPlacement, ...], tuple[WorkerPlacement, ...]]:
        """Return the old and the new parts of the workers that move; an elastic gang may go on with fewer."""
        places = {part.worker: part for part in self.allocation.parts}
        both = zip(self.allocation.parts, self.to, strict=False)
        pairs = [(old, new) for at, new in both if (old := places.get(new.worker, at)) != new]
        return tuple(old for old, _ in pairs), tuple(new for _, new in pairs)


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """The moves, and the preemptor's placement. A start of this very plan only gets another placement."""

    moves: tuple[Moving, ...]
    parts: tuple[WorkerPlacement, ...]


class _Displaced(NamedTuple):
    """Workers of one job that move off their node."""

    allocation: Allocation
    parts: tuple[WorkerPlacement, ...]


@dataclass(frozen=True, slots=True)
class _Option:
    """The workers to move off a node for `gain` more workers of the preemptor."""

    cost: float
    orders: list[tuple[object, ...]]
    node: NodeState
    chosen: list[_Displaced]
    gain: int

    @property
    def key(self) -> tuple[object, ...]:
        """Return the sort key: milli-GPUs of the jobs that restart per worker gained, then of the workers that move."""
        moving = sum(displaced.allocation.need.gpus * len(displaced.parts) for displaced in self.chosen)
        return self.cost, moving, self.orders, self.node.position


def consolidate(preemptor: Preemptor) -> Rearrangement | None:
    """Return moves that make the preemptor fit, applied to the cluster; None (nothing changed) if there are none."""
    cluster, pool, need = preemptor.cluster, preemptor.pool, preemptor.need
    if not (cluster.settings.consolidation and pool.pool.consolidation):
        return None
    if pool.free < preemptor.milli_gpus or not within_limits(
        cluster, preemptor.account, pool, preemptor.milli_gpus, True
    ):
        return None
    nodes = [node for node in pool.nodes if node.suits(need)]
    if need.min_workers == 1:
        return _for_one_worker(preemptor, nodes)
    options = [option for node in nodes if node.allocations and (option := _option(preemptor, node)) is not None]
    options.sort(key=lambda option: option.key)
    return _for_a_gang(preemptor, options, need.min_workers - sum(node.workers(need, True) for node in nodes))


def _for_one_worker(preemptor: Preemptor, nodes: list[NodeState]) -> Rearrangement | None:
    """Make room on the node where that moves the fewest GPUs; a job without a target stays."""
    unseen = sorted([(_min_moved(preemptor, node), node.position) for node in nodes if node.allocations], reverse=True)
    options: list[_Option] = []
    stuck: dict[int, list[Allocation]] = {}
    for _ in range(_TRIES):
        while unseen and (not options or unseen[-1][0] <= options[0].cost):
            option = _option(preemptor, preemptor.pool.nodes[unseen.pop()[1]])
            if option is not None:
                insort(options, option, key=lambda item: item.key)
        if not options:
            break
        option = options.pop(0)
        done = _try(preemptor, option.chosen)
        if isinstance(done, Rearrangement):
            return done
        if done is not None:
            staying = stuck.setdefault(option.node.position, [])
            staying.append(done)
            other = _option(preemptor, option.node, staying)
            if other is not None:
                insort(options, other, key=lambda item: item.key)
    return None


def _for_a_gang(preemptor: Preemptor, options: list[_Option], missing: int) -> Rearrangement | None:
    """Make room for as many workers as are missing, on the nodes where that moves the fewest GPUs a worker.

    A job without a target stays, and its nodes are looked at again without it.
    """
    staying: list[Allocation] = []
    for _ in range(_GANG_TRIES):
        chosen = _enough(options, missing)
        moving = [displaced for option in chosen for displaced in option.chosen]
        if not moving or len(moving) > _MAX_MOVES:
            return None
        done = _try(preemptor, moving)
        if done is None or isinstance(done, Rearrangement):
            return done
        staying.append(done)
        again = [
            _option(preemptor, option.node, staying)
            if any(displaced.allocation is done for displaced in option.chosen)
            else option
            for option in options
        ]
        options = sorted((option for option in again if option is not None), key=lambda option: option.key)
    return None


def _enough(options: list[_Option], missing: int) -> list[_Option]:
    """Return the first options that are enough together, without superfluous ones; none if all are not enough."""
    chosen: list[_Option] = []
    spare = -missing
    for option in options:
        if spare < 0:
            chosen.append(option)
            spare += option.gain
    for option in chosen[::-1]:
        if option.gain <= spare:
            spare -= option.gain
            chosen.remove(option)
    return chosen if spare >= 0 else []


def _may_move(preemptor: Preemptor, allocation: Allocation) -> bool:
    victim = allocation.workload
    evicted = allocation.terminating or allocation.stuck
    if evicted or allocation.started_in_plan or victim.non_preemptible or victim.kind != "job":
        return allocation.started_in_plan and not evicted
    if allocation.all_or_nothing:
        return False
    return victim.started_at is not None and not preemptor.cluster.is_protected(victim)


def _min_moved(preemptor: Preemptor, node: NodeState) -> int:
    """Return a lower bound of the milli-GPUs that must move off a node: those in use on the devices that are needed."""
    missing = preemptor.need.whole_devices - node.whole_free_later
    if missing <= 0 or node.overfull or any(allocation.started_in_plan for allocation in node.allocations.values()):
        return 0
    return sum(sorted([GPU - milli for milli in node.free_later if milli < GPU])[:missing])


def _option(preemptor: Preemptor, node: NodeState, staying: Sequence[Allocation] = ()) -> _Option | None:
    have = node.workers(preemptor.need, True)
    chosen = _lightest(preemptor, node, have + 1, staying)
    if not chosen:
        return None
    gain = have + 1
    while gain < preemptor.need.min_workers and _room(preemptor, node, chosen, gain + 1):
        gain += 1
    cost = sum(displaced.allocation.milli_gpus for displaced in chosen if not displaced.allocation.started_in_plan) / (
        gain - have
    )
    chosen = _only_workers_that_must(preemptor, node, chosen, gain)
    return _Option(
        cost, sorted(preemptor.order(displaced.allocation) for displaced in chosen), node, chosen, gain - have
    )


def _lightest(preemptor: Preemptor, node: NodeState, workers: int, staying: Sequence[Allocation]) -> list[_Displaced]:
    """Return the jobs of a node with the fewest GPUs whose moves make room; empty if there are none."""
    able = [
        _Displaced(t, tuple(part for part in t.parts if part.node is node))
        for t in node.allocations.values()
        if _may_move(preemptor, t) and t not in staying
    ]
    if not able or not _room(preemptor, node, able, workers):
        return []
    able.sort(
        key=lambda item: (
            not item.allocation.started_in_plan,
            item.allocation.milli_gpus,
            preemptor.order(item.allocation),
        )
    )
    for displaced in able:
        if _room(preemptor, node, [displaced], workers):
            return [displaced]
    chosen: list[_Displaced] = []
    for displaced in able:
        chosen.append(displaced)
        if _room(preemptor, node, chosen, workers):
            break
    for displaced in chosen[:]:
        fewer = [other for other in chosen if other is not displaced]
        if _room(preemptor, node, fewer, workers):
            chosen = fewer
    return chosen


def _only_workers_that_must(
    preemptor: Preemptor, node: NodeState, chosen: list[_Displaced], workers: int
) -> list[_Displaced]:
    """Return only the workers that have to move; a gang's first workers stay where there is room beside them."""
    for at, (allocation, parts) in enumerate(chosen):
        for part in parts if len(parts) > 1 else ():
            fewer = _Displaced(allocation, tuple(other for other in chosen[at].parts if other is not part))
            tried = [*chosen[:at], fewer, *chosen[at + 1 :]]
            if fewer.parts and _room(preemptor, node, tried, workers):
                chosen = tried
    return chosen


def _room(preemptor: Preemptor, node: NodeState, gone: Iterable[_Displaced], workers: int) -> bool:
    devices, cpu, memory, pods = (
        list(node.free_later),
        node.cpu_free_later,
        node.memory_free_later,
        node.pods_free_later,
    )
    for allocation, parts in gone:
        for part in parts:
            cpu += allocation.need.cpu
            memory += allocation.need.memory
            pods += 1
            for at in part.devices:
                devices[at] += part.milli_per_device
    return hosts(preemptor.need, devices, devices.count(GPU), cpu, memory, pods) >= workers


def _try(preemptor: Preemptor, chosen: Sequence[_Displaced]) -> Rearrangement | Allocation | None:
    """Apply moves; with nothing changed, return the job without a target, or None if they are not enough."""
    cluster, pool = preemptor.cluster, preemptor.pool
    going = _by_job(chosen)
    for allocation, gone in going:
        cluster.evict(allocation)
        stays = tuple(part for part in allocation.parts if part not in gone)
        if stays:
            cluster.nominate(allocation.workload, allocation.need, stays)
    parts = find_placement(pool, preemptor.need, True)
    moves: list[Moving] = []
    stuck: Allocation | None = None
    if parts:
        cluster.nominate(preemptor.workload, preemptor.need, parts)
        for allocation, gone in going:
            to = _target(allocation, gone)
            if not to:
                stuck = allocation
                break
            cluster.withdraw_nomination(allocation.workload)
            cluster.nominate(allocation.workload, allocation.need, to)
            moves.append(Moving(allocation, to))
        cluster.withdraw_nomination(preemptor.workload)
    if parts and stuck is None:
        return Rearrangement(tuple(moves), parts)
    for allocation, _ in going:
        cluster.withdraw_nomination(allocation.workload)
        cluster.restore(allocation)
    return stuck


def _by_job(chosen: Iterable[_Displaced]) -> list[_Displaced]:
    """Group the workers that move by job, the largest jobs first."""
    by_job: dict[str, _Displaced] = {}
    for allocation, parts in chosen:
        name = allocation.workload.id
        by_job[name] = _Displaced(allocation, (*(by_job[name].parts if name in by_job else ()), *parts))
    return sorted(by_job.values(), key=lambda item: (-item.allocation.milli_gpus, item.allocation.workload.id))


def _target(allocation: Allocation, gone: Sequence[WorkerPlacement]) -> tuple[WorkerPlacement, ...]:
    """Return a placement on free GPUs for the workers that move; a gang keeps its number of workers."""
    parts = find_placement(allocation.pool, replace(allocation.need, min_workers=len(gone), workers=len(gone)))
    if not parts:
        return ()
    place = {old: new._replace(worker=old.worker) for old, new in zip(gone, parts, strict=True)}
    return tuple(place.get(part, part) for part in allocation.parts)
