"""Who moves over: jobs that restart elsewhere, so that scattered free GPUs become one block, or blocks for a gang."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..index.nodes import Allocation, NodeState, Part, hosts
from ..placement.fit import allowed, find
from ..state import GPU
from .victims import Preemptor

_TRIES = 24
"""So many nodes are tried, the cheapest first."""
_GANG_TRIES = 6
"""So many sets of nodes are tried for a gang: each without the node that proved impossible before."""
_MOST_MOVES = 200
"""Nobody waits for more jobs than this to move over."""


@dataclass(frozen=True, slots=True)
class Moving:
    """One job and where it goes."""

    allocation: Allocation
    to: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Who moves, and where the preemptor then starts. Of those whom this plan starts, only the place changes."""

    moves: tuple[Moving, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Option:
    """Whose moving off a node makes room for `gain` more workers."""

    cost: float
    orders: list[tuple[object, ...]]
    node: NodeState
    chosen: list[Allocation]
    gain: int

    @property
    def key(self) -> tuple[object, ...]:
        return self.cost, self.orders, self.node.position


def consolidate(preemptor: Preemptor) -> Rearrangement | None:
    """Move jobs so that the preemptor fits and nobody is stopped; None (and nothing changed) if that cannot be."""
    cluster, pool, need = preemptor.cluster, preemptor.pool, preemptor.need
    if not (cluster.settings.consolidation and pool.pool.consolidation):
        return None
    if pool.free < preemptor.amount or not allowed(cluster, preemptor.account, pool, preemptor.amount, True):
        return None
    nodes = [node for node in pool.nodes if node.suits(need)]
    if need.least == 1:
        return _for_one_worker(preemptor, nodes)
    options = [option for node in nodes if node.allocations and (option := _option(preemptor, node)) is not None]
    options.sort(key=lambda option: option.key)
    return _for_a_gang(preemptor, options, need.least - sum(node.workers(need, True) for node in nodes))


def _for_one_worker(preemptor: Preemptor, nodes: list[NodeState]) -> Rearrangement | None:
    """Make room on the node where that moves the fewest GPUs; who rounds out to have nowhere to go stays."""
    unseen = sorted([(_least(preemptor, node), node.position) for node in nodes if node.allocations], reverse=True)
    options: list[_Option] = []
    stuck: dict[int, list[Allocation]] = {}
    for _ in range(_TRIES):
        while unseen and (not options or unseen[-1][0] <= options[0].cost):
            found = _option(preemptor, preemptor.pool.nodes[unseen.pop()[1]])
            if found is not None:
                insort(options, found, key=lambda each: each.key)
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
                insort(options, other, key=lambda each: each.key)
    return None


def _for_a_gang(preemptor: Preemptor, options: list[_Option], missing: int) -> Rearrangement | None:
    """Make room for as many workers as are missing, on the nodes where that moves the fewest GPUs a worker."""
    for _ in range(_GANG_TRIES):
        chosen = _enough(options, missing)
        moving = [allocation for option in chosen for allocation in option.chosen]
        if not moving or len(moving) > _MOST_MOVES:
            return None
        done = _try(preemptor, moving)
        if done is None or isinstance(done, Rearrangement):
            return done
        options = [option for option in options if done not in option.chosen]
    return None


def _enough(options: list[_Option], missing: int) -> list[_Option]:
    """Take the first options until they are enough, without those that turn out to be spare; none if they are not."""
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
    if allocation.terminating or (
        len(allocation.parts) != 1 and len({part.node.position for part in allocation.parts}) != 1
    ):
        return False
    if allocation.fresh or victim.non_preemptible or victim.kind != "job":
        return allocation.fresh
    profile = preemptor.cluster.profiles.get(victim.profile)
    young = victim.started_at is None or (
        profile is not None and preemptor.cluster.now - victim.started_at < profile.min_runtime
    )
    return not young


def _least(preemptor: Preemptor, node: NodeState) -> int:
    """Give the milli-GPUs that must move off a node at least: what is in use on the devices that are needed."""
    missing = preemptor.need.whole - node.whole_future
    if missing <= 0 or any(allocation.fresh for allocation in node.allocations.values()):
        return 0
    return sum(sorted([GPU - left for left in node.future if left < GPU])[:missing])


def _option(preemptor: Preemptor, node: NodeState, staying: Sequence[Allocation] = ()) -> _Option | None:
    have = node.workers(preemptor.need, True)
    chosen = _lightest(preemptor, node, have + 1, staying)
    if not chosen:
        return None
    gain = have + 1
    while gain < preemptor.need.least and _room(preemptor, node, chosen, gain + 1):
        gain += 1
    cost = sum(t.amount for t in chosen if not t.fresh) / (gain - have)
    return _Option(cost, sorted(preemptor.order(t) for t in chosen), node, chosen, gain - have)


def _lightest(preemptor: Preemptor, node: NodeState, workers: int, staying: Sequence[Allocation]) -> list[Allocation]:
    """Choose the jobs of a node with the fewest GPUs whose going makes room; empty if there are none."""
    able = [t for t in node.allocations.values() if _may_move(preemptor, t) and t not in staying]
    if not able or not _room(preemptor, node, able, workers):
        return []
    able.sort(key=lambda t: (not t.fresh, t.amount, preemptor.order(t)))
    for allocation in able:
        if _room(preemptor, node, [allocation], workers):
            return [allocation]
    chosen: list[Allocation] = []
    for allocation in able:
        chosen.append(allocation)
        if _room(preemptor, node, chosen, workers):
            break
    for allocation in chosen[:]:
        fewer = [t for t in chosen if t is not allocation]
        if _room(preemptor, node, fewer, workers):
            chosen = fewer
    return chosen


def _room(preemptor: Preemptor, node: NodeState, gone: Sequence[Allocation], workers: int) -> bool:
    left, cpu, memory = list(node.future), node.cpu_future, node.memory_future
    for allocation in gone:
        for part in allocation.parts:
            cpu += allocation.need.cpu
            memory += allocation.need.memory
            for at in part.devices:
                left[at] += part.milli
    return hosts(preemptor.need, left, left.count(GPU), cpu, memory) >= workers


def _try(preemptor: Preemptor, chosen: Sequence[Allocation]) -> Rearrangement | Allocation | None:
    """Move these; give the one that has nowhere to go (and nothing changed), None if that would not be enough."""
    cluster, pool = preemptor.cluster, preemptor.pool
    for allocation in chosen:
        cluster.leave(allocation)
    parts = find(pool, preemptor.need, True)
    moves: list[Moving] = []
    stuck: Allocation | None = None
    if parts:
        cluster.nominate(preemptor.workload, preemptor.need, parts)
        for allocation in sorted(chosen, key=lambda t: (-t.amount, t.workload.id)):
            to = _target(allocation)
            if not to:
                stuck = allocation
                break
            cluster.nominate(allocation.workload, allocation.need, to)
            moves.append(Moving(allocation, to))
        cluster.withdraw_nomination(preemptor.workload)
    if parts and stuck is None:
        return Rearrangement(tuple(moves), parts)
    for moving in moves:
        cluster.withdraw_nomination(moving.allocation.workload)
    for allocation in chosen:
        cluster.stay(allocation)
    return stuck


def _target(allocation: Allocation) -> tuple[Part, ...]:
    """Find free GPUs, now, for a job that moves; an elastic gang keeps its number of workers."""
    return find(allocation.pool, replace(allocation.need, least=len(allocation.parts)))
