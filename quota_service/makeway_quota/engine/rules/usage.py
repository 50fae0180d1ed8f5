"""Count reserved, used, borrowed, lent and free GPUs, per quota line and per team."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..index.cluster import Cluster
from ..index.ledger import Account, Ledger, LineState, kept_free
from ..placement.fit import static_quota
from ..plan import LineUsage, TeamUsage
from ..snapshot import Snapshot


def line_usage(cluster: Cluster) -> tuple[LineUsage, ...]:
    """Return what every quota line counts, in the order of team names."""
    return tuple([line.reported or _report(name, line) for name, line in cluster.ledger.lines])


def _report(team: str, line: LineState) -> LineUsage:
    line.reported = LineUsage(
        team, line.quota.pools, line.quota.reserved, line.quota.limit, line.usage, line.non_preemptible
    )
    return line.reported


@dataclass(frozen=True, slots=True)
class TeamCount:
    """What one team reserves, uses, borrows and lends, in milli-GPUs; see `TeamUsage`."""

    reserved: int
    limit: int | None
    guaranteed: int
    in_quota: int
    borrowed: int
    lent: int
    borrowed_from: tuple[tuple[str, int], ...] = ()


UsageByPool = Mapping[str, Mapping[str, tuple[int, int]]]
"""Team to pool to milli-GPUs (of non-preemptible work, of all work), its child teams' work included."""


def usage_by_team(snapshot: Snapshot) -> tuple[TeamUsage, ...]:
    """Count reserved, used, borrowed, lent and free GPUs of every team, in the order of names."""
    cluster = Cluster(snapshot)
    totals = {name: pool.total for name, pool in cluster.pools.items()}
    counted = count_usage(cluster.ledger, totals, _usage_by_pool(cluster))
    return tuple(_team(cluster, name, count) for name, count in counted.items())


def count_usage(ledger: Ledger, totals: Mapping[str, int], used: UsageByPool) -> dict[str, TeamCount]:
    """Count every team's usage, by name, from a ledger, the GPUs of every pool and what is used there."""
    accounts = sorted(ledger.accounts.items())
    idle = {name: sum(max(0, line.quota.reserved - line.usage) for line in a.lines) for name, a in accounts}
    borrowed = {name: _borrowed(account, totals, used.get(name, {})) for name, account in accounts}
    reserved = sum(line.quota.reserved for _, account in accounts for line in account.lines)
    loans = _loans(ledger, borrowed, idle, max(0, sum(totals.values()) - reserved))
    lent: dict[str, int] = {}
    for lenders in loans.values():
        for lender, amount in lenders.items():
            lent[lender] = lent.get(lender, 0) + amount
    return {
        name: _count(account, used.get(name, {}), borrowed[name], lent.get(name, 0), loans.get(name, {}))
        for name, account in accounts
    }


def _usage_by_pool(cluster: Cluster) -> UsageByPool:
    result: dict[str, dict[str, tuple[int, int]]] = {}
    for allocation in cluster.allocations.values():
        account, guaranteed = cluster.account(allocation.workload), allocation.workload.non_preemptible
        for pool, amount in allocation.shares or ((allocation.pool, allocation.milli_gpus),):
            add_usage(result, account, pool.pool.name, amount if guaranteed else 0, amount)
    return result


def add_usage(
    used: dict[str, dict[str, tuple[int, int]]], account: Account, pool: str, non_preemptible: int, total: int
) -> None:
    """Add to the usage of a team and its departments in a pool: that of non-preemptible work, and the total."""
    for level in account.chain:
        pools = used.setdefault(level.team.name, {})
        before = pools.get(pool, (0, 0))
        pools[pool] = (before[0] + non_preemptible, before[1] + total)


def _pools(cluster: Cluster, account: Account) -> list[str]:
    return [name for name in cluster.pools if not account.lines or account.covering(name)]


def _borrowed(account: Account, totals: Mapping[str, int], used: Mapping[str, tuple[int, int]]) -> int:
    """Return what a team uses beyond its reservation, counted in one of the pools of each reservation."""
    by_pool: dict[str, int] = {}
    lines = {line for pool in totals for line in account.reserving(pool)}
    for line in sorted(lines, key=lambda ln: ln.quota.pools):
        pools = line.quota.pools or tuple(totals)
        over = max(0, line.usage - line.quota.reserved)
        if over and pools:
            by_pool[pools[0]] = max(by_pool.get(pools[0], 0), over)
    for pool, (_, total) in used.items():
        if pool in totals and account.guarantor(pool) is None:
            by_pool[pool] = by_pool.get(pool, 0) + total
    return sum(by_pool.values())


def _loans(
    ledger: Ledger, borrowed: Mapping[str, int], idle: Mapping[str, int], unreserved: int
) -> dict[str, dict[str, int]]:
    """Return borrower to lender to amount: unreserved GPUs count first, then the teams with the most idle ones lend."""
    remaining = {name: amount for name, amount in idle.items() if amount}
    loans: dict[str, dict[str, int]] = {}
    for name, wanted in sorted(borrowed.items()):
        amount = wanted - min(wanted, unreserved)
        unreserved -= min(wanted, unreserved)
        if not amount:
            continue
        family = {a.team.name for a in ledger.accounts[name].chain}
        for lender in sorted(remaining, key=lambda n: (-remaining[n], n)):
            if lender in family:
                continue
            part = min(amount, remaining[lender])
            if part:
                loans.setdefault(name, {})[lender] = part
                remaining[lender] -= part
                amount -= part
    return loans


def _count(
    account: Account, used: Mapping[str, tuple[int, int]], borrowed: int, lent: int, loans: Mapping[str, int]
) -> TeamCount:
    non_preemptible = sum(amount for amount, _ in used.values())
    total = sum(amount for _, amount in used.values())
    limits = [line.quota.limit for line in account.lines]
    borrowed = min(borrowed, total)
    guaranteed = min(non_preemptible, total - borrowed)
    return TeamCount(
        reserved=sum(line.quota.reserved for line in account.lines),
        limit=None if not limits or None in limits else sum(limit for limit in limits if limit is not None),
        guaranteed=guaranteed,
        in_quota=total - borrowed - guaranteed,
        borrowed=borrowed,
        lent=lent,
        borrowed_from=tuple(sorted(loans.items())),
    )


def _team(cluster: Cluster, name: str, count: TeamCount) -> TeamUsage:
    account = cluster.ledger.accounts[name]
    pools = _pools(cluster, account)
    return TeamUsage(
        team=name,
        reserved=count.reserved,
        limit=count.limit,
        guaranteed=count.guaranteed,
        in_quota=count.in_quota,
        borrowed=count.borrowed,
        lent=count.lent,
        free=sum(_free(cluster, account, pool) for pool in pools),
        total=sum(cluster.pools[pool].total for pool in pools),
        borrowed_from=count.borrowed_from,
    )


def _free(cluster: Cluster, account: Account, pool: str) -> int:
    """Return the milli-GPUs that the team could start in a pool without any eviction, fragmentation ignored."""
    state = cluster.pools[pool]
    free = max(0, state.free)
    for level in account.chain:
        for line in level.covering(pool):
            if line.quota.limit is not None:
                free = min(free, max(0, line.quota.limit - line.usage))
    if state.pool.capacity is not None:
        free = min(free, max(0, state.pool.capacity - cluster.pool_usage[pool]))
    if free and static_quota(cluster, account, state, free, False):
        free -= min(free, kept_free((line for line, _ in cluster.ledger.static_quotas(account, pool)), False))
    return free
