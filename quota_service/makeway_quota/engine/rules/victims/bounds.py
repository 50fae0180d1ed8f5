"""Bound from below what room on each node costs, for all preemptors of one pool with the same request.

Read by the ranking of nodes (ranking.py), which scores only nodes whose bound is not above the best set found.
A bound counts every preemptible workload as a candidate whose team may be; what the preemptor may evict is a subset,
so the best set of a node is never better than its bound. Follows the nodes that are touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from ...index.cluster import Cluster
from ...index.hosts import shortage_on
from ...index.nodes import Allocation, NodeState, PoolState, WorkerPlacement
from ...request import Need
from ...snapshot import GPU, STARTING, Workload
from .preemptor import SEVERAL_POOLS, WITHOUT_GPUS, Team, lost_work
from .sets import STOP, Key, extra_workers

_MAX_ENTRIES = 64
"""The number of requests whose bounds are kept from one decision to the next."""
_MAX_SHARES = 4
"""The number of different shares of the teams for which the keys of the nodes are kept."""

OrderWithoutShare = tuple[int, int, int, float, float, float, str]
"""The order of a candidate without its team's share, which moves all candidates of the team alike; kind first."""
_STAYS, _SHRINKS, _FRESH = range(3)


class Candidate(NamedTuple):
    """A preemptible workload on a node. `soft`: an elastic gang may shrink, a start of this very plan is withdrawn, and
    what has not run yet loses nothing."""

    team: Team
    order: OrderWithoutShare
    amount: int
    soft: int


class NodeBound(NamedTuple):
    """What room on one node costs at least.

    `used`: the milli-GPUs in use on the devices that are missing; `min_victims`: the number of victims that hold as
    many.
    """

    used: int
    min_victims: int
    candidates: tuple[Candidate, ...]
    only: tuple[Team, Key] | None = None
    """The team and the plain key where all candidates are of one team, in one pool."""
    beside: bool = False
    """Whether there are candidates on other nodes of the host."""

    def plain_key(self, team: str) -> Key:
        """Return the bound where only this team may be evicted, without its share (see ranking.py)."""
        return _plain_key(self.used, self.min_victims, [c for c in self.candidates if c.team == team])

    def gpus_of(self, candidates: Sequence[Candidate]) -> int:
        """Return the milli-GPUs that the smallest of these hold, as many as have to leave at least."""
        amounts = [c.amount for c in candidates]
        return sum(sorted(amounts)[: self.min_victims]) if self.beside else min(amounts)

    def key(self, shares: Mapping[Team, int]) -> Key | None:
        """Return the bound, given the shares of the teams that may be evicted; None if these are too few."""
        candidates = [c for c in self.candidates if c.team in shares]
        if len(candidates) < self.min_victims:
            return None
        soft = max([c.soft for c in candidates])
        if soft:
            return False, 0 if soft == _FRESH else self.used, 0, [], 0, [], []
        gpus = max(self.used, self.gpus_of(candidates))
        if 0 in [c.amount for c in candidates]:
            return True, gpus, 0, [], 0, [], []
        orders = [(c.order[0], c.order[1], -shares[c.team], *c.order[2:]) for c in candidates]
        orders = _smallest(orders, self.min_victims)
        return True, gpus, 0, [order[:4] for order in orders], len(orders), orders, []


class VictimBounds:
    """The bounds of one pool for one request, by position of the node; None where no eviction makes room."""

    def __init__(self, cluster: Cluster, pool: PoolState, need: Need) -> None:
        self.cluster, self.pool, self.need = cluster, pool, need
        self._known: dict[int, NodeBound | None] = {}
        self._candidates: dict[str, tuple[Allocation, Workload, tuple[WorkerPlacement, ...], bool, Candidate]] = {}
        """Workload to its record, and what that was made from."""
        self._keys: dict[tuple[tuple[Team, int], ...], dict[int, Key | None]] = {}
        """Shares to the keys of nodes; the shares that were read longest ago first."""
        self._touched, self._moved, self._now = len(pool.touched), len(pool.moved), cluster.now

    def at(self, position: int) -> NodeBound | None:
        """Return the bound of the node at a position; `catch_up` has been called since anything changed."""
        if position in self._known:
            return self._known[position]
        bound = self._known[position] = self._bound(self.pool.nodes[position])
        return bound

    def keys(self, shares: Mapping[Team, int], positions: Iterable[int]) -> Iterator[tuple[Key, int]]:
        """Iterate over the bounds of the nodes at these positions, without those that have too few candidates."""
        share_items = tuple(shares.items())
        known = self._keys[share_items] = self._keys.pop(share_items, {})
        if len(self._keys) > _MAX_SHARES:
            del self._keys[next(iter(self._keys))]
        for position in positions:
            if position not in known:
                bound = self.at(position)
                known[position] = bound.key(shares) if bound is not None else None
            bound_key = known[position]
            if bound_key is not None:
                yield bound_key, position

    def _forget(self, position: int) -> None:
        self._known.pop(position, None)
        for known in self._keys.values():
            known.pop(position, None)

    def catch_up(self) -> None:
        """Drop the bounds of nodes that were touched since the last call."""
        pool, cluster = self.pool, self.cluster
        if self._now != cluster.now and cluster.settings.victim_order == "cheapest":
            self._candidates.clear()
            self._keys.clear()
            self._known.clear()  # what an eviction would lose grows with time
        for position in pool.touched[self._touched :]:
            self._forget(position)
        for node in pool.moved[self._moved :]:
            self._forget(node.position)
        self._touched, self._moved, self._now = len(pool.touched), len(pool.moved), cluster.now

    def restart(self) -> None:
        """Follow the pool's lists of touched nodes from their beginning, once they are cleared."""
        self._touched = self._moved = 0

    def _bound(self, node: NodeState) -> NodeBound | None:
        if not (node.allocations or node.host_peers) or not node.suits(self.need):
            return None
        beside = self._beside(node) if node.host_peers else ()
        allocations = [a for a in self.cluster.evictable_on(node) if not a.workload.non_preemptible]
        missing = self.need.whole_devices - node.whole_free_later
        min_victims = _min_victims_with_devices(node, allocations, missing)
        if not (allocations or beside) or (missing > 0 and min_victims > len(allocations)):
            return None
        used = sorted([GPU - milli for milli in node.free_later if milli < GPU])[:missing] if missing > 0 else ()
        if node.overfull:
            used = ()  # one worker holds all devices, so that what is in use on them is less than their sum
        candidates = tuple([self._candidate(allocation) for allocation in allocations])
        if beside:
            return self._with_beside(
                node, sum(used), max(min_victims, self._min_victims_on_host(node)), (*candidates, *beside)
            )
        team = candidates[0].team
        if team == WITHOUT_GPUS or not isinstance(team, str) or len({c.team for c in candidates}) > 1:
            return NodeBound(sum(used), min_victims, candidates)
        return NodeBound(sum(used), min_victims, candidates, (team, _plain_key(sum(used), min_victims, candidates)))

    def _with_beside(
        self, node: NodeState, used: int, min_victims: int, candidates: tuple[Candidate, ...]
    ) -> NodeBound | None:
        """Return the bound of a node with candidates on other nodes of its host; None if all of them are too few."""
        if min_victims > len(candidates):
            return None
        bound = NodeBound(used, min_victims, candidates, None, True)
        teams = {c.team for c in candidates}
        (team,) = teams if len(teams) == 1 else (SEVERAL_POOLS,)
        if team == SEVERAL_POOLS or not isinstance(team, tuple) or team[1] == WITHOUT_GPUS:
            return bound
        return bound._replace(only=(team, _plain_key(max(used, bound.gpus_of(candidates)), min_victims, candidates)))

    def _min_victims_on_host(self, node: NodeState) -> int:
        """Return the least number of workloads on a node's host that hold the CPU, memory and pods that are missing.

        More than there are, if all of them hold less than that.
        """
        need, held = self.need, dict[str, list[int]]()
        for host_node in node.host:
            for allocation in self.cluster.evictable_on(host_node):
                if allocation.workload.non_preemptible:
                    continue
                pods = sum([part.node is host_node for part in allocation.parts])
                known = held.setdefault(allocation.workload.id, [0, 0, 0])
                more = pods * allocation.need.cpu, pods * allocation.need.memory, pods
                held[allocation.workload.id] = [a + b for a, b in zip(known, more, strict=True)]
        cpu = need.cpu - node.cpu_free_later if need.cpu else 0  # an overbooked node has room for work that needs none
        memory = need.memory - node.memory_free_later if need.memory else 0
        missing = cpu, memory, 1 - node.pods_free_later
        return max(
            _min_count_with_sum(lacks, [amounts[at] for amounts in held.values()]) for at, lacks in enumerate(missing)
        )

    def _beside(self, node: NodeState) -> list[Candidate]:
        """Return the candidates on other nodes of a node's host that hold what it has too little of."""
        shortage = shortage_on(node, self.need)
        if shortage is None:
            return []
        evictable = [allocation for other in node.host_peers for allocation in self.cluster.evictable_on(other)]
        holders = [a for a in evictable if not a.workload.non_preemptible and shortage.is_held_by(a.need)]
        return [self._candidate_beside(allocation) for allocation in holders]

    def _candidate_beside(self, allocation: Allocation) -> Candidate:
        candidate = self._candidate(allocation)
        if allocation.shares:
            return candidate._replace(team=SEVERAL_POOLS, soft=_FRESH)
        pool = allocation.pool.pool.name
        return candidate._replace(team=(pool, allocation.workload.team if allocation.milli_gpus else WITHOUT_GPUS))

    def _candidate(self, allocation: Allocation) -> Candidate:
        """Return a candidate's record, kept while its allocation is the same."""
        known = self._candidates.get(allocation.workload.id)
        if known is not None:
            of, workload, parts, started_in_plan, candidate = known
            unchanged = workload is of.workload and parts is of.parts and started_in_plan is of.started_in_plan
            if of is allocation and unchanged:
                return candidate
        candidate = self._record(allocation)
        same = allocation, allocation.workload, allocation.parts, allocation.started_in_plan, candidate
        self._candidates[allocation.workload.id] = same
        if len(self._candidates) > 2 * len(self.cluster.allocations) + _MAX_ENTRIES:
            self._candidates.clear()  # most of them are gone
        return candidate

    def _record(self, allocation: Allocation) -> Candidate:
        """Return the order of protection (rule 5.3) without the share; a start that is not dated comes first."""
        cluster, victim = self.cluster, allocation.workload
        priority = cluster.account(victim).team.priority
        order = (
            STOP,
            victim.protected_with(priority) if victim.state == STARTING else priority,
            cluster.priority(victim),
            lost_work(cluster, allocation) if cluster.settings.victim_order == "cheapest" else 0,
            -inf if victim.running_since is None else -victim.running_since,
            -victim.submitted_at,
            victim.id,
        )
        soft = _SHRINKS if extra_workers(allocation) else _STAYS
        if allocation.started_in_plan or victim.state == STARTING:
            soft = _FRESH
        return Candidate(victim.team if allocation.milli_gpus else WITHOUT_GPUS, order, allocation.milli_gpus, soft)


def bounds_of(cluster: Cluster, pool: PoolState, need: Need) -> VictimBounds:
    """Return the bounds for a request, up to date; those that were read longest ago are dropped first."""
    bounds: VictimBounds = pool.bounds.pop(need, None) or VictimBounds(cluster, pool, need)
    pool.bounds[need] = bounds
    if len(pool.bounds) > _MAX_ENTRIES:
        del pool.bounds[next(iter(pool.bounds))]
    bounds.catch_up()
    return bounds


def _plain_key(used: int, min_victims: int, candidates: Sequence[Candidate]) -> Key:
    soft = max([c.soft for c in candidates])
    if soft:
        return False, 0 if soft == _FRESH else used, 0, (), 0, (), ()
    gpus = max(used, min([c.amount for c in candidates]))
    if min_victims == 1:
        order = min([c.order for c in candidates])
        return True, gpus, 0, (order[:3],), 1, (order,), ()
    orders = _smallest([c.order for c in candidates], min_victims)
    return True, gpus, 0, tuple([order[:3] for order in orders]), len(orders), tuple(orders), ()


def _smallest(orders: list[Any], count: int) -> list[Any]:
    """Return the smallest orders, so many of them, in descending order: no set of as many members is before them."""
    return [min(orders)] if count == 1 else sorted(orders)[:count][::-1]


def _min_count_with_sum(missing: int, amounts: Iterable[int]) -> int:
    """Return the least number of these amounts whose sum is what is missing; more than there are if all are less."""
    count = 0
    for amount in sorted(amounts, reverse=True):
        if missing <= 0:
            break
        missing -= amount
        count += 1
    return count + (missing > 0)


def _min_victims_with_devices(node: NodeState, allocations: list[Allocation], missing: int) -> int:
    """Return the least number of workloads on as many devices as are missing; more than there are if all have fewer."""
    if missing <= 0 or (missing == 1 and any(a.milli_gpus for a in allocations)):
        return 1
    sizes = [sum([len(p.devices) for p in a.parts if p.node is node]) for a in allocations]
    if missing <= max(sizes, default=0):
        return 1
    sizes.sort(reverse=True)
    for count, size in enumerate(sizes, 1):
        missing -= size
        if missing <= 0:
            return count
    return len(allocations) + 1
