"""Move jobs so that scattered free GPUs become one block and nothing is stopped (engine rule 5.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..state.cluster import Allocation, Cluster, FreeResources, WorkerPlacement
from ..state.groups import Key
from ..state.placement import count_workers, find
from ..state.quota import allowed
from .selection import room_on
from .victims import Preemptor, is_protected, order, stopped

MAX_TRIES = 24
"""So many options are tried for one worker, the cheapest first."""
MAX_GANG_TRIES = 6
"""So many sets of nodes are tried for a gang: each without the moves that proved impossible before."""
MAX_MOVES = 200
"""A gang never makes more jobs move than this."""


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """The jobs that move and where to, and where the preemptor then starts."""

    moves: tuple[tuple[Allocation, tuple[WorkerPlacement, ...]], ...]
    parts: tuple[WorkerPlacement, ...]


@dataclass(frozen=True, slots=True)
class Option:
    """The jobs whose moving off a node makes room for `gain` more workers, and the workers that have to go."""

    p: Preemptor
    node: str
    chosen: tuple[Allocation, ...]
    going: tuple[tuple[WorkerPlacement, ...], ...]
    gain: int

    @property
    def key(self) -> Key:
        """Return the order of options: GPUs interrupted per worker gained, GPUs that go elsewhere, order of leaving."""
        cost = sum(a.amount for a in self.chosen if not a.fresh) / self.gain
        relocated = sum(a.need.gpus * len(parts) for a, parts in zip(self.chosen, self.going, strict=True))
        position = list(self.p.cluster.nodes).index(self.node)
        return cost, relocated, sorted(order(self.p, a) for a in self.chosen), position


def consolidate(p: Preemptor) -> Rearrangement | None:
    """Return moves that make the preemptor fit, or None if there are none."""
    cluster, pool = p.cluster, p.cluster.pools[p.pool]
    if not (cluster.settings.consolidation and pool.consolidation):
        return None
    if cluster.free_gpus(p.pool, False) < p.need.total or not allowed(cluster, p.chain, p.pool, p.need.total, True):
        return None
    nodes = [name for name in cluster.nodes_of(p.pool) if cluster.suits(name, p.need)]
    options = [option for name in nodes if (option := _option(p, name, ())) is not None]
    options.sort(key=lambda option: option.key)
    return _for_one_worker(p, options) if p.need.min_workers == 1 else _for_a_gang(p, options)


def _for_one_worker(p: Preemptor, options: list[Option]) -> Rearrangement | None:
    """Try the options one by one; a job that has nowhere to go stays, and its node is looked at again without it."""
    stuck: dict[str, list[Allocation]] = {}
    for _ in range(MAX_TRIES):
        if not options:
            return None
        option = options.pop(0)
        done = _try(p, [option])
        if isinstance(done, Rearrangement):
            return done
        if done is not None:
            staying = stuck.setdefault(option.node, [])
            staying.append(done)
            other = _option(p, option.node, staying)
            options = sorted([*options, *([other] if other else [])], key=lambda item: item.key)
    return None


def _for_a_gang(p: Preemptor, options: list[Option]) -> Rearrangement | None:
    """Take the first options that are enough together, without the spare ones, and try all of them at once.

    A job that has nowhere to go stays, and its nodes are looked at again without it.
    """
    staying: list[Allocation] = []
    missing = p.need.min_workers - count_workers(p.cluster, p.pool, p.need, True)
    for _ in range(MAX_GANG_TRIES):
        chosen: list[Option] = []
        spare = -missing
        for option in options:
            if spare < 0:
                chosen.append(option)
                spare += option.gain
        if spare < 0:
            return None
        for option in chosen[::-1]:
            if option.gain <= spare:
                spare -= option.gain
                chosen.remove(option)
        moving = {a.id for option in chosen for a in option.chosen}
        if not moving or len(moving) > MAX_MOVES:
            return None
        done = _try(p, chosen)
        if done is None or isinstance(done, Rearrangement):
            return done
        staying.append(done)
        again = [_option(p, option.node, staying) if done in option.chosen else option for option in options]
        options = sorted((option for option in again if option is not None), key=lambda option: option.key)
    return None


def _option(p: Preemptor, node: str, staying: Sequence[Allocation]) -> Option | None:
    have = p.cluster.free_later(node).workers(p.need)
    chosen = _lightest(p, node, have + 1, staying)
    if not chosen:
        return None
    gain = 1
    while have + gain < p.need.min_workers and _room(p, node, chosen) >= have + gain + 1:
        gain += 1
    going: list[tuple[WorkerPlacement, ...]] = [a.on(node) for a in chosen]
    for at, allocation in enumerate(chosen):
        for part in sorted(allocation.on(node), key=lambda item: item.worker):
            less = tuple(other for other in going[at] if other is not part)
            if less and _room_of_parts(p, node, chosen, [*going[:at], less, *going[at + 1 :]]) >= have + gain:
                going[at] = less
    return Option(p, node, tuple(chosen), tuple(going), gain)


def _lightest(p: Preemptor, node: str, workers: int, staying: Sequence[Allocation]) -> list[Allocation]:
    """Return the jobs of a node with the fewest GPUs whose going makes room; empty if there are none."""
    here = [a for a in p.cluster.running.values() if a.on(node) and a.id not in p.cluster.terminating]
    able = [a for a in here if _may_move(p, a) and a not in staying]
    able.sort(key=lambda a: (not a.fresh, a.amount, order(p, a)))
    if not able or _room(p, node, able) < workers:
        return []
    for allocation in able:
        if _room(p, node, [allocation]) >= workers:
            return [allocation]
    chosen: list[Allocation] = []
    for allocation in able:
        chosen.append(allocation)
        if _room(p, node, chosen) >= workers:
            break
    for allocation in chosen[:]:
        fewer = [other for other in chosen if other is not allocation]
        if _room(p, node, fewer) >= workers:
            chosen = fewer
    return chosen


def _may_move(p: Preemptor, job: Allocation) -> bool:
    workload = job.workload
    if job.fresh:
        return True
    if workload.non_preemptible or workload.kind != "job" or workload.state == "checkpointing" or job.fixed:
        return False
    return workload.started_at is not None and not is_protected(p.cluster, workload)


def _room(p: Preemptor, node: str, gone: Sequence[Allocation]) -> int:
    return room_on(p, node, p.cluster.free_later(node), [stopped(allocation) for allocation in gone])


def _room_of_parts(
    p: Preemptor, node: str, chosen: Sequence[Allocation], going: Sequence[Sequence[WorkerPlacement]]
) -> int:
    free = p.cluster.free_later(node)
    devices, cpu, memory, pods = list(free.devices), free.cpu, free.memory, free.pods
    for allocation, parts in zip(chosen, going, strict=True):
        for part in parts:
            cpu, memory, pods = cpu + allocation.need.cpu, memory + allocation.need.memory, pods + 1
            for at in part.devices:
                devices[at] += part.milli_per_device
    return FreeResources(devices, cpu, memory, pods).workers(p.need)


def _try(p: Preemptor, options: Sequence[Option]) -> Rearrangement | Allocation | None:
    """Return the moves that these options come to, the job that has nowhere to go, or None if they are not enough."""
    trial = p.cluster.copy()
    going: dict[str, tuple[Allocation, list[WorkerPlacement]]] = {}
    for option in options:
        for allocation, parts in zip(option.chosen, option.going, strict=True):
            going.setdefault(allocation.id, (allocation, []))[1].extend(parts)
    for allocation, leaving in going.values():
        trial.terminating.add(allocation.id)
        stays = [part for part in allocation.parts if part not in leaving]
        if stays:
            trial.nominate(allocation.workload, stays)
    place = find(trial, p.pool, p.need, True)
    if not place:
        return None
    trial.nominate(p.workload, place)
    moves = []
    for allocation, leaving in sorted(going.values(), key=lambda item: (-item[0].amount, item[0].id)):
        to = _target(trial, allocation, leaving)
        if not to:
            return allocation
        trial.nominate(allocation.workload, to)
        moves.append((allocation, to))
    return Rearrangement(tuple(moves), place)


def _target(trial: Cluster, job: Allocation, going: Sequence[WorkerPlacement]) -> tuple[WorkerPlacement, ...]:
    """Return where a job goes on: its other workers stay, these go to what is free now."""
    new = find(trial, job.pool, replace(job.need, min_workers=len(going)))
    if not new:
        return ()
    workers = sorted(part.worker for part in going)
    relocated = [part._replace(worker=worker) for part, worker in zip(new, workers, strict=True)]
    stays = [part for part in job.parts if part not in going]
    return tuple(sorted([*stays, *relocated], key=lambda part: part.worker))
