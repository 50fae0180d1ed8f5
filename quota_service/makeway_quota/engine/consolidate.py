"""Who moves over: jobs that restart elsewhere, so that scattered free GPUs become one block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .place import allowed, find
from .state import GPU
from .victims import Seeker
from .world import NodeState, Part, Tenancy, hosts

_TRIES = 24
"""So many nodes are tried, the cheapest first."""


@dataclass(frozen=True, slots=True)
class Moving:
    """One job and where it goes."""

    tenancy: Tenancy
    to: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Who moves, and where the seeker then starts."""

    moves: tuple[Moving, ...]
    parts: tuple[Part, ...]


def consolidate(seeker: Seeker) -> Rearrangement | None:
    """Move jobs so that the seeker fits and nobody is stopped; None (and nothing changed) if that cannot be."""
    cluster, pool = seeker.cluster, seeker.pool
    if not (cluster.settings.consolidation and pool.pool.consolidation) or seeker.need.least != 1:
        return None
    if pool.free < seeker.amount or not allowed(cluster, seeker.account, pool, seeker.amount, True):
        return None
    options = []
    for node in pool.nodes:
        if node.suits(seeker.need) and node.guests:
            chosen = _lightest(seeker, node)
            if chosen:
                size = sum(t.amount for t in chosen)
                options.append((size, sorted(seeker.order(t) for t in chosen), node.position, node, chosen))
    options.sort(key=lambda option: option[:3])
    for _, _, _, node, chosen in options[:_TRIES]:
        done = _try(seeker, node, chosen)
        if done is not None:
            return done
    return None


def _may_move(seeker: Seeker, tenancy: Tenancy) -> bool:
    victim = tenancy.workload
    if victim.firm or victim.kind != "job" or tenancy.leaving or tenancy.fresh or not tenancy.parts:
        return False
    profile = seeker.cluster.profiles.get(victim.profile)
    young = victim.started_at is None or (
        profile is not None and seeker.cluster.now - victim.started_at < profile.min_runtime
    )
    return not young and len({part.node.position for part in tenancy.parts}) == 1


def _lightest(seeker: Seeker, node: NodeState) -> list[Tenancy]:
    """Choose the jobs of a node with the fewest GPUs whose going makes room; empty if there are none."""
    able = [t for t in node.guests.values() if _may_move(seeker, t)]
    able.sort(key=lambda t: (t.amount, seeker.order(t)))
    for tenancy in able:
        if _room(seeker, node, [tenancy]):
            return [tenancy]
    chosen: list[Tenancy] = []
    for tenancy in able:
        chosen.append(tenancy)
        if _room(seeker, node, chosen):
            break
    else:
        return []
    for tenancy in chosen[:]:
        fewer = [t for t in chosen if t is not tenancy]
        if _room(seeker, node, fewer):
            chosen = fewer
    return chosen


def _room(seeker: Seeker, node: NodeState, gone: Sequence[Tenancy]) -> bool:
    left, cpu, memory = list(node.future), node.cpu_future, node.memory_future
    for tenancy in gone:
        for part in tenancy.parts:
            cpu += tenancy.need.cpu
            memory += tenancy.need.memory
            for at in part.devices:
                left[at] += part.milli
    return hosts(seeker.need, left, left.count(GPU), cpu, memory) >= 1


def _try(seeker: Seeker, node: NodeState, chosen: Sequence[Tenancy]) -> Rearrangement | None:
    cluster, pool = seeker.cluster, seeker.pool
    for tenancy in chosen:
        cluster.leave(tenancy)
    parts = find(pool, seeker.need, True)
    moves: list[Moving] = []
    if parts:
        cluster.claim(seeker.workload, seeker.need, parts)
        for tenancy in sorted(chosen, key=lambda t: (-t.amount, t.workload.id)):
            to = _target(tenancy)
            if not to:
                break
            cluster.claim(tenancy.workload, tenancy.need, to)
            moves.append(Moving(tenancy, to))
        cluster.unclaim(seeker.workload)
    if parts and len(moves) == len(chosen):
        return Rearrangement(tuple(moves), parts)
    for moving in moves:
        cluster.unclaim(moving.tenancy.workload)
    for tenancy in chosen:
        cluster.stay(tenancy)
    return None


def _target(tenancy: Tenancy) -> tuple[Part, ...]:
    """Find free GPUs, now, for a job that moves; an elastic gang keeps its number of workers."""
    need = tenancy.need
    if len(tenancy.parts) != need.least:
        return ()
    return find(tenancy.pool, need)
