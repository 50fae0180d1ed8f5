"""Find why workloads wait, as codes, facts and numbers; `makeway_quota.wording` renders the sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..index.cluster import Cluster
from ..index.devices import UNLIMITED, hosts
from ..index.groups import WorkloadGroup
from ..index.ledger import Guarantee, LineState
from ..index.nodes import NodeState, PoolState, WorkerPlacement, placement_of
from ..index.pending import PendingGroup, PendingReason
from ..placement.fit import static_quota
from ..plan import Code, Fact, Facts, Number, Refusal
from ..plan_builder import PlanBuilder, stuck_in
from ..request import Need
from ..rules.forecast import not_before
from ..rules.hold import Hold
from ..snapshot import GPU, Workload, from_milli
from .deferral import DEFERRABLE, Deferral, deferral

_REPORT_ORDER: dict[Code, int] = {"held": 0, "static_quota": 0, "nominated": 0, "node_failed": 2, "too_large": 3}
"""Order of the pools' reasons: the pool with idle GPUs is reported, else the first that could fit the request."""


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a workload cannot start in one pool."""

    code: Code
    rule: str
    facts: Facts
    numbers: dict[str, Number]


def refuse(cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup) -> None:
    """Refuse the sessions of a group: they are beyond the reservation; the facts name the owners that use it."""
    account = group.account
    pool = group.pools[0]
    for workload in group.members():
        guarantee = account.tightest(pool.pool.name, True)
        reserved, used = (guarantee.reserved, guarantee.used(True)) if guarantee else (0, 0)
        whose = (guarantee.line.account if guarantee else account).team.name
        holders = tuple((name, from_milli(milli)) for name, milli in _holders(cluster, guarantee))
        code = (
            "no_reservation"
            if not reserved
            else "session_too_large"
            if group.need.total > reserved
            else "guarantee_used"
        )
        numbers: dict[str, Number] = {
            "needs": from_milli(group.need.total),
            "reserved": from_milli(reserved),
            "guaranteed_in_use": from_milli(used),
            "in_use_by": tuple(f"{name} {amount}" for name, amount in holders),
        }
        values: dict[str, Number] = {**numbers, "team": whose, "pool": pool.pool.name}
        values["level"] = "team" if whose == account.team.name else "department"
        if guarantee is not None and guarantee.beyond:
            values["level"] = "rest"
        fact = Fact(code, values)
        builder.refused[workload.id] = Refusal(workload.id, "not_in_quota", "session_in_quota", (fact,), numbers)
        builder.progress.decisions += 1


def _holders(cluster: Cluster, guarantee: Guarantee | None) -> list[tuple[str, int]]:
    """Return the owners that hold guaranteed GPUs and how many, most first."""
    held: dict[str, int] = {}
    allocations = [*cluster.allocations.values(), *cluster.nominations.values()]
    for allocation in allocations if guarantee else ():
        workload = allocation.workload
        account = cluster.account(workload)
        for pool, amount in allocation.shares or ((allocation.pool, allocation.milli_gpus),):
            if workload.non_preemptible and amount and guarantee and guarantee.counts(account, pool.pool.name):
                name = workload.owner or workload.id
                held[name] = held.get(name, 0) + amount
    return sorted(held.items(), key=lambda item: (-item[1], item[0]))


def explain(cluster: Cluster, builder: PlanBuilder, waiting: Iterable[WorkloadGroup]) -> None:
    """Record why the workloads of these groups wait; a hold never blocks the workload that it is for."""
    known: dict[int, PendingReason] = {}
    deferrals: dict[tuple[object, ...], Deferral | None] = {}
    holds = {hold.group.number: hold for hold in builder.holds.values()}
    for group in waiting:
        members = group.members()
        if group.number in holds:
            hold = holds[group.number]
            members = tuple(workload for workload in members if workload is not hold.workload)
            reason = _deferred(cluster, builder, group, _reason(cluster, builder, group, hold), deferrals)
            builder.groups.append(PendingGroup(-group.number, (hold.workload,), reason))
        if members:
            pending_reason = known.get(group.reason_class)
            if pending_reason is None:
                pending_reason = known[group.reason_class] = _reason(cluster, builder, group)
            if group.reclaim_deferred or cluster.protecting:
                pending_reason = _deferred(cluster, builder, group, pending_reason, deferrals)
            builder.groups.append(PendingGroup(group.number, members, pending_reason))


def explain_awaiting(cluster: Cluster, builder: PlanBuilder) -> None:
    """Record which nodes that boot a workload waits for; where it may evict others later, that stays its reason.

    The first of a group is asked for all.
    """
    later: dict[int, PendingReason | None] = {}
    for workload, group in builder.awaiting.values():
        if group.number not in later:
            later[group.number] = _evicts_later(cluster, builder, group, workload)
        parts = cluster.nominations[workload.id].parts
        reason = later[group.number] or _awaiting(cluster, group, parts)
        builder.wait(replace(reason.to(workload), awaits=placement_of(parts)))


def _evicts_later(
    cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, workload: Workload
) -> PendingReason | None:
    """Return why a workload evicts nothing yet, as if it were not nominated to nodes that boot; None if it may not."""
    if not (group.reclaim_deferred or cluster.protecting):
        return None
    answers, cluster.answers = cluster.answers, {}
    parts = cluster.withdraw_nomination(workload)
    reason = _reason(cluster, builder, group)
    later = deferral(cluster, builder, group, workload) if reason.code in DEFERRABLE else None
    cluster.nominate(workload, group.need, parts)
    cluster.answers = answers
    return None if later is None else _with_deferral(reason, later, group)


def _awaiting(cluster: Cluster, group: WorkloadGroup, parts: Sequence[WorkerPlacement]) -> PendingReason:
    booting = {part.node.node.name: part.node.node.ready_at or 0.0 for part in parts if part.node.boots}
    at = max(booting.values())
    values: dict[str, Number] = {
        "needs": from_milli(group.need.total),
        "kind": group.kind,
        "nodes": tuple(sorted(booting)),
        "within": max(0.0, at - cluster.now),
    }
    numbers: dict[str, Number] = {"gpus": values["needs"], "pool": parts[0].node.pool.pool.name}
    return PendingReason("waiting_for_node", "boot", (Fact("awaits_nodes", values),), numbers, at)


def _deferred(
    cluster: Cluster,
    builder: PlanBuilder,
    group: WorkloadGroup,
    reason: PendingReason,
    known: dict[tuple[object, ...], Deferral | None],
) -> PendingReason:
    """Return the reason of a group, or the rule by which it may evict only later (5.3, 5.8) instead."""
    if reason.code not in DEFERRABLE:
        return reason
    alike = (
        group.rights_class,
        group.request_class,
        group.priority,
        group.kind,
        group.profile.name,
        group.reclaim_deferred,
    )
    if group.reclaim_deferred or alike not in known:
        known[alike] = deferral(cluster, builder, group)
    later = known[alike]
    return reason if later is None else _with_deferral(reason, later, group)


def _with_deferral(reason: PendingReason, later: Deferral, group: WorkloadGroup) -> PendingReason:
    facts = (*(fact for fact in reason.facts if fact.code != "no_victims"), later.fact)
    numbers = {**reason.numbers, **later.numbers}
    patience = group.profile.reclaim_after if group.reclaim_deferred else 0.0
    return PendingReason(later.code, later.rule, facts, numbers, later.until, reason.more, patience)


def _reason(cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, hold: Hold | None = None) -> PendingReason:
    able = [(pool, why(cluster, builder, group, pool, hold is not None and pool is hold.pool)) for pool in group.pools]
    pool, reason = min(able, key=lambda item: _REPORT_ORDER.get(item[1].code, 1))
    earliest = not_before(cluster, group, pool, reason.code)
    more: Facts = ()
    if hold is not None and hold.nodes:
        more = (Fact("nodes_held", {"nodes": tuple(hold.nodes)}),)
    return PendingReason(reason.code, reason.rule, reason.facts, reason.numbers, earliest, more)


def why(cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, pool: PoolState, mine: bool = False) -> Reason:
    """Return the reason in one pool: it never fits, else it is not allowed, else there are no free GPUs.

    `mine`: the hold of the pool is for this workload.
    """
    return (
        _never_fits(cluster, group, pool)
        or _not_allowed(cluster, group, pool)
        or _static(cluster, group, pool)
        or (None if mine else _held(cluster, builder, group, pool))
        or (_beside_guaranteed(cluster, group, pool) if group.need.only_spare else None)
        or _nominated(cluster, group, pool)
        or _not_there(cluster, builder, group, pool)
    )


def _request(group: WorkloadGroup) -> dict[str, Number]:
    """Return the values that describe the request in every fact; `each`, `cpu` (cores) and `memory` (MiB) by worker."""
    need = group.need
    return {
        "kind": group.kind,
        "needs": from_milli(need.total),
        "workers": need.min_workers,
        "each": from_milli(need.gpus),
        "cpu": from_milli(need.cpu),
        "memory": need.memory,
    }


def _never_fits(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> Reason | None:
    need, name = group.need, pool.pool.name
    capacity = cluster.capacities.capacity(pool, need)
    every, usable = capacity.every, capacity.up
    growing = pool.pool.kind == "autoscaled" and (pool.pool.max_nodes or (cluster.launches and not need.session))
    if every < need.min_workers and not growing:
        able = [node for node in pool.nodes if node.node.sessions or not need.session]
        if pool.nodes and not able:
            fact = Fact("only_jobs", {**_request(group), "pool": name})
            return Reason("too_large", "place", (fact,), {"needs": from_milli(need.total)})
        largest = max((len(node.unused) for node in able), default=0)
        code = "too_large_together" if largest * GPU >= need.gpus else "too_large"
        fact = Fact(code, {**_request(group), "pool": name, "largest_node": largest})
        return Reason("too_large", "place", (fact,), {"needs": from_milli(need.total), "largest_node": largest})
    if usable < need.min_workers <= every:
        down = sorted(node.node.name for node in pool.nodes if not node.usable)
        fact = Fact("node_failed", {**_request(group), "pool": name, "nodes": tuple(down)})
        return Reason("node_failed", "place", (fact,), {"needs": from_milli(need.total), "nodes": tuple(down)})
    return None


def _not_allowed(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> Reason | None:
    account, amount, name = group.account, group.need.total, pool.pool.name
    in_quota = cluster.ledger.in_quota(account, name, amount, group.non_preemptible)
    if amount and not in_quota and (group.non_preemptible or account.team.weight == "None"):
        tightest = account.tightest(name, group.non_preemptible)
        reserved, used = (tightest.reserved, tightest.used(group.non_preemptible)) if tightest else (0, 0)
        used = used if tightest else account.used_in_pool.get(name, 0)
        code = "never_over_quota" if group.non_preemptible else "team_never_over_quota"
        whose = tightest.line.account.team.name if tightest else account.team.name
        values = {"team": whose, "uses": from_milli(used), "reserved": from_milli(reserved)}
        fact = Fact(code, {**_request(group), **values})
        return Reason("never_over_quota", "over_quota", (fact,), _quota(amount, used, reserved))
    line = cluster.ledger.over_limit(account, name, amount) if amount else None
    if line is not None and line.quota.limit is not None:
        used, limit = max(line.usage, line.future_usage), line.quota.limit
        numbers: dict[str, Number] = {"needs": from_milli(amount), "uses": from_milli(used), "limit": from_milli(limit)}
        numbers["team"] = line.account.team.name
        code = "limit_with_nominations" if line.future_usage > line.usage else "limit"
        return Reason("limit", "limit", (Fact(code, {**_request(group), **numbers}),), numbers)
    capacity = pool.pool.capacity
    if capacity is not None and amount and cluster.over_capacity(pool, amount):
        used = max(cluster.pool_usage[name], cluster.future_pool_usage[name])
        numbers = {
            "needs": from_milli(amount),
            "uses": from_milli(used),
            "capacity": from_milli(capacity),
            "pool": name,
        }
        return Reason("pool_capacity", "capacity", (Fact("pool_capacity", {**_request(group), **numbers}),), numbers)
    return None


def _quota(amount: int, used: int, reserved: int) -> dict[str, Number]:
    return {"needs": from_milli(amount), "uses": from_milli(used), "reserved": from_milli(reserved)}


def _held(cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, pool: PoolState) -> Reason | None:
    """Return the hold that keeps the workload from idle GPUs, if that is the reason."""
    need, elsewhere = group.need, next(iter(builder.holds.values()), None)
    hold = builder.holds.get(pool.pool.name, elsewhere)
    if hold is None or not _fits(cluster, pool, need, "free"):
        return None
    if cluster.ledger.in_quota(group.account, pool.pool.name, need.total, group.non_preemptible):
        return None
    numbers: dict[str, Number] = {
        "needs": from_milli(need.total),
        "held_for": hold.workload.id,
        "nodes": tuple(hold.nodes),
    }
    values: dict[str, Number] = {
        **_request(group),
        **numbers,
        "held_kind": hold.workload.kind,
        "held_owner": hold.workload.owner,
        "held_team": hold.group.account.team.name,
        "held_needs": from_milli(hold.group.need.total),
        "waited": cluster.now - hold.workload.submitted_at,
        "pool": hold.pool.pool.name,
    }
    line = hold.line_in_the_way(group)
    code = "held_nodes" if hold.nodes else "held_capacity"
    if line is not None and line.quota.limit is not None:
        code = "held_limit"
        values |= {
            "team": line.account.team.name,
            "uses": from_milli(line.usage),
            "limit": from_milli(line.quota.limit),
        }
    return Reason("held", "starvation", (Fact(code, values),), numbers)


def _beside_guaranteed(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> Reason | None:
    """Return the free guaranteed GPUs that need the CPU and memory which would be enough, if they are the reason."""
    need = group.need
    if not _fits(cluster, pool, need, "spare"):
        return None
    beside = [cluster.pools[other] for other in pool.peer_pools]
    keeping = [other for other in (pool, *beside) if min(other.guaranteed(), max(other.free, other.free_later)) > 0]
    pool = next(iter(keeping), pool)
    name = pool.pool.name
    lines = [(account, line) for account in cluster.ledger.accounts.values() for line in account.reserving(name)]
    teams = dict.fromkeys(a.team.name for a, line in lines if line.quota.reserved > max(line.usage, line.future_usage))
    smallest = next(filter(None, (pool.smallest(node.node.model) for node in pool.nodes if node.usable)), need)
    kept = from_milli(min(pool.guaranteed(), max(pool.free, pool.free_later, 0)))
    numbers: dict[str, Number] = {"needs": 0, "kept": kept, "guaranteed_to": tuple(sorted(teams)), "pool": name}
    per_worker: dict[str, Number] = {
        "each_gpus": from_milli(smallest.gpus),
        "each_cpu": from_milli(smallest.cpu),
        "each_memory": smallest.memory,
    }
    fact = Fact("beside_guaranteed", {**_request(group), **numbers, **per_worker})
    return Reason("held", "guaranteed_gpus", (fact,), {**numbers, **per_worker})


def _static(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> Reason | None:
    """Return the static quota that keeps the workload from idle GPUs, if that is the reason."""
    need, name = group.need, pool.pool.name
    line = _keeper(cluster, group, pool)
    if line is not None and _fits(cluster, pool, need, "free"):
        kept = max(line.kept_free(False), line.kept_free(True))
        numbers: dict[str, Number] = {"needs": from_milli(need.total), "kept": from_milli(kept)}
        numbers["team"] = line.account.team.name
        code = "kept_partly" if line.unlent < line.quota.reserved else "kept"
        return Reason("static_quota", "lend", (Fact(code, {**_request(group), **numbers, "pool": name}),), numbers)
    return None


def _keeper(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> LineState | None:
    account, amount = group.account, group.need.total
    now = static_quota(cluster, account, pool, amount, False) if amount else None
    return now or (static_quota(cluster, account, pool, amount, True) if amount else None)


def _nominated(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> Reason | None:
    """Return the nominations that keep the workload from idle GPUs, if they are the reason."""
    need, name = group.need, pool.pool.name
    names = _nominees(cluster, pool)  # none: the idle GPUs are held for this very workload
    if names and _keeper(cluster, group, pool) is None and _fits(cluster, pool, need, "unused"):
        idle = sum(milli for node in pool.nodes if node.usable for milli in node.unused if milli > 0)
        numbers: dict[str, Number] = {
            "needs": from_milli(need.total),
            "idle": from_milli(idle),
            "evicted_for": tuple(names),
        }
        fact = Fact("nominated", {**_request(group), "idle": from_milli(idle), "nominees": tuple(names), "pool": name})
        return Reason("nominated", "nomination", (fact,), numbers)
    return None


def _nominees(cluster: Cluster, pool: PoolState) -> list[str]:
    asked = ("nominees", pool.pool.name)
    if asked not in cluster.answers:
        cluster.answers[asked] = sorted(i for i, nomination in cluster.nominations.items() if nomination.pool is pool)
    result: list[str] = cluster.answers[asked]
    return result


def _fits(cluster: Cluster, pool: PoolState, need: Need, which: str) -> bool:
    """Whether a request fits on what is free, `unused`, free whatever runs (`pods`), or was free at `first`.

    `spare`: CPU and memory are not nominated, either.
    """
    asked = (which, pool.pool.name, need)
    if asked not in cluster.answers:
        cluster.answers[asked] = _fits_somewhere(cluster, pool, need, which)
    return bool(cluster.answers[asked])


def _fits_somewhere(cluster: Cluster, pool: PoolState, need: Need, which: str) -> bool:
    workers = 0
    for node in _candidates(cluster, pool, need, which):
        if not node.suits(need):
            continue
        devices = node.unused if which == "unused" else node.free
        if which == "first":
            devices = pool.first.get(node.position, devices)
        cpu, memory, pods = node.cpu_unused, node.memory_unused, node.pods_unused
        if which == "pods":
            pods = UNLIMITED
        elif which == "first":
            cpu = memory = pods = UNLIMITED
        elif which == "spare":
            cpu, memory = min(cpu, node.cpu_free_later), min(memory, node.memory_free_later)
            pods = min(pods, node.pods_free_later)
        workers += hosts(need, devices, devices.count(GPU), cpu, memory, pods)
        if workers >= need.min_workers:
            return True
    return False


def _candidates(cluster: Cluster, pool: PoolState, need: Need, which: str) -> Iterable[NodeState]:
    """Return the nodes with enough whole devices, where that is known, else all."""
    if not need.whole_devices:
        return pool.nodes
    if which == "unused":
        asked = ("idle nodes", pool.pool.name)
        if asked not in cluster.answers:
            cluster.answers[asked] = [node for node in pool.nodes if node.usable and GPU in node.unused]
        idle: list[NodeState] = cluster.answers[asked]
        return idle
    then = pool.first if which == "first" else {}
    now = (at for bucket in pool.by_free[need.whole_devices :] for at in bucket if at not in then)
    return (pool.nodes[at] for at in (*then, *now))


def _not_there(cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, pool: PoolState) -> Reason:
    need, name = group.need, pool.pool.name
    free, total, buckets = max(0, pool.free), pool.total, pool.by_free
    if need.session and pool.limits_sessions:
        able = pool.for_request(need)
        free, total = max(0, sum(sum(node.free) for node in able)), sum(node.size for node in able)
        buckets = [[node.position for node in able if node.whole_free == size] for size in range(len(buckets))]
    numbers: dict[str, Number] = {
        "needs": from_milli(need.total),
        "free": from_milli(free),
        "total": from_milli(total),
    }
    values: dict[str, Number] = {**_request(group), **numbers, "pool": name}
    ahead = builder.served_in_pool.get(name, [])
    if ahead and _fits(cluster, pool, need, "first"):
        fact = Fact("outranked", {**values, "ahead": tuple(ahead)})
        return Reason("outranked", "order", (fact,), {**numbers, "ahead": len(ahead)})
    if free < need.total and (reason := _stuck(cluster, group, pool, values, free)) is not None:
        return reason
    full, beside = _full(cluster, pool, need), _beside(cluster, pool)
    if full and (free < need.total or not free):  # only work without GPUs fits by GPUs
        fact = Fact("no_free_pods", {**values, "nodes": full})
        return Reason("no_free_gpus", "place", (fact, *_no_victims(cluster, group, pool)), numbers)
    if free < need.total or not free:
        return Reason(
            "no_free_gpus", "place", (Fact("no_free_gpus", values), *_no_victims(cluster, group, pool)), numbers
        )
    largest = max((size for size, bucket in enumerate(buckets) if bucket), default=0)
    code = "fragmented"
    if largest * GPU >= need.gpus:
        code = "no_free_pods" if full else "fragmented_blocks" if need.min_workers > 1 else "no_cpu_or_memory"
    fact = Fact(code, {**values, "most_on_a_node": largest, "nodes": full})
    facts = (fact, *(() if code == "fragmented" else beside), *_no_victims(cluster, group, pool))
    return Reason("fragmented", "place", facts, {**numbers, "most_on_a_node": largest})


def _beside(cluster: Cluster, pool: PoolState) -> Facts:
    """Return which other pools' work uses the CPU, memory and pods of the pool's nodes; nothing where none does."""
    asked = ("beside", pool.pool.name)
    if asked not in cluster.answers:
        others = (other for node in pool.nodes if node.usable for other in node.host_peers if any(other.own))
        cluster.answers[asked] = tuple(sorted({other.pool.pool.name for other in others}))
    pools: tuple[str, ...] = cluster.answers[asked]
    return (Fact("beside", {"pools": pools}),) if pools else ()


def _full(cluster: Cluster, pool: PoolState, need: Need) -> tuple[str, ...]:
    """Return the nodes that run all pods that they may, if the request would fit but for these."""
    if not pool.limits_pods or not _fits(cluster, pool, need, "pods"):
        return ()
    usable = [node for node in pool.nodes if node.usable]
    return tuple(node.node.name for node in usable if min(node.pods_unused, node.pods_free_later) <= 0)


def _stuck(
    cluster: Cluster, group: WorkloadGroup, pool: PoolState, values: dict[str, Number], free: int
) -> Reason | None:
    """Return what does not end, if its GPUs would be enough for work in quota."""
    need, name = group.need, pool.pool.name
    asked = ("stuck", name)
    if asked not in cluster.answers:
        cluster.answers[asked] = stuck_in(cluster, pool)
    facts: Facts
    facts, amount = cluster.answers[asked]
    enough = need.total and facts and free + amount >= need.total
    if not enough or not cluster.ledger.in_quota(group.account, name, need.total, group.non_preemptible):
        return None
    stuck = from_milli(amount)
    numbers: dict[str, Number] = {"needs": from_milli(need.total), "stuck": stuck, "pool": name}
    return Reason("stuck", "terminating", (Fact("stuck", {**values, "stuck": stuck}), *facts), numbers)


def _no_victims(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> Facts:
    if not group.total or not cluster.ledger.in_quota(
        group.account, pool.pool.name, group.total, group.non_preemptible
    ):
        return ()
    return (Fact("no_victims"),)
