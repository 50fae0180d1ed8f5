"""Write the decisions of the reference engine as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..plan import Code, Evict, Fact, LineUsage, Move, Number, Plan, Refusal, Start, Waiting
from ..snapshot import GPU, Snapshot
from .cycle import Cycle
from .decisions import Decisions
from .deferral import DEFERRABLE, deferral
from .demand import find_demand
from .reasons import Reason, reason
from .scaling import scale
from .state.cluster import Cluster, WorkerPlacement
from .state.groups import WorkloadGroup
from .state.quota import TeamQuotaLine, counts
from .victims.victims import Right

_RULES: dict[Right | None, str] = {
    "reservation": "reclaim",
    "own_team_any_priority": "reclaim_own_policy",
    "own_team": "preempt_in_team",
    "fair_share": "reclaim_fair_share",
    None: "consolidate",
}


def schedule(snapshot: Snapshot) -> Plan:
    """Decide which workloads start, are evicted, move and wait. The same snapshot always gives the same plan."""
    cluster = Cluster(snapshot)
    cycle = Cycle(cluster)
    cycle.run()
    decisions = cycle.decisions
    refused = [q for q in cycle.waiting if _refused(cycle, q)]
    waiting = {
        workload.id: (group, reason(decisions, group, _held_for(decisions, group, workload.id)))
        for group in cycle.waiting
        if group not in refused
        for workload in group.members
    }
    waiting = _deferred(cycle, waiting)
    waits = {name: group for name, (group, _) in waiting.items()}
    nodes, codes = scale(cluster, waits)
    pending = {name: _waiting(name, *why) for name, (_, why) in waiting.items()}
    pending |= {name: _waiting(name, code, "scale_up") for name, code in codes.items()}
    pending |= {name: _waiting(name, *why) for name, why in cycle.inadmissible.items()}
    pending |= {name: _reclaiming(decisions, name) for name in decisions.nominated}
    pending |= _awaiting(cycle)
    told = cluster.live
    running = [w.id for w in told.values() if w.state in ("starting", "running")]
    return Plan(
        start=tuple(_start(decisions, name) for name in decisions.started),
        evict=tuple(_evict(decisions, name) for name, eviction in decisions.evicted.items() if not eviction.to),
        move=tuple(_move(decisions, name) for name, eviction in decisions.evicted.items() if eviction.to),
        scale=tuple(nodes),
        pending=tuple(pending[name] for name in sorted(pending)),
        refused=tuple(_refusal(w.id) for q in refused for w in q.members),
        keep=tuple(name for name in running if name not in decisions.evicted),
        terminating=tuple(w.id for w in told.values() if w.state == "checkpointing"),
        usage=tuple(
            _usage(cluster, TeamQuotaLine(name, quota))
            for name, team in cluster.policies.items()
            for quota in team.quotas
        ),
        demand=find_demand(cluster, waits, decisions.awaiting),
    )


def _refused(cycle: Cycle, group: WorkloadGroup) -> bool:
    """Whether sessions are refused: they are not in quota in any pool, and never run over quota."""
    return (
        group.is_protected_session
        and not group.may_borrow
        and not any(cycle.in_quota(group, pool) for pool in group.pools)
    )


def _deferred(
    cycle: Cycle, waiting: Mapping[str, tuple[WorkloadGroup, Reason]]
) -> dict[str, tuple[WorkloadGroup, Reason]]:
    """Return why workloads wait, with `min_runtime` or `reclaim_after` where these are in the way of an eviction."""
    able = {group for group, (code, _) in waiting.values() if code in DEFERRABLE}
    later = {group: deferral(cycle, group) for group in able}
    return {
        name: (group, later.get(group) or why if why[0] in DEFERRABLE else why)
        for name, (group, why) in waiting.items()
    }


def _held_for(decisions: Decisions, group: WorkloadGroup, workload: str) -> str | None:
    return next((h.pool for h in decisions.holds.values() if h.group is group and h.workload.id == workload), None)


def _start(decisions: Decisions, name: str) -> Start:
    cluster, in_quota = decisions.cluster, decisions.started[name]
    allocation = cluster.running[name]
    rule = "over_quota"
    if in_quota:
        rule = "session_in_quota" if allocation.workload.non_preemptible else "job_in_quota"
    nodes = sorted({part.node for part in allocation.parts})
    fact = Fact("plain_start", {"nodes": tuple(nodes), "in_quota": in_quota})
    numbers: dict[str, Number] = {"gpus": allocation.amount / GPU, "pool": allocation.pool}
    return Start(name, allocation.pool, cluster.placement(allocation.parts), in_quota, rule, (fact,), numbers)


def _evict(decisions: Decisions, name: str) -> Evict:
    cluster, eviction = decisions.cluster, decisions.evicted[name]
    allocation = cluster.running[name]
    deadline = cluster.now + cluster.grace(allocation.workload)
    numbers: dict[str, Number] = {"frees": allocation.amount / GPU}
    fact = Fact("plain_evict", {**numbers, "preemptor": eviction.preemptor})
    return Evict(name, eviction.preemptor, deadline, _RULES[eviction.right], (fact,), numbers)


def _move(decisions: Decisions, name: str) -> Move:
    cluster, eviction = decisions.cluster, decisions.evicted[name]
    allocation = cluster.running[name]
    deadline = cluster.now + cluster.grace(allocation.workload)
    rule = "consolidate" if eviction.right is None else "shrink"
    nodes = tuple(sorted({part.node for part in eviction.to}))
    values: dict[str, Number] = {"workers": len(eviction.to), "of": len(allocation.parts), "nodes": nodes}
    fact = Fact("plain_move", {**values, "preemptor": eviction.preemptor})
    source, to = cluster.placement(allocation.parts), cluster.placement(eviction.to)
    return Move(name, eviction.preemptor, source, to, deadline, rule, (fact,), {"workers": len(eviction.to)})


def _waiting(name: str, code: Code, rule: str) -> Waiting:
    return Waiting(name, code, rule, (Fact("plain_wait", {"code": code}),), {})


def _reclaiming(decisions: Decisions, name: str) -> Waiting:
    cluster = decisions.cluster
    mine = cluster.nominations[name]
    waits_for = sorted(
        a.id for a in cluster.running.values() if a.id in cluster.terminating and _blocks(decisions, a.id, name)
    )
    ends = [_gone_by(cluster, victim) for victim in waits_for]
    latest = max(ends, default=cluster.now)
    nodes = tuple(sorted({part.node for part in mine.parts}))
    fact = Fact("plain_nomination", {"nodes": nodes, "victims": tuple(waits_for)})
    placement = cluster.placement(mine.parts)
    return Waiting(name, "reclaiming", "nomination", (fact,), {}, latest, placement, tuple(waits_for))


def _awaiting(cycle: Cycle) -> dict[str, Waiting]:
    """Return which nodes workloads wait for; where a group may evict others later, that stays its reason."""
    cluster, decisions, result = cycle.cluster, cycle.decisions, dict[str, Waiting]()
    later: dict[WorkloadGroup, tuple[Code, str] | None] = {}
    for name, group in decisions.awaiting.items():
        mine = cluster.nominations[name]
        if group not in later:
            del cluster.nominations[name]
            able = reason(decisions, group, None)[0] in DEFERRABLE
            later[group] = deferral(cycle, replace(group, members=[mine.workload])) if able else None
            cluster.nominations[name] = mine
        waiting = _waiting(name, *(later[group] or ("waiting_for_node", "boot")))
        at = max(cluster.nodes[part.node].ready_at or 0.0 for part in mine.parts if cluster.nodes[part.node].boots)
        awaits = cluster.placement(mine.parts)
        result[name] = replace(waiting, not_before=None if later[group] else at, awaits=awaits)
    return result


def _blocks(decisions: Decisions, other: str, name: str) -> bool:
    """Whether a workload that terminates is in the way of a nomination: evicted for it, or on one of its devices."""
    cluster = decisions.cluster
    change = decisions.evicted.get(other)
    if cluster.live[other].evicted_for == name or (change is not None and change.preemptor == name):
        return True
    parts = cluster.nominations[name].parts
    return any(_overlap(mine, theirs) for mine in parts for theirs in cluster.running[other].parts)


def _overlap(mine: WorkerPlacement, theirs: WorkerPlacement) -> bool:
    return mine.node == theirs.node and (not mine.devices or bool(set(mine.devices) & set(theirs.devices)))


def _gone_by(cluster: Cluster, name: str) -> float:
    workload = cluster.live[name]
    if workload.state == "checkpointing" and workload.deadline is not None:
        return workload.deadline
    return cluster.now + cluster.grace(workload)


def _refusal(name: str) -> Refusal:
    return Refusal(name, "not_in_quota", "session_in_quota", (Fact("plain_refusal"),), {})


def _usage(cluster: Cluster, line: TeamQuotaLine) -> LineUsage:
    counted, quota = counts(cluster, line), line.quota
    return LineUsage(line.team, quota.pools, quota.reserved, quota.limit, counted.usage, counted.non_preemptible)
