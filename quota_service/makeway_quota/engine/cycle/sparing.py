"""Spare victims that a later decision of the same plan made superfluous (rule 5.4, invariant I4).

Called once the rounds of admission have come to rest. Victims are looked at one by one, the most protected first: one
is spared if every nomination that this plan made, in any pool, still has a place with it running on. A victim that was
spared can be evicted once more for another workload, and is looked at again then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, permutations

from ..index.cluster import Cluster
from ..index.devices import hosts
from ..index.groups import WorkloadGroup
from ..index.nodes import Allocation, NodeState, PoolState, WorkerPlacement, placement_of
from ..index.nominations import fits_later
from ..placement.fit import find_placement, within_limits
from ..placement.spare import Spare
from ..placement.static_quotas import StaticQuotas
from ..placement.together import MAX_NODES, Ask, Room, Search, WorkerOnNode, linked
from ..plan_builder import PlanBuilder
from ..request import Need
from ..rules.victims.preemptor import order_of
from ..rules.victims.sets import stays
from ..snapshot import GPU, Workload

_MAX_REPLACED = 8
"""Up to so many nominations of a pool are all withdrawn and placed again to spare one victim."""
_MAX_PERMUTED = 3
"""Up to so many nominations are placed again in every order."""
_MAX_PLACED = 64
"""So many placements are tried, over all pools of the nominations, to place them again."""
_Nomination = tuple[Workload, WorkloadGroup, tuple[WorkerPlacement, ...]]
Eviction = tuple[str, str, int]
"""A victim, its preemptor, and the number of workers that go on."""


def cancel_needless_evictions(builder: PlanBuilder, withdrawn_evictions: set[Eviction]) -> bool:
    """Spare each victim of the plan that no nomination needs, once from each eviction; return whether any was."""
    cluster = builder.cluster
    evictions = [(eviction.id, eviction.preemptor, 0) for eviction in builder.evicted.values()]
    evictions += [(move.id, move.preemptor, len(move.to)) for move in builder.moved.values()]
    victims = [
        (cluster.allocations[eviction[0]], eviction) for eviction in evictions if eviction not in withdrawn_evictions
    ]
    able = [(victim, eviction) for victim, eviction in victims if _may_be_needless(builder, victim)]
    able.sort(key=lambda item: order_of(cluster, item[0], item[0].pool), reverse=True)
    before = len(withdrawn_evictions)
    known = _PlannedState(builder)
    for victim, eviction in able:
        if _cancel_if_needless(known, victim):
            withdrawn_evictions.add(eviction)
    return len(withdrawn_evictions) > before


def cancel_moves_to_same_place(builder: PlanBuilder) -> None:
    """Cancel the moves of victims back to the devices that they hold: the plan's last decisions left these to them."""
    cluster = builder.cluster
    for move in [move for move in builder.moved.values() if move.rule != "shrink"]:
        victim, target = cluster.allocations[move.id], cluster.nominations.get(move.id)
        if target is not None and set(target.parts) == set(victim.parts):
            cluster.withdraw_nomination(victim.workload)
            cluster.restore(victim)
            builder.cancel_eviction(victim.workload)


def _may_be_needless(builder: PlanBuilder, victim: Allocation) -> bool:
    """Whether its pools could have as many free GPUs in the future as the victim, or one more worker of it, would hold.

    With the nominations elsewhere that may be placed in another pool.
    """
    target = builder.cluster.nominations.get(victim.workload.id)
    held = {pool.pool.name: 0 for pool in victim.pools}
    for part in victim.parts:
        if stays(victim, part):
            held[part.node.pool.pool.name] += part.milli_per_device * len(part.devices)
    if target is not None and target.pool in victim.pools:
        own = victim.pool.pool.name
        held = {own: min(held[own], target.milli_gpus + victim.need.gpus) - target.milli_gpus}
    pools = builder.cluster.pools
    for name, amount in held.items():
        free_later = pools[name].free_later
        if free_later < amount and free_later + _movable(builder, pools[name], target) < amount:
            return False
    return True


def _movable(builder: PlanBuilder, pool: PoolState, target: Allocation | None) -> int:
    """Return the milli-GPUs of a pool that this plan nominated for workloads that may have room in another pool.

    `target`: where a victim moves to; it is free if the victim stays.
    """
    if len(builder.cluster.pools) == 1:
        return 0
    nominations = _nominations(builder)
    room = {name: other.free_later for name, other in builder.cluster.pools.items()}
    if target is not None:
        room[target.pool.pool.name] += target.milli_gpus
    for _, group, parts in nominations:
        room[parts[0].node.pool.pool.name] += group.total  # nominations of other pools may be placed anew, too
    mine = [group for _, group, parts in nominations if parts[0].node.pool is pool]
    movable = [q for q in mine if any(other is not pool and room[other.pool.name] >= q.total for other in q.pools)]
    return sum(group.total for group in movable)


class _PlannedState:
    """The nominations of this plan by node, and their number by pool; read anew once a victim was spared."""

    def __init__(self, builder: PlanBuilder) -> None:
        self.builder, self.cluster = builder, builder.cluster
        self.all: list[_Nomination] = []
        self._by_node: dict[str, list[int]] = {}
        self._by_pool: dict[str, int] = {}
        self._need: Need | None = None
        """The request of all nominations, if it is the same, and each has its least number of workers."""
        self._parts: dict[str, list[WorkerPlacement]] = {}
        """Their workers on each node; only with one request."""
        self._room: dict[str, int] = {}
        """How many workers of that request still fit on each node of their pools, beside all of these."""
        self._all_room = 0
        self.search = builder.search
        self.static = StaticQuotas(self.cluster) if self.cluster.ledger.unlent_lines else None
        self.stale = True
        """Whether they have to be read before the next question."""

    def read(self) -> None:
        """Read the nominations, unless they are known."""
        if not self.stale:
            return
        self.stale = False
        self.all, self._by_node, self._by_pool = _nominations(self.builder), {}, {}
        for at, (_, _, parts) in enumerate(self.all):
            for name in {part.node.node.name for part in parts}:
                self._by_node.setdefault(name, []).append(at)
            pool = parts[0].node.pool.pool.name
            self._by_pool[pool] = self._by_pool.get(pool, 0) + 1
        self._read_room()
        if self.static is not None:
            self.static.read(self.builder.started)

    def _read_room(self) -> None:
        self._need, self._parts = None, {}
        needs = {group.need for _, group, _ in self.all}
        if len(needs) != 1 or any(len(parts) != group.need.min_workers for _, group, parts in self.all):
            return
        self._need = need = needs.pop()
        for part in chain.from_iterable(parts for _, _, parts in self.all):
            self._parts.setdefault(part.node.node.name, []).append(part)
        pools = {pool.pool.name: pool for _, group, _ in self.all for pool in group.pools}
        nodes = chain.from_iterable(pool.nodes for pool in pools.values())
        self._room = {node.node.name: node.workers(need, True) for node in nodes if node.suits(need)}
        self._all_room = sum(self._room.values())

    def is_short(self, victim: Allocation, target: Sequence[WorkerPlacement]) -> bool:
        """Whether the nominations have no room beside what a victim keeps, by the number of workers that fit.

        Only known for sure where all request the same. `target`: where the victim was to move. Looks at their hosts
        only, as nothing else has changed since `read`: a large gang has many victims.
        """
        need = self._need
        if self.stale or need is None:
            return False
        nodes = {node.node.name: node for part in (*victim.parts, *target) for node in part.node.host}
        room = self._all_room - sum(self._room.get(name, 0) for name in nodes)
        for name, node in nodes.items():
            if name not in self._room and name not in self._parts:
                continue
            many = sum(len(self._parts.get(other.node.name, ())) for other in node.host)
            devices = list(node.free_later)
            for part in self._parts.get(name, ()):
                for at in part.devices:
                    devices[at] += part.milli_per_device
            cpu, memory = node.cpu_free_later + many * need.cpu, node.memory_free_later + many * need.memory
            room += hosts(need, devices, devices.count(GPU), cpu, memory, node.pods_free_later + many)
        return room < sum(len(self._parts.get(name, ())) for name in nodes)

    def on_hosts_of(self, victim: Allocation) -> list[_Nomination]:
        """Return those on a victim's nodes and others of their hosts, in the order of the decisions."""
        self.read()
        names = {node.node.name for part in victim.parts for node in part.node.host}
        return [self.all[at] for at in sorted({at for name in names for at in self._by_node.get(name, ())})]

    def around(self, victim: Allocation) -> list[_Nomination]:
        """Return all of them, else those in a victim's pools and pools beside; none where these are too many, too."""
        self.read()
        if len(self.all) <= _MAX_REPLACED:
            return self.all
        pools = set(self.cluster.with_peer_pools(victim.pools))
        if sum(self._by_pool.get(pool.pool.name, 0) for pool in pools) > _MAX_REPLACED:
            return []
        return [nomination for nomination in self.all if nomination[2][0].node.pool in pools]


def _cancel_if_needless(known: _PlannedState, victim: Allocation) -> bool:
    builder = known.builder
    cluster = builder.cluster
    if not _may_be_needless(builder, victim):
        return False
    known.read()
    target = cluster.withdraw_nomination(victim.workload)
    cluster.restore(victim)
    if not known.is_short(victim, target) and _try(known, victim):
        builder.cancel_eviction(victim.workload)
        known.stale = True
        return True
    cluster.evict(victim)
    move = builder.moved.get(victim.workload.id)
    if move is not None and move.rule == "shrink":
        return _with_one_more_worker(known, victim, target)
    if target:
        cluster.nominate(victim.workload, victim.need, target)
    return False


def _with_one_more_worker(known: _PlannedState, victim: Allocation, kept: tuple[WorkerPlacement, ...]) -> bool:
    """Keep one more worker of a gang that shrinks, the lowest number first; return whether one could be kept."""
    cluster, kept_on = known.cluster, {part.worker for part in kept}
    able = sorted((part for part in victim.parts if stays(victim, part)), key=lambda part: part.worker)
    kept_any = False
    for candidate in able:
        more = tuple(part for part in able if part is candidate or part.worker in kept_on)
        if candidate.worker in kept_on or len(more) == len(victim.parts):
            continue
        cluster.shrink(victim.workload, victim.need, more)
        if not known.is_short(victim, kept) and _try(known, victim):
            known.stale = True
            kept_on.add(candidate.worker)
            kept_any = True
        cluster.withdraw_nomination(victim.workload)
    parts = tuple(part for part in able if part.worker in kept_on)
    cluster.shrink(victim.workload, victim.need, parts)
    if kept_any:
        known.stale = True
        known.builder.keep_workers(victim, parts)
    return kept_any


@dataclass(slots=True)
class _Nominations:
    """Nominations of this plan that are withdrawn, and then placed again or restored."""

    builder: PlanBuilder
    all: list[_Nomination]

    @property
    def cluster(self) -> Cluster:
        """Return the cluster on trial."""
        return self.builder.cluster

    def withdraw(self) -> None:
        for workload, _, _ in self.all:
            self.cluster.withdraw_nomination(workload)

    def restore(self) -> None:
        for workload, group, parts in self.all:
            self.cluster.withdraw_nomination(workload)
            self.cluster.nominate(workload, group.need, parts)

    def place(self, nominations: Sequence[_Nomination]) -> bool:
        """Nominate the workloads of these nominations again, in their order; False if one has no placement.

        Each gets the first of its pools that leaves room for the others.
        """
        left = _MAX_PLACED

        def placed(at: int) -> bool:
            nonlocal left
            if at == len(nominations):
                return True
            workload, group, old = nominations[at]
            for pool in _pools_for(self.builder, group, old[0].node.pool):
                may = within_limits(self.cluster, group.account, pool, group.total, True)
                parts = find_placement(pool, group.need, True) if may and left else ()
                if not parts:
                    continue
                left -= 1
                self.cluster.nominate(workload, group.need, parts)
                if placed(at + 1):
                    return True
                self.cluster.withdraw_nomination(workload)
            return False

        return placed(0)

    def place_as(self, places: Sequence[Sequence[WorkerOnNode]]) -> bool:
        """Nominate all of them again, each to its places; False if it may not be placed in that pool any more."""
        for (workload, group, old), mine in zip(self.all, places, strict=True):
            nodes = [self.cluster.nodes[place.node] for place in mine]
            pool, need = nodes[0].pool, group.need
            parts = tuple(
                WorkerPlacement(at, node, place.devices, place.milli_per_device)
                for at, (node, place) in enumerate(zip(nodes, mine, strict=True))
            )
            able = pool in _pools_for(self.builder, group, old[0].node.pool)
            if not able or not within_limits(self.cluster, group.account, pool, group.total, True):
                return False
            if need.only_spare and not Spare(pool, need, True).admits(parts):
                return False
            self.cluster.nominate(workload, need, parts)
        return True

    def places(self, search: Search) -> Iterator[Sequence[Sequence[WorkerOnNode]]]:
        """Iterate over places for all of them together, once they are withdrawn: by the pools of each."""
        if not search.steps:
            return
        orders = [[old[0].node.pool, *(p for p in g.pools if p is not old[0].node.pool)] for _, g, old in self.all]
        pools = list(dict.fromkeys(chain.from_iterable(orders)))
        if sum(len(pool.nodes) for pool in pools) > MAX_NODES:
            return
        nodes = [node for pool in pools for node in pool.nodes]
        rooms = list(zip(nodes, linked([_room(node) for node in nodes]), strict=True))
        asks: dict[tuple[Need, str], Ask] = {}
        for need in {group.need: None for _, group, _ in self.all}:
            for pool in pools:
                able = [room for node, room in rooms if node.pool is pool and node.suits(need) and room.workers(need)]
                asks[need, pool.pool.name] = Ask(need, pool.pool.name, able)
        needs = [group.need for _, group, _ in self.all]
        yield from search.combinations(
            [[asks[need, pool.pool.name] for pool in order] for need, order in zip(needs, orders, strict=True)]
        )


def _room(node: NodeState) -> Room:
    free_later = list(node.free_later), node.cpu_free_later, node.memory_free_later, node.pods_free_later
    return Room(node.node.name, node.node.host, *free_later, tuple(node.free))


def _pools_for(builder: PlanBuilder, group: WorkloadGroup, old: PoolState) -> list[PoolState]:
    """Return the pools for a nomination that is placed anew, its present one first.

    In quota, if it is so there; else those in which nothing is held.
    """
    account, total, non_preemptible = group.account, group.total, group.non_preemptible
    able = [p for p in group.pools if total <= account.unreserved(p.pool.name, non_preemptible)]
    if old not in able:
        able = [pool for pool in group.pools if group.may_borrow and pool.pool.name not in builder.holds]
    return [old, *(pool for pool in able if pool is not old)]


def _try(known: _PlannedState, victim: Allocation) -> bool:
    """Place all nominations of this plan beside what a victim keeps; False (nothing changed) if one does not fit."""
    builder, cluster = known.builder, known.cluster
    near = _Nominations(builder, known.on_hosts_of(victim))
    near.withdraw()
    if _overbooked(builder, victim):
        near.restore()
        return False
    moved = []
    for nomination in near.all:
        if fits_later(nomination[2], nomination[1].need):
            cluster.nominate(nomination[0], nomination[1].need, nomination[2])
        else:
            moved.append(nomination)
    if near.place(moved) and not _exceeds(known, victim, near.all):
        return True
    near.restore()
    nominations = known.around(victim)
    if not nominations:
        return False
    every = _Nominations(builder, nominations)
    for order in _orders(nominations, {workload.id for workload, _, _ in moved}):
        every.withdraw()
        if every.place(order) and not _exceeds(known, victim, nominations):
            return True
        every.restore()
    every.withdraw()
    for places in every.places(known.search):
        if every.place_as(places) and not _exceeds(known, victim, nominations):
            return True
        every.withdraw()
    every.restore()
    return False


def _orders(nominations: Sequence[_Nomination], displaced: set[str]) -> Iterator[Sequence[_Nomination]]:
    """Iterate over the orders in which nominations are placed again, each once.

    That of the decisions, the largest workers first, those first whose devices the victim keeps (`displaced`), and the
    most CPU in all first; of few, every other order, too.
    """
    keys: tuple[Callable[[_Nomination], int], ...] = (
        lambda _: 0,
        lambda n: -n[1].need.gpus,
        lambda n: n[0].id not in displaced,
        lambda n: -n[1].need.cpu * n[1].need.min_workers,
    )
    every = permutations(nominations) if len(nominations) <= _MAX_PERMUTED else ()
    seen: set[tuple[str, ...]] = set()
    for order in chain((sorted(nominations, key=key) for key in keys), every):
        names = tuple([workload.id for workload, _, _ in order])
        if names not in seen:
            seen.add(names)
            yield order


def _overbooked(builder: PlanBuilder, victim: Allocation) -> bool:
    """Whether a start, a move, a hold or an older nomination uses the devices, CPU or memory of a victim that stays.

    A node can be overbooked without any of these: by foreign pods.
    """
    for part in victim.parts:
        node, free_later = part.node, part.node.free_later
        lacks_cpu, lacks_memory, lacks_pods = (
            node.cpu_free_later < 0,
            node.memory_free_later < 0,
            node.pods_free_later < 0,
        )
        devices = {at for at in part.devices if free_later[at] < 0}
        if not (lacks_cpu or lacks_memory or lacks_pods or devices):
            continue
        for other, need in chain.from_iterable(_planned_on(builder, host_node) for host_node in node.host):
            if lacks_pods or (lacks_cpu and need.cpu) or (lacks_memory and need.memory):
                return True
            if other.node is node and not devices.isdisjoint(other.devices):
                return True
    return False


def _planned_on(builder: PlanBuilder, node: NodeState) -> Iterator[tuple[WorkerPlacement, Need]]:
    """Iterate over the parts of starts, nominations and holds on a node, without those that a gang keeps."""
    cluster = builder.cluster
    for allocation in node.allocations.values():
        if allocation.started_in_plan:
            yield from ((part, allocation.need) for part in allocation.parts if part.node is node)
    for allocation in cluster.nominations.values():
        held = cluster.allocations.get(allocation.workload.id)
        kept = {(part.worker, part.devices) for part in held.parts if part.node is node} if held else set()
        for part in allocation.parts:
            if part.node is node and (part.worker, part.devices) not in kept:
                yield part, allocation.need
    for hold in builder.holds.values():
        yield from ((part, need) for part, need in hold.parts if part.node is node)


def _exceeds(known: _PlannedState, victim: Allocation, placed: Iterable[_Nomination]) -> bool:
    """Whether a limit, the pool's capacity or a static quota has no room for what a victim keeps.

    `placed`: the nominations that may have another place than before.
    """
    cluster, account = known.cluster, known.cluster.account(victim.workload)
    for pool in victim.pools:
        if any(line.future_usage > (line.quota.limit or 0) for line in account.limiting(pool.pool.name)):
            return True
        if cluster.over_capacity(pool, 0, True):
            return True
    return known.static is not None and known.static.are_used(victim, [workload.id for workload, _, _ in placed])


def _nominations(builder: PlanBuilder) -> list[_Nomination]:
    """Return the nominations of this plan, in the order of the decisions."""
    nominations = builder.cluster.nominations
    planned = [(*served, nominations[name].parts) for name, served in builder.nominated.items() if name in nominations]
    return [n for n in planned if not n[0].nomination or placement_of(n[2]) != n[0].nomination]
