"""Candidates for eviction, legal victim sets, and the order among them (engine rules 5.1 to 5.5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..request import Need
from ..snapshot import Workload
from .cluster import Allocation, Cluster, Part
from .queues import Key, rank
from .quota import Request, above, fair_share, over, shares

Right = Literal["reservation", "own_policy", "own_team", "fair_share"]
"""The rule by which a workload may evict others: 5.1, 5.1 for its own policy, 5.7 and 5.9."""


@dataclass(frozen=True, slots=True)
class Preemptor:
    """A workload that may evict others in a pool, and the right by which it may."""

    cluster: Cluster
    workload: Workload
    need: Need
    levels: tuple[str, ...]
    pool: str
    right: Right
    fair: dict[str, int] = field(default_factory=dict)
    """Policy to its fair share beyond its reservation, as it is before the first victim."""

    @property
    def request(self) -> Request:
        """Return the request as it is charged to quotas."""
        return Request(self.levels, self.need.total)


class Member(NamedTuple):
    """One member of a victim set: the workers that it gives up, and those on which it goes on (none: it is stopped)."""

    allocation: Allocation
    gone: tuple[Part, ...]
    kept: tuple[Part, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the workload is stopped."""
        return not self.kept

    @property
    def freed(self) -> tuple[Part, ...]:
        """Return the parts that become free."""
        return tuple(part for part in self.allocation.parts if part not in self.kept)

    @property
    def amount(self) -> int:
        """Return the milli-GPUs that are given up."""
        return self.allocation.amount if self.whole else self.allocation.need.gpus * len(self.gone)

    @property
    def kind(self) -> int:
        """Return -1 for a withdrawn start, 0 for a gang that shrinks, 1 for a workload that is stopped."""
        return -1 if self.allocation.fresh else int(self.whole)


def stopped(victim: Allocation) -> Member:
    """Return the member that stops a workload, or withdraws its start."""
    return Member(victim, victim.parts)


def shrunk(cluster: Cluster, victim: Allocation, gone: Sequence[Part]) -> Member | None:
    """Return the member that goes on without some workers; None if fewer than `min_workers` could.

    A worker on a node that is not usable, or whose devices are gone, cannot stay either.
    """
    if victim.fresh or victim.fixed or not gone:
        return None
    gpus = victim.need.gpus
    stay = [p for p in victim.parts if cluster.usable(p.node) and len(p.devices) * p.milli == gpus]
    kept = tuple(part for part in stay if part not in gone)
    return Member(victim, tuple(gone), kept) if len(kept) >= victim.need.least else None


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
        if member.kept:
            trial.nominate(victim.workload, member.kept)
    return trial


# Candidates


def candidates(p: Preemptor) -> list[Allocation]:
    """Return the workloads that the preemptor could evict before any eviction, least protected first."""
    able = [a for a in p.cluster.preemptible(p.pool) if _may_evict(p, a) and entitled(p, a, ())]
    return sorted(able, key=lambda a: order(p, a))


def _may_evict(p: Preemptor, victim: Allocation) -> bool:
    if p.workload.kind == "job" and _protected(p.cluster, victim.workload):
        return False
    if p.right == "own_team":
        return bool(victim.amount) and _ranks_below(p, victim.workload)
    if victim.amount:
        return True
    in_the_way = (p.need.cpu and victim.need.cpu) or (p.need.memory and victim.need.memory)
    return bool(in_the_way) and p.right in ("reservation", "own_policy")


def _protected(cluster: Cluster, victim: Workload) -> bool:
    """Whether a job runs for less than its profile's `min_runtime`."""
    profile = cluster.profiles.get(victim.profile)
    least = profile.min_runtime if profile else 0
    return bool(least) and (victim.started_at is None or cluster.now - victim.started_at < least)


def _ranks_below(p: Preemptor, victim: Workload) -> bool:
    """Whether a job of the same team comes after the preemptor by priority, and by no rank before it (rule 5.7)."""
    cluster, mine = p.cluster, p.workload
    if victim.policy != mine.policy or cluster.priority(victim) >= cluster.priority(mine):
        return False
    ranks = [rank(cluster, w.policy, cluster.profiles.get(w.profile), p.pool) for w in (victim, mine)]
    return ranks[0] >= ranks[1]


def entitled(p: Preemptor, victim: Allocation, gone: Sequence[tuple[Allocation, int]]) -> bool:
    """Whether the preemptor may evict from the victim's policy, with those in `gone` left out."""
    if p.right == "own_team" or not victim.amount:
        return True
    if p.right == "own_policy" and victim.levels[0] == p.levels[0]:
        return True
    if p.right == "fair_share":
        name = victim.levels[0]
        if name == p.levels[0]:
            return False
        fair = p.fair.setdefault(name, fair_share(p.cluster, name, p.pool, p.request))
        less = sum(amount for allocation, amount in gone if name in allocation.levels)
        return over(p.cluster, victim.levels, p.pool, p.request) - less > fair
    return above(p.cluster, victim.levels, p.pool, p.request, gone)


def legal_order(p: Preemptor, victims: Sequence[Member]) -> Victims | None:
    """Return a set in an order in which each may be evicted when its turn comes; None if there is none.

    Withdrawn starts go first: what only they put above its reservation is no candidate. Then smallest first is exact,
    for evicting less before more never takes a right away. A stopped elastic gang gives up its
    extra workers one by one, and its block of `min_workers` after them.
    """
    rest = sorted(
        (member.kind >= 0, amount, block, order(p, member.allocation), at)
        for at, member in enumerate(victims)
        for amount, block in items(member)
    )
    gone: list[tuple[Allocation, int]] = []
    done: list[int] = []
    for _ in range(len(rest)):
        following = next((item for item in rest if entitled(p, victims[item[4]].allocation, gone)), None)
        if following is None:
            return None
        rest.remove(following)
        gone.append((victims[following[4]].allocation, following[1]))
        done.append(following[4])
    return tuple(victims[at] for at in dict.fromkeys(done))


def items(member: Member) -> list[tuple[int, bool]]:
    """Split a member into (milli-GPUs, whether it is a block): extra workers one by one, the rest at once."""
    victim = member.allocation
    indivisible = victim.fresh or victim.fixed
    extra = len(member.gone) if not member.whole else 0 if indivisible else len(victim.parts) - victim.need.least
    extra = max(0, extra)
    rest = member.amount - extra * victim.need.gpus
    items = [(victim.need.gpus, False)] * extra
    return [*items, (rest, True)] if member.whole else items


# Order


def order(p: Preemptor, victim: Allocation) -> tuple[int, int, int, float, float, float, str]:
    """Return the sort key of a victim, least protected first (rule 5.3); it ends in the id."""
    cluster, workload = p.cluster, victim.workload
    started = workload.started_at if workload.started_at is not None else cluster.now
    cheapest = cluster.settings.victim_order == "cheapest"
    return (
        cluster.policy(workload.policy).priority,
        -shares(cluster, workload.policy, p.pool)[-1],
        cluster.priority(workload),
        _lost(cluster, victim) if cheapest else 0,
        -started,
        -workload.submitted_at,
        workload.id,
    )


def _lost(cluster: Cluster, victim: Allocation) -> float:
    """Return the work that an eviction would lose, in milli-GPU seconds."""
    since = [t for t in (victim.workload.last_checkpoint_at, victim.workload.started_at) if t is not None]
    return victim.amount * (cluster.now - max(since)) if since else 0.0


def set_key(p: Preemptor, victims: Sequence[Member]) -> Key:
    """Return the sort key of a victim set, the best first, cascades ignored: rules 5.5 and 5.4 (b) to (e)."""
    evicted = [m for m in victims if m.kind >= 0]
    ordered = sorted(((m.kind, *order(p, m.allocation)) for m in victims), reverse=True)
    workers = sorted(((m.allocation.id, part.worker) for m in victims if m.kind == 0 for part in m.gone), reverse=True)
    return (
        any(m.kind == 1 for m in victims),
        sum(m.amount for m in evicted),
        sum(m.amount for m in victims if m.kind < 0),
        [each[:4] for each in ordered],
        len(victims),
        ordered,
        [(name, -worker) for name, worker in workers],
    )
