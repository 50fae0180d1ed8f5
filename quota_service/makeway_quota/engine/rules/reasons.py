"""Why a workload waits: one code, one sentence, its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..index.cluster import Cluster
from ..index.nodes import UNLIMITED, NodeState, PoolState, hosts
from ..index.pending import Alike, Told
from ..index.queues import Queue
from ..phrases import amounts, count, gpus, listed, number, seconds, who
from ..placement.fit import kept_back
from ..plan import Code, Number, Refusal
from ..plan_builder import PlanBuilder, quota_numbers
from ..request import Need
from ..state import GPU
from .forecast import not_before
from .hold import Hold
from .quota import Line

_TELLING: dict[Code, int] = {"held": 0, "node_failed": 2, "too_large": 3}
"""Of several pools the one is named where GPUs idle, else the first that could ever do."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why it cannot start in one pool."""

    code: Code
    rule: str
    message: str
    numbers: dict[str, Number]


def refuse(cluster: Cluster, builder: PlanBuilder, queue: Queue) -> None:
    """Tell sessions beyond the reservation so, with who uses it."""
    account = queue.account
    pool = queue.pools[0]
    for workload in queue.members():
        reserved, used = quota_numbers(account, pool.pool.name, True)
        guarantor = account.guarantor(pool.pool.name) or account
        holders = _holders(cluster, guarantor.policy.name, pool)
        team = guarantor.policy.label
        if not reserved:
            message = f"{team} has no guaranteed GPUs in pool {pool.pool.name}."
        elif queue.need.total > reserved:
            message = f"This session needs {gpus(queue.need.total)}; {team} has {number(reserved)} guaranteed."
        else:
            verb = "is" if used == GPU else "are"
            message = f"{number(used)} of your {number(reserved)} guaranteed GPUs {verb} in use"
            message = f"{message}: {amounts(holders)}" if holders else message
            message += f"; this session needs {number(queue.need.total)}." if used < reserved else "."
        builder.refused[workload.id] = Refusal(
            workload.id,
            "not_in_quota",
            "session_in_quota",
            message,
            {
                "needs": number(queue.need.total),
                "reserved": number(reserved),
                "guaranteed_in_use": number(used),
                "in_use_by": tuple(f"{name} {number(milli)}" for name, milli in holders),
            },
        )
        builder.progress.decisions += 1


def _holders(cluster: Cluster, policy: str, pool: PoolState) -> list[tuple[str, int]]:
    """List who uses the guaranteed GPUs of a policy, most first."""
    found: dict[str, int] = {}
    allocations = [*cluster.allocations.values(), *cluster.nominations.values()]
    lines = cluster.ledger.account(policy).reserving(pool.pool.name)
    for allocation in allocations:
        workload = allocation.workload
        if not workload.non_preemptible or not any(line.quota.covers(allocation.pool.pool.name) for line in lines):
            continue
        if any(account.policy.name == policy for account in cluster.account(workload).chain):
            name = workload.owner or workload.id
            found[name] = found.get(name, 0) + allocation.amount
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))


def explain(cluster: Cluster, builder: PlanBuilder, waiting: Iterable[Queue]) -> None:
    """Say of everybody in these queues why they wait; who waited too long is not kept from what is held for it."""
    known: dict[int, Told] = {}
    holds = {hold.queue.number: hold for hold in builder.holds.values()}
    for queue in waiting:
        members = queue.members()
        if queue.number in holds:
            hold = holds[queue.number]
            members = tuple(each for each in members if each is not hold.workload)
            builder.groups.append(Alike(-queue.number, (hold.workload,), _told(cluster, builder, queue, hold)))
        if members:
            told = known.get(queue.alike)
            if told is None:
                told = known[queue.alike] = _told(cluster, builder, queue)
            builder.groups.append(Alike(queue.number, members, told))


def _told(cluster: Cluster, builder: PlanBuilder, queue: Queue, hold: Hold | None = None) -> Told:
    able = [(pool, why(cluster, builder, queue, pool, hold is not None and pool is hold.pool)) for pool in queue.pools]
    pool, reason = min(able, key=lambda each: _TELLING.get(each[1].code, 1))
    earliest = not_before(cluster, queue, pool, reason.code)
    more = ""
    if hold is not None and hold.nodes:
        more = f" {listed(hold.nodes)} {'is' if len(hold.nodes) == 1 else 'are'} held for it."
    return Told(reason.code, reason.rule, reason.message, reason.numbers, earliest, more)


def why(cluster: Cluster, builder: PlanBuilder, queue: Queue, pool: PoolState, mine: bool = False) -> Reason:
    """Find the reason in one pool: what can never be, then what is not allowed, then what is not there.

    `mine`: for the one that what is held in the pool is held for.
    """
    return (
        _never_fits(cluster, queue, pool)
        or _not_allowed(cluster, queue, pool)
        or _static(cluster, queue, pool)
        or (None if mine else _held(cluster, builder, queue, pool))
        or _promised(cluster, queue, pool)
        or _not_there(cluster, builder, queue, pool)
    )


def _asks(queue: Queue) -> str:
    need = queue.need
    if need.least == 1:
        return f"this {queue.kind} needs {number(need.gpus)}"
    return f"this {queue.kind} needs {number(need.total)} ({need.least} × {number(need.gpus)})"


def _never_fits(cluster: Cluster, queue: Queue, pool: PoolState) -> Reason | None:
    need, name = queue.need, pool.pool.name
    found = cluster.capacities.get((name, need))
    if found is None:
        each = [(min(_capacity(node, need), need.least), node.usable) for node in pool.nodes]
        found = sum(workers for workers, _ in each), sum(workers for workers, usable in each if usable)
        cluster.capacities[name, need] = found
    every, usable = found
    if every < need.least and not (pool.pool.kind == "autoscaled" and pool.pool.max_nodes):
        most = max((len(node.open) for node in pool.nodes), default=0)
        message = f"Too large for pool {name}: its largest node has {count(most, 'GPU')}; {_asks(queue)}."
        if most * GPU >= need.gpus:
            message = f"Too large for pool {name}: all its nodes together have no room for it; {_asks(queue)}."
        return Reason("too_large", "place", message, {"needs": number(need.total), "largest_node": most})
    if usable < need.least <= every:
        down = sorted(node.node.name for node in pool.nodes if not node.usable)
        verb = "is" if len(down) == 1 else "are"
        message = f"{listed(down)} of pool {name} {verb} not available; {_asks(queue)} and fits nowhere else."
        return Reason("node_failed", "place", message, {"needs": number(need.total), "nodes": tuple(down)})
    return None


def _capacity(node: NodeState, need: Need) -> int:
    """Count the workers that the node would host, were it empty."""
    if need.models and node.node.model not in need.models:
        return 0
    devices = len(node.open) - len(node.node.foreign_devices)
    cpu, memory = node.node.cpu or UNLIMITED, node.node.memory or UNLIMITED
    return hosts(need, [GPU] * devices, devices, cpu, memory)


def _not_allowed(cluster: Cluster, queue: Queue, pool: PoolState) -> Reason | None:
    account, amount, name = queue.account, queue.need.total, pool.pool.name
    in_quota = cluster.ledger.in_quota(account, name, amount, queue.non_preemptible)
    if amount and not in_quota and (queue.non_preemptible or account.policy.weight == "None"):
        reserved, used = quota_numbers(account, name, queue.non_preemptible)
        rule = "it may not be preempted, so it" if queue.non_preemptible else f"{account.policy.label}"
        message = (
            f"{account.policy.label} uses {number(used)} of its {number(reserved)} reserved "
            f"{'GPU' if reserved == GPU else 'GPUs'}; {_asks(queue)}, and {rule} never runs over quota."
        )
        return Reason("never_over_quota", "over_quota", message, _quota(amount, used, reserved))
    line = cluster.ledger.over_limit(account, name, amount) if amount else None
    if line is not None and line.quota.limit is not None:
        used, limit = max(line.now, line.future), line.quota.limit
        team = line.account.policy.label
        message = f"{team} uses {number(used)} of its limit of {gpus(limit)}; {_asks(queue)}."
        if line.future > line.now:
            message = f"{team} uses or was promised {number(used)} of its limit of {gpus(limit)}; {_asks(queue)}."
        numbers: dict[str, Number] = {"needs": number(amount), "uses": number(used), "limit": number(limit)}
        return Reason("limit", "limit", message, {**numbers, "team": line.account.policy.name})
    capacity = pool.pool.capacity
    if capacity is not None and amount and cluster.over_capacity(pool, amount):
        used = max(cluster.pool_now[name], cluster.pool_future[name])
        message = f"Pool {name} runs {number(used)} of its capacity of {gpus(capacity)}; {_asks(queue)}."
        numbers = {"needs": number(amount), "uses": number(used), "capacity": number(capacity), "pool": name}
        return Reason("pool_capacity", "capacity", message, numbers)
    return None


def _quota(amount: int, used: int, reserved: int) -> dict[str, Number]:
    return {"needs": number(amount), "uses": number(used), "reserved": number(reserved)}


def _held(cluster: Cluster, builder: PlanBuilder, queue: Queue, pool: PoolState) -> Reason | None:
    """Name the one that waited too long, where it is what keeps others from idle GPUs."""
    need, elsewhere = queue.need, next(iter(builder.holds.values()), None)
    hold = builder.holds.get(pool.pool.name, elsewhere)
    if hold is None or not _fits(cluster, pool, need, "free"):
        return None
    if cluster.ledger.in_quota(queue.account, pool.pool.name, need.total, queue.non_preemptible):
        return None
    whom = f"held for {who(hold.workload, hold.queue.account.policy.label)}"
    since = f"which has waited {seconds(cluster.now - hold.workload.submitted_at)}; {_asks(queue)}."
    numbers: dict[str, Number] = {"needs": number(need.total), "held_for": hold.workload.id, "nodes": tuple(hold.nodes)}
    line = hold.line_in_the_way(queue)
    if line is not None and line.quota.limit is not None:
        uses = f"{line.account.policy.label} uses {number(line.now)} of its limit of {gpus(line.quota.limit)}"
        verb = "is" if hold.queue.need.total == GPU else "are"
        message = f"{uses}, and {number(hold.queue.need.total)} {verb} {whom}, {since}"
    elif hold.nodes:
        verb = "is" if len(hold.nodes) == 1 else "are"
        message = f"{listed(hold.nodes)} {verb} {whom}, {since}"
    else:
        message = f"The capacity of pool {hold.pool.pool.name} is {whom}, {since}"
    return Reason("held", "starvation", message, numbers)


def _static(cluster: Cluster, queue: Queue, pool: PoolState) -> Reason | None:
    """Name the static quota that keeps it from GPUs that are idle."""
    need, name = queue.need, pool.pool.name
    line = _keeper(cluster, queue, pool)
    if line is not None and _fits(cluster, pool, need, "free"):
        kept, team = max(line.held(False), line.held(True)), line.account.policy.label
        verb = "is" if kept == GPU else "are"
        message = f"{gpus(kept)} of pool {name} {verb} kept free for {team}, who lends none of them; {_asks(queue)}."
        if line.spare < line.quota.reserved:
            message = f"{gpus(kept)} of pool {name} {verb} kept free for {team}; {_asks(queue)}."
        numbers: dict[str, Number] = {"needs": number(need.total), "kept": number(kept)}
        return Reason("held", "lend", message, {**numbers, "team": line.account.policy.name})
    return None


def _keeper(cluster: Cluster, queue: Queue, pool: PoolState) -> Line | None:
    account, amount = queue.account, queue.need.total
    now = kept_back(cluster, account, pool, amount, False) if amount else None
    return now or (kept_back(cluster, account, pool, amount, True) if amount else None)


def _promised(cluster: Cluster, queue: Queue, pool: PoolState) -> Reason | None:
    """Name those who were promised the GPUs that are idle."""
    need, name = queue.need, pool.pool.name
    names = _nominees(cluster, pool)  # nobody: what is idle is held for this very workload until it is enough
    if names and _keeper(cluster, queue, pool) is None and _fits(cluster, pool, need, "open"):
        idle = sum(sum(node.open) for node in pool.nodes if node.usable)
        verb = "is" if idle == GPU else "are"
        message = f"{gpus(idle)} of pool {name} {verb} idle but promised to {listed(names)}; {_asks(queue)}."
        numbers: dict[str, Number] = {"needs": number(need.total), "idle": number(idle), "evicted_for": tuple(names)}
        return Reason("held", "promise", message, numbers)
    return None


def _nominees(cluster: Cluster, pool: PoolState) -> list[str]:
    asked = ("nominees", pool.pool.name)
    if asked not in cluster.answers:
        cluster.answers[asked] = sorted(i for i, nomination in cluster.nominations.items() if nomination.pool is pool)
    found: list[str] = cluster.answers[asked]
    return found


def _fits(cluster: Cluster, pool: PoolState, need: Need, which: str) -> bool:
    """Say whether it fits on what is free to all, idle (`open`), or was free when this plan began (`first`)."""
    asked = (which, pool.pool.name, need)
    if asked not in cluster.answers:
        cluster.answers[asked] = _fits_somewhere(pool, need, which)
    return bool(cluster.answers[asked])


def _fits_somewhere(pool: PoolState, need: Need, which: str) -> bool:
    found = 0
    for node in _candidates(pool, need, which):
        if not node.suits(need):
            continue
        left = node.open if which == "open" else node.free
        if which == "first":
            left = pool.first.get(node.position, left)
        cpu, memory = node.cpu_open, node.memory_open
        if which == "first":
            cpu = memory = UNLIMITED
        found += hosts(need, left, left.count(GPU), cpu, memory)
        if found >= need.least:
            return True
    return False


def _candidates(pool: PoolState, need: Need, which: str) -> Iterable[NodeState]:
    """Leave out the nodes that have not enough whole devices, where that is known."""
    if not need.whole or which == "open":
        return pool.nodes
    then = pool.first if which == "first" else {}
    now = (at for bucket in pool.by_free[need.whole :] for at in bucket if at not in then)
    return (pool.nodes[at] for at in (*then, *now))


def _not_there(cluster: Cluster, builder: PlanBuilder, queue: Queue, pool: PoolState) -> Reason:
    need, name = queue.need, pool.pool.name
    free = max(0, pool.free)
    numbers: dict[str, Number] = {"needs": number(need.total), "free": number(free), "total": number(pool.total)}
    ahead = builder.ahead.get(name, [])
    if ahead and _fits(cluster, pool, need, "first"):
        verb = "comes" if len(ahead) == 1 else "come"
        message = (
            f"{count(len(ahead), 'workload')} that {verb} first in pool {name} took its free GPUs "
            f"({listed(ahead)}); {number(free)} {'is' if free == GPU else 'are'} left, {_asks(queue)}."
        )
        return Reason("outranked", "order", message, {**numbers, "ahead": len(ahead)})
    if free < need.total or not free:
        verb = "is" if free == GPU else "are"
        message = f"{number(free)} of the {gpus(pool.total)} of pool {name} {verb} free; {_asks(queue)}."
        return Reason("no_free_gpus", "place", message + _no_victims(cluster, queue, pool), numbers)
    most = max((size for size, bucket in enumerate(pool.by_free) if bucket), default=0)
    verb = "is" if free == GPU else "are"
    message = f"{gpus(free)} of pool {name} {verb} free, but at most {most} on one node; {_asks(queue)}."
    if most * GPU >= need.gpus:
        but = "not with the CPU and memory that it needs"
        if need.least > 1:
            but = f"not in {need.least} blocks of {number(need.gpus)}"
        message = f"{gpus(free)} of pool {name} {verb} free, but {but}; {_asks(queue)}."
    message += _no_victims(cluster, queue, pool)
    return Reason("fragmented", "place", message, {**numbers, "most_on_a_node": most})


def _no_victims(cluster: Cluster, queue: Queue, pool: PoolState) -> str:
    if not queue.total or not cluster.ledger.in_quota(
        queue.account, pool.pool.name, queue.total, queue.non_preemptible
    ):
        return ""
    if queue.patient:
        return " It waits for free GPUs before anybody has to leave for it."
    return " It is within the reservation, but nobody who may be stopped would make room for it."
