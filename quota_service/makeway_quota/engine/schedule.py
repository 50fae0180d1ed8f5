"""Make one plan: the admission cycle, step by step (rules 3 to 5 of docs/explanation/engine.md).

Called by the service, the simulator and what-if questions. Pure: the same snapshot always gives the same plan.
"""

from __future__ import annotations

from .cycle.demand import find_demand
from .cycle.growth import grow
from .cycle.preemptors import replace_preemptors
from .cycle.reasons import explain, explain_awaiting, refuse
from .cycle.relocation import relocate
from .cycle.rounds import MAX_ROUNDS, Rounds
from .cycle.scaling import scale
from .cycle.sparing import Eviction, cancel_moves_to_same_place, cancel_needless_evictions
from .index.cluster import Cluster
from .index.groups import PendingWorkloads, WorkloadGroup
from .plan import Plan
from .plan_builder import PlanBuilder
from .snapshot import Snapshot


def schedule(snapshot: Snapshot) -> Plan:
    """Return the plan for a snapshot: starts, evictions, moves, scale-up and reasons to wait."""
    cluster = Cluster(snapshot)
    return decide(cluster, PendingWorkloads(cluster))


def decide(cluster: Cluster, groups: PendingWorkloads, why: bool = True, demand: bool = True) -> Plan:
    """Return the plan for a cluster and its groups; the caller undoes what this changes in both.

    Without `why`, only nominated workloads get a reason for waiting. Without `demand`, the plan does not say what
    machines of autoscaled pools are for, and what no node can run is too large where `max_nodes` is not known; with
    neither, it does not say how many nodes they need.
    """
    cluster.launches = demand
    builder = PlanBuilder(cluster)
    _withdraw_inadmissible(cluster, builder, groups)
    heads = groups.begin()
    rounds = Rounds(cluster, builder, heads, heads if groups.any_starving() else [], why)
    rounds.run()
    _grow(cluster, builder, heads, rounds)
    if _withdraw_needless(builder, rounds, groups):
        _withdraw_needless(builder, rounds, groups)  # what was spared once, and evicted again, may be needless by now
    cancel_moves_to_same_place(builder)
    replace_preemptors(builder)
    builder.suspend_holds()
    refused = _refuse(cluster, builder, heads)
    waiting = [group for group in heads if group not in refused] if refused else heads
    if why:
        explain(cluster, builder, waiting)
        explain_awaiting(cluster, builder)
    if (why or demand) and any(pool.pool.kind == "autoscaled" for pool in cluster.pools.values()):
        scale(cluster, builder, waiting, why)
    if demand and any(pool.pool.kind == "autoscaled" for pool in cluster.pools.values()):
        ending = bool(cluster.terminating or builder.evicted or builder.moved or cluster.late.nodes)
        builder.demand = find_demand(cluster, waiting, ending, builder.awaiting, builder.refused)
    return builder.plan()


def _withdraw_inadmissible(cluster: Cluster, builder: PlanBuilder, groups: PendingWorkloads) -> None:
    """Withdraw the nominations of workloads whose queue is closed or paused, and record the reason."""
    for name, waiting in groups.inadmissible.items():
        cluster.withdraw_nomination(cluster.workloads[name])
        builder.wait(waiting)


def _grow(cluster: Cluster, builder: PlanBuilder, heads: list[WorkloadGroup], rounds: Rounds) -> None:
    """Start elastic gangs with more workers (rule 4); another round follows, since their teams' shares grew."""
    if grow(cluster, builder, heads):
        rounds.run()


def _withdraw_needless(builder: PlanBuilder, rounds: Rounds, groups: PendingWorkloads) -> bool:
    """Spare victims that a later decision made superfluous (rule 5.4), and move those that get room (rule 5.6).

    The GPUs that this frees may start other work. Each is spared once; return whether any was.
    """
    withdrawn_evictions: set[Eviction] = set()
    for _ in range(MAX_ROUNDS):
        if not cancel_needless_evictions(builder, withdrawn_evictions) and not relocate(builder, groups):
            break
        rounds.run()
    return bool(withdrawn_evictions)


def _refuse(cluster: Cluster, builder: PlanBuilder, heads: list[WorkloadGroup]) -> list[WorkloadGroup]:
    """Refuse the sessions that are not in quota in any of their pools (rule 2); return their groups."""
    refused = [
        group
        for group in heads
        if group.is_protected_session and not group.may_borrow and not group.in_quota_somewhere()
    ]
    for group in refused:
        refuse(cluster, builder, group)
    return refused
