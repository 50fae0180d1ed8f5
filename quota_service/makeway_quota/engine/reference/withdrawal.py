"""Withdraw evictions that later decisions of the same plan made superfluous (engine rule 5.4, end; invariant I4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from ..placement.together import MAX_NODES, Ask, Room, Search, WorkerOnNode, linked
from .decisions import Decisions
from .state.cluster import Allocation, Cluster, WorkerPlacement
from .state.groups import WorkloadGroup, age
from .state.placement import find
from .state.quota import allowed, counts, covering, in_quota, over_capacity, static_quota
from .state.spare import spares
from .victims.victims import Preemptor, order

MAX_REPLACED = 8
"""Up to so many nominations are all withdrawn and placed again to spare one victim."""
MAX_PERMUTED = 3
"""Up to so many nominations are placed again in every order."""
MAX_PLACED = 64
"""So many placements are tried, over all pools of the nominations, to place them again."""


def withdraw_superfluous(decisions: Decisions, withdrawn_evictions: set[tuple[str, str, int]]) -> bool:
    """Spare every victim without which all preemptors of the plan still have a placement, the most protected first.

    Return whether any was spared. None is spared twice from the same eviction: `withdrawn_evictions` has the victim,
    the preemptor and the number of workers that go on.
    """
    cluster, search = decisions.cluster, decisions.search
    evictions = {name: (name, eviction.preemptor, len(eviction.to)) for name, eviction in decisions.evicted.items()}
    able = [cluster.running[name] for name, eviction in evictions.items() if eviction not in withdrawn_evictions]
    before = len(withdrawn_evictions)
    for victim in sorted(able, key=lambda a: order(_bystander(cluster, a), a), reverse=True):
        if _spare(decisions, search, victim):
            withdrawn_evictions.add(evictions[victim.id])
            continue
        change = decisions.evicted[victim.id]
        if change.right is None or not change.to:
            continue
        kept = _kept(cluster, victim)
        for part in _given_up(cluster, victim, kept):
            more = tuple(other for other in victim.parts if other is part or other in kept)
            if len(more) < len(victim.parts) and _spare(decisions, search, victim, more):
                kept.append(part)
                withdrawn_evictions.add(evictions[victim.id])
    return len(withdrawn_evictions) > before


def cancel_moves_to_same_place(decisions: Decisions) -> None:
    """Cancel the moves of victims back to the devices that they hold: the plan's last decisions left these to them."""
    cluster = decisions.cluster
    for name, eviction in list(decisions.evicted.items()):
        if eviction.right is None and set(eviction.to) == set(cluster.running[name].parts):
            del cluster.nominations[name], decisions.evicted[name]
            cluster.terminating.discard(name)
            decisions.count += 1


def replace_preemptors(decisions: Decisions) -> None:
    """Record the workload that got a victim's devices as its preemptor, where its own preemptor does not start."""
    cluster = decisions.cluster
    served = [cluster.nominations[name] for name in decisions.nominated]
    served += [cluster.running[name] for name in decisions.started]
    ids = {allocation.id for allocation in served}
    for name, eviction in decisions.evicted.items():
        if served and eviction.preemptor not in ids:
            victim = cluster.running[name]
            nearest = min(served, key=lambda item: _distance(cluster, victim, item))
            decisions.evicted[name] = replace(eviction, preemptor=nearest.id)


def _distance(cluster: Cluster, victim: Allocation, other: Allocation) -> tuple[object, ...]:
    """Return the order in which to look for what got a victim's devices: the same devices, hosts, pool; then by age."""
    hosts = {name for part in victim.parts for name in cluster.host_of(part.node)}
    other_hosts = hosts.isdisjoint(part.node for part in other.parts)
    elsewhere = other.pool not in victim.pools and other_hosts
    other_devices = _devices(other).isdisjoint(_devices(victim))
    return elsewhere, other_devices, other_hosts, *age(other.workload)


def _devices(allocation: Allocation) -> set[tuple[str, int]]:
    return {(part.node, device) for part in allocation.parts for device in part.devices}


def _bystander(cluster: Cluster, victim: Allocation) -> Preemptor:
    """Return a preemptor that requests nothing; only its order of victims is used."""
    return Preemptor(cluster, victim.workload, victim.need, victim.chain, victim.pool, ("reservation",))


def _kept(cluster: Cluster, victim: Allocation) -> list[WorkerPlacement]:
    """Return the parts of its old place on which a gang that shrinks goes on."""
    workers = {part.worker for part in cluster.nominations[victim.id].parts}
    return [part for part in victim.parts if part.worker in workers]


def _given_up(cluster: Cluster, victim: Allocation, kept: Sequence[WorkerPlacement]) -> list[WorkerPlacement]:
    """Return the workers that a gang gives up and that could stay, the lowest number first."""
    gpus = victim.need.gpus
    stay = [p for p in victim.parts if cluster.usable(p.node) and len(p.devices) * p.milli_per_device == gpus]
    return sorted((part for part in stay if part not in kept), key=lambda part: part.worker)


def _spare(decisions: Decisions, search: Search, victim: Allocation, smaller: tuple[WorkerPlacement, ...] = ()) -> bool:
    """Spare a victim (or a worker of it, leaving `smaller`) if all preemptors still have a place; return whether."""
    cluster = decisions.cluster
    trial = cluster.copy()
    trial.shrink(victim.workload, smaller)
    if not smaller:
        trial.terminating.discard(victim.id)
    ours = [name for name in decisions.nominated if _new(trial, name)]
    if _overbooked(trial, ours, victim):
        return False
    placed = _replace(decisions, trial, ours, victim, True)
    if placed is None:
        around = {*victim.pools, *(other for pool in victim.pools for other in cluster.pools_beside(pool))}
        near = ours if len(ours) <= MAX_REPLACED else [n for n in ours if trial.nominations[n].pool in around]
        orders = _orders(trial, near, _displaced(trial.copy(), ours)) if len(near) <= MAX_REPLACED else ()
        placed = next((again for order in orders if (again := _replace(decisions, trial, order, victim, False))), None)
        if placed is None and 0 < len(near) <= MAX_REPLACED:
            placed = _place_together(decisions, search, trial, near, victim)
    if placed is None:
        return False
    cluster.nominations, cluster.terminating, cluster.shrunk = placed.nominations, placed.terminating, placed.shrunk
    if not smaller:
        del decisions.evicted[victim.id]
    else:
        decisions.evicted[victim.id] = replace(decisions.evicted[victim.id], to=smaller)
    decisions.count += 1
    return True


def _orders(cluster: Cluster, names: Sequence[str], displaced: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the orders in which nominations are placed again, each once.

    That of the decisions, the largest workers first, those first whose devices the victim keeps, and those with the
    most CPU in all first; of few, every other order, too.
    """
    needs = {name: cluster.nominations[name].need for name in names}
    orders = [
        tuple(names),
        tuple(sorted(names, key=lambda name: -needs[name].gpus)),
        tuple(sorted(names, key=lambda name: name not in displaced)),
        tuple(sorted(names, key=lambda name: -needs[name].cpu * needs[name].min_workers)),
        *(permutations(names) if len(names) <= MAX_PERMUTED else ()),
    ]
    return list(dict.fromkeys(orders))


def _new(cluster: Cluster, name: str) -> bool:
    """Whether a nomination was made by this plan."""
    nomination = cluster.nominations.get(name)
    return nomination is not None and cluster.placement(nomination.parts) != nomination.workload.nomination


def _overbooked(cluster: Cluster, names: Sequence[str], victim: Allocation) -> bool:
    """Whether a victim that stays is in the way of more than these nominations: of a start, a job that moves or a hold.

    What foreign pods overbook without any of these is no obstacle.
    """
    trial = cluster.copy()
    for name in names:
        del trial.nominations[name]
    unplanned = _without_decisions(trial)
    for part in victim.parts:
        free, before = trial.free_later(part.node), unplanned.free_later(part.node)
        devices = any(free.devices[at] < min(0, before.devices[at]) for at in part.devices)
        pods = free.pods < min(0, before.pods)
        if devices or pods or free.cpu < min(0, before.cpu) or free.memory < min(0, before.memory):
            return True
    return False


def _without_decisions(cluster: Cluster) -> Cluster:
    """Return the cluster without starts, holds and nominations, except for the workers that a gang keeps."""
    trial = cluster.copy()
    trial.blocked, trial.nominations = (), {}
    for name, old in cluster.nominations.items():
        kept = [part for part in old.parts if name in cluster.running and part in cluster.running[name].parts]
        if kept:
            trial.nominate(old.workload, kept)
    trial.running = {name: allocation for name, allocation in trial.running.items() if not allocation.fresh}
    return trial


def _replace(
    decisions: Decisions, cluster: Cluster, names: Sequence[str], victim: Allocation, keep: bool
) -> Cluster | None:
    """Return the cluster with nominations placed anew, in this order; None if one finds no place beside the victim.

    `keep`: each that can stays where it is, and only the others are placed anew.
    """
    trial = cluster.copy()
    taken = {name: trial.nominations[name] for name in names}
    if keep:
        names = _displaced(trial, names)
    for name in names:
        trial.nominations.pop(name, None)
    placed = _place(decisions, trial, [taken[name] for name in names], [MAX_PLACED])
    return None if placed is None or _exceeds_caps(placed, victim) else placed


def _place(
    decisions: Decisions, cluster: Cluster, nominations: Sequence[Allocation], remaining: list[int]
) -> Cluster | None:
    """Return the cluster with all of these nominated, each in the first of its pools that leaves room for the others.

    `remaining`: how many more placements may be tried.
    """
    if not nominations:
        return cluster
    old, *others = nominations
    for pool in _pools_for(decisions, cluster, decisions.nominated[old.id], old):
        may = allowed(cluster, old.chain, pool, old.need.total, True)
        parts = find(cluster, pool, old.need, True) if may and remaining[0] else ()
        if parts:
            remaining[0] -= 1
            trial = cluster.copy()
            trial.nominate(old.workload, parts)
            if (placed := _place(decisions, trial, others, remaining)) is not None:
                return placed
    return None


def _place_together(
    decisions: Decisions, search: Search, cluster: Cluster, names: Sequence[str], victim: Allocation
) -> Cluster | None:
    """Return the cluster with nominations placed anew by a search for places of all of them together."""
    trial = cluster.copy()
    taken = [trial.nominations.pop(name) for name in names]
    for places in _places(decisions, search, trial, taken):
        placed = _placed_as(decisions, trial.copy(), taken, places)
        if placed is not None and not _exceeds_caps(placed, victim):
            return placed
    return None


def _places(
    decisions: Decisions, search: Search, cluster: Cluster, taken: Sequence[Allocation]
) -> Iterator[list[list[WorkerOnNode]]]:
    """Iterate over places for nominations that are withdrawn, by the pools of each, its present one first."""
    if not search.steps:
        return
    groups = [decisions.nominated[old.id] for old in taken]
    orders = [
        [old.pool, *(pool for pool in group.pools if pool != old.pool)]
        for old, group in zip(taken, groups, strict=True)
    ]
    pools = {pool: cluster.nodes_of(pool) for order in orders for pool in order}
    if sum(map(len, pools.values())) > MAX_NODES:
        return
    rooms = {room.name: room for room in linked([_room(cluster, name) for names in pools.values() for name in names])}
    asks: list[list[Ask]] = []
    for old, mine in zip(taken, orders, strict=True):
        able = {name: room for name, room in rooms.items() if cluster.suits(name, old.need) and room.workers(old.need)}
        asks.append([Ask(old.need, pool, [able[name] for name in pools[pool] if name in able]) for pool in mine])
    yield from search.combinations(asks)


def _room(cluster: Cluster, name: str) -> Room:
    future = cluster.free_later(name)
    return Room(name, cluster.nodes[name].host, *future, cluster.free(name).devices)


def _placed_as(
    decisions: Decisions, cluster: Cluster, taken: Sequence[Allocation], places: Sequence[Sequence[WorkerOnNode]]
) -> Cluster | None:
    """Return the cluster with nominations at these places; None if one may not be placed in that pool any more."""
    for old, mine in zip(taken, places, strict=True):
        pool = cluster.nodes[mine[0].node].pool
        able = pool in _pools_for(decisions, cluster, decisions.nominated[old.id], old)
        if not able or not allowed(cluster, old.chain, pool, old.need.total, True):
            return None
        parts = [WorkerPlacement(at, *place) for at, place in enumerate(mine)]
        if old.need.only_spare and not spares(cluster, pool, old.need, parts, True):
            return None
        cluster.nominate(old.workload, parts)
    return cluster


def _pools_for(decisions: Decisions, cluster: Cluster, group: WorkloadGroup, old: Allocation) -> list[str]:
    """Return the pools for a nomination that is placed anew, its present one first.

    In quota, if it is so there; else those in which nothing is held.
    """
    able = [p for p in group.pools if in_quota(cluster, group.chain, p, old.need.total, group.non_preemptible)]
    if old.pool not in able:
        able = [pool for pool in group.pools if group.may_borrow and pool not in decisions.holds]
    return [old.pool, *(pool for pool in able if pool != old.pool)]


def _displaced(trial: Cluster, names: Sequence[str]) -> list[str]:
    """Withdraw the nominations whose devices are no longer free, and return them; the others stay."""
    taken = {name: trial.nominations.pop(name) for name in names}
    displaced: list[str] = []
    for name, old in taken.items():
        if trial.holds_parts(old.need, old.parts, trial.free_later):
            trial.nominate(old.workload, old.parts)
        else:
            displaced.append(name)
    return displaced


def _exceeds_caps(trial: Cluster, victim: Allocation) -> bool:
    """Whether a limit that the victim counts on or its pool's capacity is exceeded if it stays.

    Or what the plan starts or nominates then uses a static quota of others. What the victim uses of one does not count:
    nothing is evicted to keep GPUs free.
    """
    for pool in victim.pools:
        lines = [line for level in victim.chain for line in covering(trial, level, pool)]
        if any(ln.quota.limit is not None and counts(trial, ln).future_usage > ln.quota.limit for ln in lines):
            return True
        if over_capacity(trial, pool, 0, True):
            return True
    starts = [allocation for allocation in trial.running.values() if allocation.fresh]
    planned = [allocation for allocation in (*starts, *trial.nominations.values()) if allocation.amount]
    return any(static_quota(trial, one.chain, one.pool, 0, True) is not None for one in planned)
