"""Candidates for eviction, legal victim sets, and the order among them (engine rules 5.1 to 5.5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...request import Need
from ...snapshot import GPU, Workload
from ..state.cluster import Allocation, Cluster, WorkerPlacement
from ..state.groups import Key, rank
from ..state.quota import (
    Request,
    blocking,
    counts_on,
    fair_share,
    is_above_reservation,
    over_limit,
    over_reservation,
    shares,
    within_fair_share,
)

Right = Literal["reservation", "own_team_any_priority", "own_team", "fair_share"]
"""A rule by which a workload may be evicted: 5.1, 5.1 by non-preemptible work of its own team, 5.7 and 5.9."""
Rights = tuple[Right, ...]


@dataclass(frozen=True, slots=True)
class Preemptor:
    """A workload that may evict others to start in a pool, and the rights by which it may.

    `withdraws`: it may only take starts of this very plan back.
    """

    cluster: Cluster
    workload: Workload
    need: Need
    chain: tuple[str, ...]
    pool: str
    rights: Rights
    withdraws: bool = False
    replaced_by: frozenset[str] = frozenset()
    """The workloads that replaced a start of it in this plan: it withdraws theirs only if they do not return."""
    fair: dict[str, int] = field(default_factory=dict)
    """Team to its fair share beyond its reservation, as it is before the first victim."""

    @property
    def over_quota(self) -> bool:
        """Whether it may evict by rules 7 and 9 only."""
        return "reservation" not in self.rights

    @property
    def request(self) -> Request:
        """Return the request as it is charged to quotas."""
        return Request(self.chain, self.need.total)


class Member(NamedTuple):
    """One member of a victim set: the workers that it gives up, and those on which it goes on (none: it is stopped)."""

    allocation: Allocation
    gone: tuple[WorkerPlacement, ...]
    kept: tuple[WorkerPlacement, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the workload is stopped."""
        return not self.kept

    @property
    def freed(self) -> tuple[WorkerPlacement, ...]:
        """Return the parts that become free."""
        return tuple(part for part in self.allocation.parts if part not in self.kept)

    @property
    def amount(self) -> int:
        """Return the milli-GPUs that are given up, with those of workers that cannot stay."""
        return self.allocation.amount - self.allocation.need.gpus * len(self.kept)

    @property
    def kind(self) -> int:
        """Return -1 for a withdrawn start, 0 for a gang that shrinks, 1 for a workload that is stopped."""
        return -1 if self.allocation.fresh else int(self.whole)


def stopped(victim: Allocation) -> Member:
    """Return the member that stops a workload, or withdraws its start."""
    return Member(victim, victim.parts)


def shrunk(cluster: Cluster, victim: Allocation, gone: Sequence[WorkerPlacement]) -> Member | None:
    """Return the member that goes on without some workers; None if fewer than `min_workers` could.

    A worker on a node that is not usable, or whose devices are gone, cannot stay either.
    """
    if victim.fresh or victim.fixed or not gone:
        return None
    gpus = victim.need.gpus
    stay = [p for p in victim.parts if cluster.usable(p.node) and len(p.devices) * p.milli_per_device == gpus]
    kept = tuple(part for part in stay if part not in gone)
    return Member(victim, tuple(gone), kept) if len(kept) >= victim.need.min_workers else None


Victims = tuple[Member, ...]


def without(cluster: Cluster, victims: Iterable[Member], released: bool = False) -> Cluster:
    """Return the cluster after these evictions; `released`: after the victims terminated, too (shrunk gangs go on)."""
    trial = cluster.copy()
    for member in victims:
        victim = member.allocation
        if victim.fresh or released:
            del trial.running[victim.id]
        else:
            trial.terminating.add(victim.id)
        if not victim.fresh:
            trial.shrink(victim.workload, () if released else member.kept)
        if released and member.kept:
            trial.terminating.discard(victim.id)
            trial.running[victim.id] = trial.allocation(victim.workload, member.kept)
    return trial


# Rights


def rights_of(cluster: Cluster, workload: Workload, need: Need, pool: str, in_quota: bool) -> list[Rights]:
    """Return the rights by which a workload may evict in a pool, those first that are tried first (rule 5.4).

    In quota, borrowers leave before lower priorities of its own team; over quota, all rights are compared together.
    """
    settings, chain = cluster.settings, cluster.chain(workload.team)
    own: Rights = ()
    if workload.kind == "job" and settings.in_team_preemption and not workload.non_preemptible:
        own = ("own_team",)
    if in_quota:
        return [("reservation",), ("reservation", *own)] if own else [("reservation",)]
    unlimited = over_limit(cluster, chain, pool, need.total, True) is None
    fair = unlimited and settings.fair_share == "reclaim"
    shared: Rights = ()
    if fair and within_fair_share(cluster, Request(chain, need.total), pool):
        shared = ("fair_share",)
    return [(*own, *shared)] if own or shared else []


# Candidates


def candidates(p: Preemptor) -> list[Allocation]:
    """Return the workloads that the preemptor could evict before any eviction, least protected first."""
    lines, shortages = blocking(p.cluster, p.chain, p.pool, p.need.total), shortages_of(p)
    able = [
        a
        for a in p.cluster.preemptible()
        if p.pool in a.pools
        or any(counts_on(p.cluster, line, a) for line in lines)
        or any(_holds_beside(p.cluster, a, *shortage) for shortage in shortages)
    ]
    able = [a for a in able if _may_evict(p, a) and has_right(p, a, ())]
    return sorted(able, key=lambda a: order(p, a))


class Shortage(NamedTuple):
    """What a node has too little of for the workers that its devices could take."""

    cpu: bool
    memory: bool
    pods: bool


def shortages_of(p: Preemptor) -> list[tuple[str, Shortage]]:
    """Return the nodes that share CPU, memory and pods with others and have too little of them; and of what."""
    names = [name for name in p.cluster.nodes_of(p.pool) if len(p.cluster.host_of(name)) > 1]
    shortages = [(name, shortage_on(p, name)) for name in names if p.cluster.suits(name, p.need)]
    return [(name, shortage) for name, shortage in shortages if any(shortage)]


def shortage_on(p: Preemptor, node: str) -> Shortage:
    """Return what a node has too little of, in the future and before any eviction."""
    need, free = p.need, p.cluster.free_later(node)
    by_devices = (
        len(free.devices) // need.whole_devices
        if need.whole_devices
        else len(free.devices) * (GPU // max(1, need.gpus))
    )
    many = min(need.min_workers, by_devices)
    return Shortage(free.cpu < many * need.cpu, free.memory < many * need.memory, free.pods < many)


def here_or_beside(p: Preemptor, node: str, able: Iterable[Allocation]) -> list[Allocation]:
    """Return the candidates on a node, and those on other nodes of its host that hold what it has too little of."""
    shortage = shortage_on(p, node)
    return [a for a in able if a.on(node) or _holds_beside(p.cluster, a, node, shortage)]


def _holds_beside(cluster: Cluster, victim: Allocation, node: str, shortage: Shortage) -> bool:
    """Whether a workload holds, on other nodes of a node's host, what that has too little of."""
    others = [name for name in cluster.host_of(node) if name != node]
    need = victim.need
    holds = (shortage.cpu and need.cpu) or (shortage.memory and need.memory) or shortage.pods
    return bool(holds) and any(part.node in others for part in victim.parts)


def _may_evict(p: Preemptor, victim: Allocation) -> bool:
    if p.withdraws and not victim.fresh:
        return False
    if p.workload.kind == "job" and is_protected(p.cluster, victim.workload):
        return False
    in_the_way = (p.need.cpu and victim.need.cpu) or (p.need.memory and victim.need.memory)
    in_the_way = in_the_way or any(p.cluster.free_later(part.node).pods < p.need.min_workers for part in victim.parts)
    in_the_way = in_the_way or p.pool not in victim.pools
    return bool(victim.amount) or (bool(in_the_way) and "reservation" in p.rights)


def is_protected(cluster: Cluster, victim: Workload) -> bool:
    """Whether a job runs for less than its profile's `min_runtime`."""
    if cluster.protection_at is not None:
        return (protected_until(cluster, victim) or 0.0) > cluster.protection_at
    profile = cluster.profiles.get(victim.profile)
    min_runtime = profile.min_runtime if profile else 0
    started = victim.running_since
    return bool(min_runtime) and (started is None or cluster.now - started < min_runtime)


def protected_until(cluster: Cluster, victim: Workload) -> float | None:
    """Return when a workload is as old as its profile's `min_runtime`; None where there is none."""
    profile = cluster.profiles.get(victim.profile)
    if profile is None or not profile.min_runtime:
        return None
    return (cluster.now if victim.running_since is None else victim.running_since) + profile.min_runtime


def _ranks_below(p: Preemptor, victim: Workload) -> bool:
    """Whether a job of the same team comes after the preemptor by priority, and by no rank before it (rule 5.7)."""
    cluster, mine = p.cluster, p.workload
    if victim.team != mine.team or cluster.priority(victim) >= cluster.priority(mine):
        return False
    ranks = [rank(cluster, w.team, cluster.profiles.get(w.profile), p.pool) for w in (victim, mine)]
    return ranks[0] >= ranks[1]


def has_right(p: Preemptor, victim: Allocation, gone: Sequence[tuple[Allocation, int]]) -> bool:
    """Whether the preemptor may evict a victim by any of its rights, with those in `gone` left out."""
    if always_has_right(p, victim) or ("fair_share" in p.rights and _above_fair_share(p, victim, gone)):
        return True
    return "reservation" in p.rights and is_above_reservation(p.cluster, victim, p.pool, p.request, gone)


def always_has_right(p: Preemptor, victim: Allocation) -> bool:
    """Whether the preemptor may evict a victim whatever its team uses."""
    if not victim.amount:
        return True
    own = victim.chain[0] == p.chain[0]
    return own and (
        "own_team_any_priority" in p.rights or ("own_team" in p.rights and _ranks_below(p, victim.workload))
    )


def right_over(p: Preemptor, victim: Allocation) -> Right:
    """Return the right by which a victim is evicted."""
    if victim.amount and always_has_right(p, victim):
        return "own_team_any_priority" if "own_team_any_priority" in p.rights else "own_team"
    return "reservation" if "reservation" in p.rights else "fair_share"


def _above_fair_share(p: Preemptor, victim: Allocation, gone: Sequence[tuple[Allocation, int]]) -> bool:
    name = victim.chain[0]
    if name == p.chain[0] or p.pool not in victim.pools:
        return False  # a fair share is one of the GPUs of a pool
    fair = p.fair.setdefault(name, fair_share(p.cluster, name, p.pool, p.request))
    less = sum(amount for allocation, amount in gone if name in allocation.chain)
    return over_reservation(p.cluster, victim.chain, p.pool, p.request) - less > fair


def legal_order(p: Preemptor, victims: Sequence[Member]) -> Victims | None:
    """Return a set in an order in which each may be evicted when its turn comes; None if there is none.

    Withdrawn starts go first: what only they put above its reservation is no candidate. Then those that have to be
    above something, smallest first. Where that is not legal, because they count on different lines, the order is found
    from its end: evicting less before more never takes a right away. A stopped elastic gang gives up its extra workers
    one by one, and its block of `min_workers` after them.
    """
    rest = sorted(
        (
            member.kind >= 0,
            always_has_right(p, member.allocation),
            amount,
            order(p, member.allocation),
            block,
            at,
        )
        for at, member in enumerate(victims)
        for amount, block in items(member)
    )
    ordered = _smallest_first(p, victims, rest) or _from_the_end(p, victims, rest)
    return tuple(victims[at] for at in dict.fromkeys(ordered)) if ordered else None


_Item = tuple[bool, bool, int, Key, bool, int]
"""Whether it is evicted, always legal, its amount, protection, whether it is a block, and the number of the member."""


def _smallest_first(p: Preemptor, victims: Sequence[Member], units: Sequence[_Item]) -> list[int]:
    """Return the members of the units in this order; empty if it is not legal."""
    gone: list[tuple[Allocation, int]] = []
    for _, _, amount, _, _, at in units:
        if not has_right(p, victims[at].allocation, gone):
            return []
        gone.append((victims[at].allocation, amount))
    return [unit[-1] for unit in units]


def _from_the_end(p: Preemptor, victims: Sequence[Member], units: Sequence[_Item]) -> list[int]:
    """Return the members of the units in a legal order, found from the last one on; empty if there is none."""
    rest, ordered = list(units), list[int]()
    while rest:
        for unit in reversed(rest):
            evicted, at, others = unit[0], unit[-1], [other for other in rest if other is not unit]
            too_early = any((other[0] and not evicted) or (other[-1] == at and other[4]) for other in others)
            gone = [(victims[other[-1]].allocation, other[2]) for other in others]
            if not too_early and has_right(p, victims[at].allocation, gone):
                rest, ordered = others, [at, *ordered]
                break
        else:
            return []
    return ordered


def items(member: Member) -> list[tuple[int, bool]]:
    """Split a member into (milli-GPUs, whether it is a block): extra workers one by one, the rest at once."""
    victim, per_worker = member.allocation, member.allocation.need.gpus
    if not member.whole:
        more = len(member.gone) - 1  # those that cannot stay leave with the first
        return [(member.amount - per_worker * more, False), *[(per_worker, False)] * more]
    extra = 0 if victim.fresh or victim.fixed else max(0, len(victim.parts) - victim.need.min_workers)
    return [*[(per_worker, False)] * extra, (member.amount - per_worker * extra, True)]


# Order


def order(p: Preemptor, victim: Allocation) -> tuple[int, int, int, float, float, float, str]:
    """Return the sort key of a victim, least protected first (rule 5.3); it ends in the id."""
    cluster, workload = p.cluster, victim.workload
    started = workload.running_since if workload.running_since is not None else cluster.now
    cheapest = cluster.settings.victim_order == "cheapest"
    return (
        workload.protected_with(cluster.team(workload.team).priority),
        -shares(cluster, workload.team, victim.nearest(p.pool))[-1],
        cluster.priority(workload),
        _lost(cluster, victim) if cheapest else 0,
        -started,
        -workload.submitted_at,
        workload.id,
    )


def _lost(cluster: Cluster, victim: Allocation) -> float:
    """Return the work that an eviction would lose, in milli-GPU seconds."""
    if victim.fresh:
        return 0.0
    since = [t for t in (victim.workload.last_checkpoint_at, victim.workload.started_at) if t is not None]
    return victim.amount * (cluster.now - max(since)) if since else 0.0


def set_key(p: Preemptor, victims: Sequence[Member]) -> Key:
    """Return the sort key of a victim set, the best first, cascades ignored: rules 5.5 and 5.4 (b) to (e)."""
    evicted = [m for m in victims if m.kind >= 0 and m.allocation.workload.has_run]
    ordered = sorted(((m.kind, *order(p, m.allocation)) for m in victims), reverse=True)
    workers = sorted(((m.allocation.id, part.worker) for m in victims if m.kind == 0 for part in m.gone), reverse=True)
    return (
        any(m.kind == 1 for m in evicted),
        sum(m.amount for m in evicted),
        sum(m.amount for m in victims if m not in evicted),
        [item[:4] for item in ordered],
        len(victims),
        ordered,
        [(name, -worker) for name, worker in workers],
    )
