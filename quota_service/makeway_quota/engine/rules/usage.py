"""Who uses what: reserved, in quota, borrowed, lent and free, per line and per team."""

from __future__ import annotations

from ..index.cluster import Cluster
from ..placement.fit import kept_back
from ..plan import LineUsage, TeamUsage
from ..state import Snapshot
from .quota import Account, Line


def line_usage(cluster: Cluster) -> tuple[LineUsage, ...]:
    """Give what every quota line counts, in the order of policy names."""
    return tuple([line.told or _told(name, line) for name, line in cluster.ledger.lines])


def _told(policy: str, line: Line) -> LineUsage:
    line.told = LineUsage(
        policy, line.quota.pools, line.quota.reserved, line.quota.limit, line.now, line.non_preemptible
    )
    return line.told


def usage_by_team(snapshot: Snapshot) -> tuple[TeamUsage, ...]:
    """Count reserved, used, borrowed, lent and free GPUs of every policy, in the order of names."""
    cluster = Cluster(snapshot)
    holders = _holdings(cluster)
    idle = {name: _idle_reservation(cluster, account, holders) for name, account in cluster.ledger.accounts.items()}
    borrowed = {name: sum(_borrowed(cluster, account).values()) for name, account in cluster.ledger.accounts.items()}
    unreserved = _unreserved(cluster)
    loans = _loans(cluster, borrowed, idle, unreserved)
    return tuple(
        _team(cluster, name, account, holders, borrowed, loans)
        for name, account in sorted(cluster.ledger.accounts.items())
    )


def _holdings(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Policy to (what its non-preemptible work holds, what all its work holds), departments included."""
    found: dict[str, tuple[int, int]] = {}
    for allocation in cluster.allocations.values():
        for level in cluster.account(allocation.workload).chain:
            non_preemptible, every = found.get(level.policy.name, (0, 0))
            non_preemptible += allocation.amount if allocation.workload.non_preemptible else 0
            found[level.policy.name] = non_preemptible, every + allocation.amount
    return found


def _pools(cluster: Cluster, account: Account) -> list[str]:
    return [name for name in cluster.pools if not account.lines or account.covering(name)]


def _borrowed(cluster: Cluster, account: Account) -> dict[str, int]:
    """Give what a team uses beyond its reservation, counted in one of the pools of each reservation."""
    found: dict[str, int] = {}
    lines = {line for pool in cluster.pools for line in account.reserving(pool)}
    for line in sorted(lines, key=lambda ln: ln.quota.pools):
        pools = line.quota.pools or tuple(cluster.pools)
        over = max(0, line.now - line.quota.reserved)
        if over and pools:
            found[pools[0]] = max(found.get(pools[0], 0), over)
    guarantor_less = [pool for pool in cluster.pools if account.guarantor(pool) is None]
    for allocation in cluster.allocations.values():
        pool = allocation.pool.pool.name
        if pool in guarantor_less and account in cluster.account(allocation.workload).chain:
            found[pool] = found.get(pool, 0) + allocation.amount
    return found


def _idle_reservation(cluster: Cluster, account: Account, holders: dict[str, tuple[int, int]]) -> int:
    return sum(max(0, line.quota.reserved - line.now) for line in account.lines)


def _unreserved(cluster: Cluster) -> int:
    total = sum(pool.total for pool in cluster.pools.values())
    return max(0, total - sum(ln.quota.reserved for a in cluster.ledger.accounts.values() for ln in a.lines))


def _loans(
    cluster: Cluster, borrowed: dict[str, int], idle: dict[str, int], unreserved: int
) -> dict[str, dict[str, int]]:
    """Say who borrows from whom: GPUs that nobody reserves first, then from the teams with the most idle ones."""
    left = {name: amount for name, amount in idle.items() if amount}
    loans: dict[str, dict[str, int]] = {}
    for name, amount in sorted(borrowed.items()):
        free = min(amount, unreserved)
        unreserved -= free
        amount -= free
        family = {a.policy.name for a in cluster.ledger.accounts[name].chain}
        for lender in sorted(left, key=lambda n: (-left[n], n)):
            if lender in family:
                continue
            part = min(amount, left[lender])
            if part:
                loans.setdefault(name, {})[lender] = part
                left[lender] -= part
                amount -= part
    return loans


def _team(
    cluster: Cluster,
    name: str,
    account: Account,
    holders: dict[str, tuple[int, int]],
    borrowed: dict[str, int],
    loans: dict[str, dict[str, int]],
) -> TeamUsage:
    non_preemptible, every = holders.get(name, (0, 0))
    pools = _pools(cluster, account)
    limits = [line.quota.limit for line in account.lines]
    limit = None if not limits or None in limits else sum(each for each in limits if each is not None)
    return TeamUsage(
        policy=name,
        reserved=sum(line.quota.reserved for line in account.lines),
        limit=limit,
        guaranteed=non_preemptible,
        in_quota=max(0, every - non_preemptible - borrowed[name]),
        borrowed=min(borrowed[name], every),
        lent=sum(given.get(name, 0) for given in loans.values()),
        free=sum(_free(cluster, account, pool) for pool in pools),
        total=sum(cluster.pools[pool].total for pool in pools),
        borrowed_from=tuple(sorted(loans.get(name, {}).items())),
    )


def _free(cluster: Cluster, account: Account, pool: str) -> int:
    """Give what the team could start in a pool without anyone terminating, as far as counts go."""
    state = cluster.pools[pool]
    free = max(0, state.free)
    for level in account.chain:
        for line in level.covering(pool):
            if line.quota.limit is not None:
                free = min(free, max(0, line.quota.limit - line.now))
    if state.pool.capacity is not None:
        free = min(free, max(0, state.pool.capacity - cluster.pool_now[pool]))
    if free and kept_back(cluster, account, state, free, False):
        free -= min(free, sum(line.held(False) for line, _ in cluster.ledger.kept_for(account, pool)))
    return free
