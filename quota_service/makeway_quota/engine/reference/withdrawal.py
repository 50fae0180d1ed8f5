"""Withdraw evictions that later decisions of the same plan made superfluous (engine rule 5.4, end; invariant I4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cluster import Allocation, Cluster, Part
from .decisions import Decisions, Eviction
from .placement import find
from .queues import age
from .quota import allowed, counts, covering, over_capacity, static_quota
from .victims import Preemptor, order

MOST_REPLACED = 8
"""Up to so many nominations are all withdrawn and placed again to spare one victim."""


def withdraw_superfluous(decisions: Decisions, spared: set[tuple[str, str, int]]) -> bool:
    """Spare every victim without which all preemptors of the plan still have a placement, the most protected first.

    Return whether any was spared. None is spared twice from the same eviction: `spared` has the victim, the preemptor
    and the number of workers that go on.
    """
    cluster = decisions.cluster
    found = {name: (name, each.preemptor, len(each.to)) for name, each in decisions.evicted.items()}
    able = [cluster.running[name] for name, eviction in found.items() if eviction not in spared]
    before = len(spared)
    for victim in sorted(able, key=lambda a: order(_bystander(cluster, a), a), reverse=True):
        if _spare(decisions, victim):
            spared.add(found[victim.id])
            continue
        change = decisions.evicted[victim.id]
        if change.right is None or not change.to:
            continue
        for part in _given_up(cluster, victim):
            kept = tuple(each for each in victim.parts if each in (*_kept(cluster, victim), part))
            if _spare(decisions, victim, kept):
                spared.add(found[victim.id])
    return len(spared) > before


def replace_preemptors(decisions: Decisions) -> None:
    """Record the workload that got a victim's devices as its preemptor, where its own preemptor does not start."""
    cluster = decisions.cluster
    served = [cluster.nominations[name] for name in decisions.nominated]
    served += [cluster.running[name] for name in decisions.started]
    ids = {each.id for each in served}
    for name, eviction in decisions.evicted.items():
        if served and eviction.preemptor not in ids:
            victim = cluster.running[name]
            nearest = min(served, key=lambda each: _distance(victim, each))
            decisions.evicted[name] = replace(eviction, preemptor=nearest.id)


def _distance(victim: Allocation, other: Allocation) -> tuple[object, ...]:
    """Return the order in which to look for what got a victim's devices: the same devices, nodes, pool; then by age."""
    elsewhere = other.pool not in victim.pools
    other_nodes = {part.node for part in other.parts}.isdisjoint(part.node for part in victim.parts)
    other_devices = _devices(other).isdisjoint(_devices(victim))
    return elsewhere, other_devices, other_nodes, *age(other.workload)


def _devices(allocation: Allocation) -> set[tuple[str, int]]:
    return {(part.node, device) for part in allocation.parts for device in part.devices}


def _bystander(cluster: Cluster, victim: Allocation) -> Preemptor:
    """Return a preemptor that requests nothing; only its order of victims is used."""
    return Preemptor(cluster, victim.workload, victim.need, victim.levels, victim.pool, "reservation")


def _kept(cluster: Cluster, victim: Allocation) -> list[Part]:
    """Return the parts of its old place on which a gang that shrinks goes on."""
    workers = {part.worker for part in cluster.nominations[victim.id].parts}
    return [part for part in victim.parts if part.worker in workers]


def _given_up(cluster: Cluster, victim: Allocation) -> list[Part]:
    """Return the workers that a gang gives up and that could stay, the lowest number first."""
    kept, gpus = _kept(cluster, victim), victim.need.gpus
    stay = [p for p in victim.parts if cluster.usable(p.node) and len(p.devices) * p.milli == gpus]
    return sorted((part for part in stay if part not in kept), key=lambda part: part.worker)


def _spare(decisions: Decisions, victim: Allocation, smaller: tuple[Part, ...] = ()) -> bool:
    """Spare a victim (or a worker of it, leaving `smaller`) if all preemptors still have a place; return whether."""
    cluster = decisions.cluster
    trial = cluster.copy()
    trial.nominations.pop(victim.id, None)
    if not smaller:
        trial.terminating.discard(victim.id)
    else:
        trial.nominate(victim.workload, smaller)
    if _exceeds_caps(trial, victim):
        return False
    ours = [name for name in decisions.nominated if any(_new(trial, name, pool) for pool in victim.pools)]
    if _overbooked(trial, ours, victim):
        return False
    placed = _replace(trial, ours, True)
    if placed is None and len(ours) <= MOST_REPLACED:
        largest = sorted(ours, key=lambda name: -trial.nominations[name].need.gpus)
        displaced = _displaced(trial.copy(), ours)
        first = [*displaced, *(name for name in ours if name not in displaced)]
        placed = next((found for order in (ours, largest, first) if (found := _replace(trial, order, False))), None)
    if placed is None:
        return False
    cluster.nominations = placed.nominations
    cluster.terminating = placed.terminating
    if not smaller:
        del decisions.evicted[victim.id]
    else:
        old = decisions.evicted[victim.id]
        decisions.evicted[victim.id] = Eviction(old.preemptor, old.right, smaller)
    decisions.count += 1
    return True


def _new(cluster: Cluster, name: str, pool: str) -> bool:
    """Whether a nomination in a pool was made by this plan."""
    found = cluster.nominations.get(name)
    return found is not None and found.pool == pool and cluster.placement(found.parts) != found.workload.nomination


def _overbooked(cluster: Cluster, names: Sequence[str], victim: Allocation) -> bool:
    """Whether a victim that stays is in the way of more than these nominations: of a start, a job that moves or a hold.

    What foreign pods overbook without any of these is no obstacle.
    """
    trial = cluster.copy()
    for name in names:
        del trial.nominations[name]
    unplanned = _without_decisions(trial)
    for part in victim.parts:
        left, before = trial.future(part.node), unplanned.future(part.node)
        devices = any(left.devices[at] < min(0, before.devices[at]) for at in part.devices)
        if devices or left.cpu < min(0, before.cpu) or left.memory < min(0, before.memory):
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


def _replace(cluster: Cluster, names: Sequence[str], keep: bool) -> Cluster | None:
    """Return the cluster with nominations placed anew, in this order; None if one finds no place.

    `keep`: each that can stays where it is, and only the others are placed anew.
    """
    trial = cluster.copy()
    taken = {name: trial.nominations[name] for name in names}
    if keep:
        names = _displaced(trial, names)
    for name in names:
        trial.nominations.pop(name, None)
    for old in (taken[name] for name in names):
        may = allowed(trial, old.levels, old.pool, old.need.total, True)
        parts = find(trial, old.pool, old.need, True) if may else ()
        if not parts:
            return None
        trial.nominate(old.workload, parts)
    return trial


def _displaced(trial: Cluster, names: Sequence[str]) -> list[str]:
    """Withdraw the nominations whose devices are no longer free, and return them; the others stay."""
    taken = {name: trial.nominations.pop(name) for name in names}
    displaced: list[str] = []
    for name, old in taken.items():
        if trial.holds_parts(old.need, old.parts, trial.future):
            trial.nominate(old.workload, old.parts)
        else:
            displaced.append(name)
    return displaced


def _exceeds_caps(trial: Cluster, victim: Allocation) -> bool:
    """Whether a limit that the victim counts on, or its pool's capacity or a static quota, is exceeded if it stays."""
    for pool in victim.pools:
        lines = [line for level in victim.levels for line in covering(trial, level, pool)]
        if any(ln.quota.limit is not None and counts(trial, ln).future > ln.quota.limit for ln in lines):
            return True
        if over_capacity(trial, pool, 0, True) or static_quota(trial, victim.levels, pool, 0, True) is not None:
            return True
    return False
