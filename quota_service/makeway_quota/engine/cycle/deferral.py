"""Find work that may evict others, only later: once `min_runtime` protects them no more, or `reclaim_after` has passed.

Called for work that waits once a plan is made (reasons.py); changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..index.cluster import Cluster
from ..index.nodes import PoolState
from ..index.queues import Queue, age
from ..placement.fit import allowed, find
from ..plan import Code, Fact, Number
from ..plan_builder import PlanBuilder
from ..rules.consolidation import consolidate
from ..rules.reclaim import reclaim, restore_all
from ..rules.victims.preemptor import Preemptor, Rights
from ..rules.victims.rights import rights_of
from ..snapshot import Workload, from_milli
from .serving import guaranteed

DEFERRABLE: frozenset[Code] = frozenset({"limit", "pool_capacity", "no_free_gpus", "fragmented", "outranked"})
"""The reasons of work that could start by evicting others."""
Way = tuple[PoolState, Rights]


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why a queue evicts nothing yet. `until`: when the protection ends; `reclaim_after` ends for each member alone."""

    code: Code
    rule: str
    fact: Fact
    numbers: dict[str, Number]
    until: float | None = None


def deferral(cluster: Cluster, builder: PlanBuilder, queue: Queue) -> Deferral | None:
    """Return why a queue waits although it may evict others for its oldest workload later; None if it may not."""
    if not queue.total or not (queue.patient or (queue.kind == "job" and cluster.protecting)):
        return None
    workload = min(queue.members(), key=age)
    moves = [pool for pool in queue.pools if guaranteed(cluster, queue, pool)]
    ways = _ways(cluster, builder, queue, workload, moves)

    def evicted(at: float) -> list[Workload] | None:
        with cluster.protection_at(at):
            return _evicted(cluster, queue, workload, ways, moves)

    patience = cluster.profiles[workload.profile].reclaim_after
    patient_until = workload.submitted_at + patience if queue.patient else cluster.now
    waits = Deferral("patience", "reclaim_after", Fact("patience", {"wait": patience}), {"reclaim_after": patience})
    if not ways or evicted(cluster.now) is not None:
        return waits if ways and queue.patient else None
    ends = _ends(cluster) if queue.kind == "job" else []
    victims = evicted(ends[-1]) if ends else None
    if victims is None:
        return None
    first, last = 0, len(ends) - 1
    while first < last:
        middle = (first + last) // 2
        earlier = evicted(ends[middle])
        first, last = (first, middle) if earlier is not None else (middle + 1, last)
        victims = victims if earlier is None else earlier
    if queue.patient and ends[first] <= patient_until:
        return waits
    return _protected(cluster, victims, ends[first])


def _ends(cluster: Cluster) -> list[float]:
    """Return the times at which a job that is protected now is protected no more."""
    if ("protected",) not in cluster.answers:
        protected = [w for a in cluster.allocations.values() if cluster.is_protected(w := a.workload)]
        cluster.answers["protected",] = sorted({cluster.protected_until(workload) for workload in protected})
    result: list[float] = cluster.answers["protected",]
    return result


def _ways(
    cluster: Cluster, builder: PlanBuilder, queue: Queue, workload: Workload, in_quota: Sequence[PoolState]
) -> list[Way]:
    """Return the pools and the rights by which a workload may evict there, within its reservation and beyond."""
    result = [(p, rights) for p in in_quota for rights in rights_of(cluster, workload, queue.account, p, True)]
    if queue.non_preemptible:
        result += [(pool, ("reservation", "own_team_any_priority")) for pool in in_quota]
    for pool in queue.pools if queue.borrows else ():
        coming = allowed(cluster, queue.account, pool, queue.total, True) and find(pool, queue.need, True)
        if pool.pool.name not in builder.holds and not coming:
            result += [(pool, rights) for rights in rights_of(cluster, workload, queue.account, pool, False)]
    return result


def _evicted(
    cluster: Cluster, queue: Queue, workload: Workload, ways: Sequence[Way], moves: Sequence[PoolState]
) -> list[Workload] | None:
    """Return the workloads that would move or be evicted; None if the workload would have no room."""
    for pool in moves:
        change = consolidate(Preemptor(cluster, workload, queue.need, queue.account, pool, ("reservation",)))
        if change is not None:
            for moving in change.moves:
                cluster.withdraw_nomination(moving.allocation.workload)
                cluster.restore(moving.allocation)
            return [moving.allocation.workload for moving in change.moves]
    for pool, rights in ways:
        preemptor = Preemptor(cluster, workload, queue.need, queue.account, pool, rights)
        choice = reclaim(preemptor)
        if choice is not None:
            restore_all(preemptor, choice.victims)
            return [victim.allocation.workload for victim in choice.victims]
    return None


def _protected(cluster: Cluster, victims: Sequence[Workload], until: float) -> Deferral:
    """Return the deferral by the protection that ends last."""
    protected = [w for w in victims if cluster.is_protected(w)]
    last = max(protected, key=lambda w: (cluster.protected_until(w), w.id))
    values: dict[str, Number] = {
        "victim": last.id,
        "team": last.policy,
        "kind": last.kind,
        "owner": last.owner,
        "gpus": from_milli(cluster.allocations[last.id].amount),
        "min_runtime": cluster.profiles[last.profile].min_runtime,
        "others": len(protected) - 1,
    }
    numbers: dict[str, Number] = {"protected": tuple(sorted(w.id for w in protected)), "until": until}
    return Deferral("protected", "min_runtime", Fact("protected", values), numbers, until)
