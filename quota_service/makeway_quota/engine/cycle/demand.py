"""Find the pending work that machines of autoscaled pools could run, in the order of rights (rule 4).

It does not depend on the reasons of the plan. Linear in the pending workloads: while they are walked, limits only get
closer and what is about to be free only fills up, so that what was denied to a group once is not tried again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..index.cluster import Cluster
from ..index.devices import UNLIMITED, hosts
from ..index.groups import WorkloadGroup
from ..index.ledger import Account, LineState
from ..index.nodes import Allocation, PoolState
from ..placement.fit import find_placement, static_quota
from ..placement.spare import surplus
from ..plan import Demand
from ..request import Need
from ..rules.order import group_sort_key
from ..snapshot import GPU, Workload
from .demand_order import DemandOrder, Entry, Place, RankedGroup, shape_of

Awaiting = Mapping[str, tuple[Workload, WorkloadGroup]]
"""The workloads that are nominated to nodes which boot, by id"""


def find_demand(
    cluster: Cluster,
    waiting: Sequence[WorkloadGroup],
    ending: bool,
    awaiting: Awaiting,
    refused: Collection[str] = (),
) -> tuple[Demand, ...]:
    """Return the demand of pending work; `ending`: work terminates, so that GPUs are about to be free.

    Work that will get those is no demand. Work that waits for nodes which boot is, in the pool where it has its
    nomination, with its workers there: a machine is on its way for them. The cluster is left as it was.
    """
    growing = [pool for pool in cluster.pools.values() if pool.pool.kind == "autoscaled"]
    if awaiting:
        waiting = list(dict.fromkeys([*waiting, *(group for _, group in awaiting.values())]))
    useful = useful_pools(cluster, waiting, growing)
    order = _in_order_of_rights(cluster, waiting, growing, useful, ending, awaiting)
    mine = {id: _awaiting_demand(cluster.nominations[id], useful[group.number]) for id, (_, group) in awaiting.items()}
    allowance = Allowance(cluster, waiting)
    if not (ending or refused or any(_is_bounded(allowance, group, useful[group.number]) for group in waiting)):
        every = [mine[one[2]] if one[2] in mine else one[6] for one in order]
        return tuple([demand for demand in every if demand is not None])
    return tuple(_admitted(cluster, waiting, order, mine, allowance, ending, refused, dict(useful)))


def _is_bounded(allowance: Allowance, group: WorkloadGroup, pools: Sequence[PoolState]) -> bool:
    """Whether one of a group may be denied in one of some pools, or keeps others from them."""
    names = tuple([pool.pool.name for pool in pools])
    return any(allowance.bounds(group, pool) for pool in pools) or any(allowance.counts(group, names))


def _admitted(
    cluster: Cluster,
    waiting: Sequence[WorkloadGroup],
    order: Iterable[Entry],
    mine: Mapping[str, Demand | None],
    allowance: Allowance,
    ending: bool,
    refused: Collection[str],
    able: dict[int, list[PoolState]],
) -> Iterator[Demand]:
    """Iterate over the demand that limits, reservations, and what is about to be free, allow one after the other.

    `able`: the pools in which a new node would help each group, by its number.
    """
    soon = SoonFree(cluster, waiting if ending else ())
    bounded = {group.number: any(allowance.bounds(group, pool) for pool in able[group.number]) for group in waiting}
    shapes: dict[int, tuple[tuple[str, ...], tuple[Any, ...], bool]] = {}
    """Group to the pools of its demand, what follows them there, and whether a claim in these pools counts"""
    for _, _, id, _, group, workload, _ in order:
        if id in mine:
            if (demand := mine[id]) is not None:
                yield demand
            continue
        if id in refused or (ending and soon.take(group, workload, allowance)):
            continue
        number = group.number
        pools = able[number]
        if pools and bounded[number]:
            admitting = [pool for pool in pools if allowance.admits(group, pool, in_future=False)]
            if len(admitting) < len(pools):
                shapes.pop(number, None)
                pools = able[number] = admitting
        if pools:
            if number not in shapes:
                names = tuple([pool.pool.name for pool in pools])
                shapes[number] = names, shape_of(group.need), any(allowance.counts(group, names))
            names, shape, claims = shapes[number]
            yield Demand(id, names, *shape)
            if claims:
                allowance.claim(group, names)
    soon.give_back()


def _awaiting_demand(nomination: Allocation, useful: Collection[PoolState]) -> Demand | None:
    """Return the demand of a workload that waits for nodes which boot: its other workers have their places.

    None where a new node of that pool would not help it.
    """
    if nomination.pool not in useful:
        return None
    nodes = tuple([part.node.node.name for part in nomination.parts])
    there = sum(part.node.boots for part in nomination.parts)
    demand = Demand(nomination.workload.id, (nomination.pool.pool.name,), *shape_of(nomination.need))
    return demand._replace(workers=there, awaits=nodes)


def _in_order_of_rights(
    cluster: Cluster,
    waiting: Iterable[WorkloadGroup],
    growing: Collection[PoolState],
    useful: Mapping[int, Sequence[PoolState]],
    every: bool,
    awaiting: Awaiting,
) -> list[Entry]:
    """Return the pending workloads in order, those included that wait for nodes which boot: by their rights without.

    Their nominations are taken off the ledger meanwhile, which is all that the order depends on. `every`: also those
    that no growing pool serves.
    """
    nominations = [cluster.nominations[id] for id in awaiting]
    for nomination in nominations:
        cluster.record(nomination, nominated=-nomination.milli_gpus)
    for workload, group in reversed(list(awaiting.values())):
        group.put_back(workload)
    others = {id: one.workload for id, one in cluster.nominations.items() if id not in awaiting}
    queues = {(workload.team, workload.profile) for workload in others.values()}
    ranked = []
    for group, place in _placed(cluster, waiting, growing, every):
        names = tuple([pool.pool.name for pool in useful[group.number]])
        ranked.append(RankedGroup(place, group, names, (group.account.team.name, group.profile.name) not in queues))
    order = cluster.demand_order = cluster.demand_order or DemandOrder()
    result: list[Entry] = order.sort(ranked, cluster.settings.user_fairness, others)
    for workload, group in awaiting.values():
        group.pop(workload)
    for nomination in nominations:
        cluster.record(nomination, nominated=nomination.milli_gpus)
    return result


def _placed(
    cluster: Cluster, waiting: Iterable[WorkloadGroup], growing: Collection[PoolState], every: bool
) -> Iterator[tuple[WorkloadGroup, Place]]:
    """Iterate over the groups with members, with their places in the order: those in the first growing pool of each."""
    for group in waiting:
        pool = next((pool for pool in group.pools if pool in growing), group.pools[0] if every else None)
        if pool is not None and group.has_members():
            amount = group.need.total
            over_quota = not cluster.ledger.in_quota(group.account, pool.pool.name, amount, group.non_preemptible)
            yield group, (over_quota, group_sort_key(group, pool, over_quota))


def in_order(
    cluster: Cluster, waiting: Iterable[WorkloadGroup], growing: Collection[PoolState]
) -> list[tuple[WorkloadGroup, Workload]]:
    """Return the pending workloads that a growing pool serves and that are not nominated.

    They are sorted by `order.sort_key` in the first growing pool of each.
    """
    ranked = [RankedGroup(place, group, (), False) for group, place in _placed(cluster, waiting, growing, False)]
    order = DemandOrder().sort(ranked, cluster.settings.user_fairness, cluster.nominations)
    return [(group, workload) for _, _, _, _, group, workload, _ in order]


def useful_pools(
    cluster: Cluster, waiting: Iterable[WorkloadGroup], growing: Collection[PoolState]
) -> dict[int, list[PoolState]]:
    """Return the pools in which a new node would help each group, by the number of the group, in their order.

    Not where static quotas of others lack GPUs: these would keep the new ones, too.
    """

    @cache
    def is_lent(account: Account, pool: PoolState) -> bool:
        return not any(static_quota(cluster, account, pool, 0, in_future) is not None for in_future in (False, True))

    def helps(group: WorkloadGroup, pool: PoolState) -> bool:
        need = group.need
        runs = pool in growing and (pool.pool.sessions or not need.session)
        return runs and (not need.total or is_lent(group.account, pool)) and _leaves_enough(pool, need)

    return {group.number: [pool for pool in group.pools if helps(group, pool)] for group in waiting}


def _leaves_enough(pool: PoolState, need: Need) -> bool:
    """Whether a worker on a new node would leave guaranteed GPUs the CPU and memory that they need (rule 2).

    Where the size of new nodes is not known, the GPUs of the present ones have to be enough.
    """
    smallest = pool.smallest("") if need.only_spare else None
    if smallest is None:
        return True
    known, useful = pool.pool, 0
    if known.max_nodes:
        cpu, memory, devices = known.node_cpu or UNLIMITED, known.node_memory or UNLIMITED, [GPU] * known.node_gpus
        before = smallest.gpus * hosts(smallest, devices, len(devices), cpu, memory)
        useful = smallest.gpus * hosts(smallest, devices, len(devices), cpu - need.cpu, memory - need.memory)
        if before == useful:
            return True
    return surplus(pool, True) + useful >= 0


class Allowance:
    """What limits, capacities and reservations still allow while pending work claims nodes, one after the other.

    What claims several pools counts in each of them, and once on each line: wherever it runs, nothing is exceeded.
    Claims are not counted where they keep none of `waiting` from starting.
    """

    def __init__(self, cluster: Cluster, waiting: Iterable[WorkloadGroup]) -> None:
        self.cluster = cluster
        self._reserves = any(not group.may_borrow for group in waiting)
        """Whether any of them has to stay in quota"""
        self.minus: dict[LineState, int] = {}
        """Line to the negated milli-GPUs that are claimed of its limit."""
        self.claimed: dict[str, int] = {}
        """Pool to the milli-GPUs that are claimed of its capacity."""
        self.reserved: dict[tuple[LineState, bool], list[int]] = {}
        """Line, and whether beyond the lines below it, to what is claimed of its reservation: in all, and by work that
        is not preemptible."""
        self._denied: set[tuple[int, str, bool]] = set()
        self._lines = cache(_lines)
        self._counted: dict[tuple[int, tuple[str, ...]], _Counted] = {}
        """By group and pools"""

    def bounds(self, group: WorkloadGroup, pool: PoolState) -> bool:
        """Whether one of a group may ever be denied in a pool."""
        limited = pool.pool.capacity is not None or bool(group.account.limiting(pool.pool.name))
        return not group.may_borrow or (group.need.total > 0 and limited)

    def admits(self, group: WorkloadGroup, pool: PoolState, in_future: bool) -> bool:
        """Whether one more of a group is within limits and capacity, now or `in_future`, and in quota if it has to be.

        What is denied once is denied from then on.
        """
        asked = group.number, pool.pool.name, in_future
        if asked in self._denied:
            return False
        if not self._admits(group, pool, in_future):
            self._denied.add(asked)
            return False
        return True

    def _admits(self, group: WorkloadGroup, pool: PoolState, in_future: bool) -> bool:
        amount, name = group.need.total, pool.pool.name
        if amount and self.cluster.over_capacity(pool, amount + self.claimed.get(name, 0), in_future):
            return False
        if amount and self.cluster.ledger.over_limit(group.account, name, amount, in_future, self.minus) is not None:
            return False
        return group.may_borrow or self._in_quota(group, name)

    def claim(self, group: WorkloadGroup, pools: tuple[str, ...]) -> None:
        """Record that one of a group claims a node in one of these pools."""
        counted = self.counts(group, pools)
        amount = group.need.total
        for name in counted.capacities:
            self.claimed[name] = self.claimed.get(name, 0) + amount
        for line in counted.limits:
            self.minus[line] = self.minus.get(line, 0) - amount
        for known in counted.reservations:
            known[0] += amount
            known[1] += amount * group.non_preemptible

    def counts(self, group: WorkloadGroup, pools: tuple[str, ...]) -> _Counted:
        """Return what a claim of one of a group in some pools counts on."""
        known = self._counted.get((group.number, pools))
        if known is None:
            capacities = tuple(name for name in pools if self.cluster.pools[name].pool.capacity is not None)
            limits, reservations = self._lines(group.account, pools)
            kept = reservations if self._reserves else ()
            known = _Counted(capacities, limits, tuple(self.reserved.setdefault(key, [0, 0]) for key in kept))
            self._counted[group.number, pools] = known
        return known

    def _in_quota(self, group: WorkloadGroup, pool: str) -> bool:
        """Whether one more of a group is in quota, what is claimed counted."""
        guarantees = group.account.guarantees(pool, group.non_preemptible)
        for guarantee in guarantees:
            claimed = self.reserved.get((guarantee.line, guarantee.beyond), (0, 0))[group.non_preemptible]
            if guarantee.used(group.non_preemptible) + claimed + group.need.total > guarantee.reserved:
                return False
        return bool(guarantees)


class _Counted(NamedTuple):
    """What a claim counts on: pools with a capacity, limits, and what is claimed of each reservation."""

    capacities: tuple[str, ...]
    limits: tuple[LineState, ...]
    reservations: tuple[list[int], ...]


def _lines(
    account: Account, pools: tuple[str, ...]
) -> tuple[tuple[LineState, ...], tuple[tuple[LineState, bool], ...]]:
    """Return the limits, and the reservations, on which work of an account in any of some pools counts, each once."""
    limits = dict.fromkeys(line for name in pools for line in account.limiting(name))
    reservations: dict[tuple[LineState, bool], None] = {}
    for name in pools:
        beyond = True
        for level in account.chain:
            reserving = level.reserving(name)
            reservations |= dict.fromkeys((line, kind) for line in reserving for kind in (False, True)[: 1 + beyond])
            beyond = beyond and not reserving
    return tuple(limits), tuple(reservations)


class SoonFree:
    """The room that terminating work leaves, as pending work is nominated to it in the order of rights.

    Work that is kept off GPUs which are free already gets none of it.
    """

    def __init__(self, cluster: Cluster, waiting: Iterable[WorkloadGroup]) -> None:
        self.cluster = cluster
        self._taken: list[Workload] = []
        self._none: set[tuple[Need, str]] = set()
        """Requests and pools without room for one more."""
        asked = {(group.need, pool.pool.name): pool for group in waiting for pool in group.pools}
        self._none.update((need, name) for (need, name), pool in asked.items() if find_placement(pool, need))

    def take(self, group: WorkloadGroup, workload: Workload, allowance: Allowance) -> bool:
        """Nominate one of a group to the first room that it may have; False where there is none."""
        amount = group.need.total
        for pool in group.pools:
            name = pool.pool.name
            if (group.need, name) in self._none or not allowance.admits(group, pool, in_future=True):
                continue
            if amount and static_quota(self.cluster, group.account, pool, amount, True) is not None:
                continue
            parts = find_placement(pool, group.need, True)
            if parts:
                self.cluster.nominate(workload, group.need, parts)
                self._taken.append(workload)
                return True
            self._none.add((group.need, name))
        return False

    def give_back(self) -> None:
        """Withdraw these nominations."""
        for workload in self._taken:
            self.cluster.withdraw_nomination(workload)
        self._taken.clear()
