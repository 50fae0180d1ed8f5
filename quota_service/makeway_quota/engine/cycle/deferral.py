"""Find work that may evict others, only later: once `min_runtime` protects them no more, or `reclaim_after` has passed.

Called for work that waits once a plan is made (reasons.py); changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup, age
from ..index.nodes import PoolState
from ..placement.fit import find_placement, within_limits
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
    """Why a group evicts nothing yet. `until`: when the protection ends; `reclaim_after` ends for each member alone."""

    code: Code
    rule: str
    fact: Fact
    numbers: dict[str, Number]
    until: float | None = None


def deferral(
    cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, workload: Workload | None = None
) -> Deferral | None:
    """Return why a group waits although it may evict others for its oldest workload later; None if it may not.

    `workload`: one of the group that is to be asked for instead.
    """
    if not group.total or not (group.reclaim_deferred or (group.kind == "job" and cluster.protecting)):
        return None
    workload = workload or min(group.members(), key=age)
    moves = [pool for pool in group.pools if guaranteed(cluster, group, pool)]
    ways = _ways(cluster, builder, group, workload, moves)

    def evicted(at: float) -> list[Workload] | None:
        with cluster.protection_at(at):
            return _evicted(cluster, group, workload, ways, moves)

    patience = cluster.profiles[workload.profile].reclaim_after
    patient_until = workload.submitted_at + patience if group.reclaim_deferred else cluster.now
    waits = Deferral("patience", "reclaim_after", Fact("patience", {"wait": patience}), {"reclaim_after": patience})
    if not ways or evicted(cluster.now) is not None:
        return waits if ways and group.reclaim_deferred else None
    ends = _ends(cluster) if group.kind == "job" else []
    victims = evicted(ends[-1]) if ends else None
    if victims is None:
        return None
    first, last = 0, len(ends) - 1
    while first < last:
        middle = (first + last) // 2
        earlier = evicted(ends[middle])
        first, last = (first, middle) if earlier is not None else (middle + 1, last)
        victims = victims if earlier is None else earlier
    if group.reclaim_deferred and ends[first] <= patient_until:
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
    cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, workload: Workload, in_quota: Sequence[PoolState]
) -> list[Way]:
    """Return the pools and the rights by which a workload may evict there, within its reservation and beyond."""
    result = [(p, rights) for p in in_quota for rights in rights_of(cluster, workload, group.account, p, True)]
    if group.non_preemptible:
        result += [(pool, ("reservation", "own_team_any_priority")) for pool in in_quota]
    for pool in group.pools if group.may_borrow else ():
        coming = within_limits(cluster, group.account, pool, group.total, True) and find_placement(
            pool, group.need, True
        )
        if pool.pool.name not in builder.holds and not coming:
            result += [(pool, rights) for rights in rights_of(cluster, workload, group.account, pool, False)]
    return result


def _evicted(
    cluster: Cluster, group: WorkloadGroup, workload: Workload, ways: Sequence[Way], moves: Sequence[PoolState]
) -> list[Workload] | None:
    """Return the workloads that would move or be evicted; None if the workload would have no room."""
    for pool in moves:
        change = consolidate(Preemptor(cluster, workload, group.need, group.account, pool, ("reservation",)))
        if change is not None:
            for moving in change.moves:
                cluster.withdraw_nomination(moving.allocation.workload)
                cluster.restore(moving.allocation)
            return [moving.allocation.workload for moving in change.moves]
    for pool, rights in ways:
        preemptor = Preemptor(cluster, workload, group.need, group.account, pool, rights)
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
        "team": last.team,
        "kind": last.kind,
        "owner": last.owner,
        "gpus": from_milli(cluster.allocations[last.id].milli_gpus),
        "min_runtime": cluster.profiles[last.profile].min_runtime,
        "others": len(protected) - 1,
    }
    numbers: dict[str, Number] = {"protected": tuple(sorted(w.id for w in protected)), "until": until}
    return Deferral("protected", "min_runtime", Fact("protected", values), numbers, until)
