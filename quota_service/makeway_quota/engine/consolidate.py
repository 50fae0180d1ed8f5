"""Who moves over: jobs that restart elsewhere, so that scattered free GPUs become one block, or blocks for a gang."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .place import allowed, find
from .state import GPU
from .victims import Seeker
from .world import NodeState, Part, Tenancy, hosts

_TRIES = 24
"""So many nodes are tried, the cheapest first."""
_GANG_TRIES = 6
"""So many sets of nodes are tried for a gang: each without the node that proved impossible before."""
_MOST_MOVES = 200
"""Nobody waits for more jobs than this to move over."""


@dataclass(frozen=True, slots=True)
class Moving:
    """One job and where it goes."""

    tenancy: Tenancy
    to: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Who moves, and where the seeker then starts. Of those whom this plan starts, only the place changes."""

    moves: tuple[Moving, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Option:
    """Whose moving off a node makes room for `gain` more workers."""

    cost: float
    orders: list[tuple[object, ...]]
    node: NodeState
    chosen: list[Tenancy]
    gain: int

    @property
    def key(self) -> tuple[object, ...]:
        return self.cost, self.orders, self.node.position


def consolidate(seeker: Seeker) -> Rearrangement | None:
    """Move jobs so that the seeker fits and nobody is stopped; None (and nothing changed) if that cannot be."""
    cluster, pool, need = seeker.cluster, seeker.pool, seeker.need
    if not (cluster.settings.consolidation and pool.pool.consolidation):
        return None
    if pool.free < seeker.amount or not allowed(cluster, seeker.account, pool, seeker.amount, True):
        return None
    nodes = [node for node in pool.nodes if node.suits(need)]
    if need.least == 1:
        return _for_one_worker(seeker, nodes)
    options = [option for node in nodes if node.guests and (option := _option(seeker, node)) is not None]
    options.sort(key=lambda option: option.key)
    return _for_a_gang(seeker, options, need.least - sum(node.workers(need, True) for node in nodes))


def _for_one_worker(seeker: Seeker, nodes: list[NodeState]) -> Rearrangement | None:
    """Make room on the node where that moves the fewest GPUs; who turns out to have nowhere to go stays."""
    unseen = sorted([(_least(seeker, node), node.position) for node in nodes if node.guests], reverse=True)
    options: list[_Option] = []
    stuck: dict[int, list[Tenancy]] = {}
    for _ in range(_TRIES):
        while unseen and (not options or unseen[-1][0] <= options[0].cost):
            found = _option(seeker, seeker.pool.nodes[unseen.pop()[1]])
            if found is not None:
                insort(options, found, key=lambda each: each.key)
        if not options:
            break
        option = options.pop(0)
        done = _try(seeker, option.chosen)
        if isinstance(done, Rearrangement):
            return done
        if done is not None:
            staying = stuck.setdefault(option.node.position, [])
            staying.append(done)
            other = _option(seeker, option.node, staying)
            if other is not None:
                insort(options, other, key=lambda each: each.key)
    return None


def _for_a_gang(seeker: Seeker, options: list[_Option], missing: int) -> Rearrangement | None:
    """Make room for as many workers as are missing, on the nodes where that moves the fewest GPUs a worker."""
    for _ in range(_GANG_TRIES):
        chosen = _enough(options, missing)
        moving = [tenancy for option in chosen for tenancy in option.chosen]
        if not moving or len(moving) > _MOST_MOVES:
            return None
        done = _try(seeker, moving)
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


def _may_move(seeker: Seeker, tenancy: Tenancy) -> bool:
    victim = tenancy.workload
    if tenancy.leaving or (len(tenancy.parts) != 1 and len({part.node.position for part in tenancy.parts}) != 1):
        return False
    if tenancy.fresh or victim.firm or victim.kind != "job":
        return tenancy.fresh
    profile = seeker.cluster.profiles.get(victim.profile)
    young = victim.started_at is None or (
        profile is not None and seeker.cluster.now - victim.started_at < profile.min_runtime
    )
    return not young


def _least(seeker: Seeker, node: NodeState) -> int:
    """Give the milli-GPUs that must move off a node at least: what is in use on the devices that are needed."""
    missing = seeker.need.whole - node.whole_future
    if missing <= 0 or any(tenancy.fresh for tenancy in node.guests.values()):
        return 0
    return sum(sorted([GPU - left for left in node.future if left < GPU])[:missing])


def _option(seeker: Seeker, node: NodeState, staying: Sequence[Tenancy] = ()) -> _Option | None:
    have = node.workers(seeker.need, True)
    chosen = _lightest(seeker, node, have + 1, staying)
    if not chosen:
        return None
    gain = have + 1
    while gain < seeker.need.least and _room(seeker, node, chosen, gain + 1):
        gain += 1
    cost = sum(t.amount for t in chosen if not t.fresh) / (gain - have)
    return _Option(cost, sorted(seeker.order(t) for t in chosen), node, chosen, gain - have)


def _lightest(seeker: Seeker, node: NodeState, workers: int, staying: Sequence[Tenancy]) -> list[Tenancy]:
    """Choose the jobs of a node with the fewest GPUs whose going makes room; empty if there are none."""
    able = [t for t in node.guests.values() if _may_move(seeker, t) and t not in staying]
    if not able or not _room(seeker, node, able, workers):
        return []
    able.sort(key=lambda t: (not t.fresh, t.amount, seeker.order(t)))
    for tenancy in able:
        if _room(seeker, node, [tenancy], workers):
            return [tenancy]
    chosen: list[Tenancy] = []
    for tenancy in able:
        chosen.append(tenancy)
        if _room(seeker, node, chosen, workers):
            break
    for tenancy in chosen[:]:
        fewer = [t for t in chosen if t is not tenancy]
        if _room(seeker, node, fewer, workers):
            chosen = fewer
    return chosen


def _room(seeker: Seeker, node: NodeState, gone: Sequence[Tenancy], workers: int) -> bool:
    left, cpu, memory = list(node.future), node.cpu_future, node.memory_future
    for tenancy in gone:
        for part in tenancy.parts:
            cpu += tenancy.need.cpu
            memory += tenancy.need.memory
            for at in part.devices:
                left[at] += part.milli
    return hosts(seeker.need, left, left.count(GPU), cpu, memory) >= workers


def _try(seeker: Seeker, chosen: Sequence[Tenancy]) -> Rearrangement | Tenancy | None:
    """Move these; give the one that has nowhere to go (and nothing changed), None if that would not be enough."""
    cluster, pool = seeker.cluster, seeker.pool
    for tenancy in chosen:
        cluster.leave(tenancy)
    parts = find(pool, seeker.need, True)
    moves: list[Moving] = []
    stuck: Tenancy | None = None
    if parts:
        cluster.claim(seeker.workload, seeker.need, parts)
        for tenancy in sorted(chosen, key=lambda t: (-t.amount, t.workload.id)):
            to = _target(tenancy)
            if not to:
                stuck = tenancy
                break
            cluster.claim(tenancy.workload, tenancy.need, to)
            moves.append(Moving(tenancy, to))
        cluster.unclaim(seeker.workload)
    if parts and stuck is None:
        return Rearrangement(tuple(moves), parts)
    for moving in moves:
        cluster.unclaim(moving.tenancy.workload)
    for tenancy in chosen:
        cluster.stay(tenancy)
    return stuck


def _target(tenancy: Tenancy) -> tuple[Part, ...]:
    """Find free GPUs, now, for a job that moves; an elastic gang keeps its number of workers."""
    return find(tenancy.pool, replace(tenancy.need, least=len(tenancy.parts)))
