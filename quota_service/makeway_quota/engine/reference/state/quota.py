"""Count usage against reservations, limits, capacities and fair shares (engine rules 2 and 5.9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from ...snapshot import WEIGHTS, QuotaLine, TeamQuota
from ...weights import over_per_weight
from .cluster import Allocation, Cluster


class TeamQuotaLine(NamedTuple):
    """One quota line of one team."""

    team: str
    quota: QuotaLine


class Request(NamedTuple):
    """A request that is counted as if it ran already, on every team of `chain`, and its milli-GPUs."""

    chain: tuple[str, ...] = ()
    amount: int = 0


class Counts(NamedTuple):
    """What counts on a line, or on a team in a pool, in milli-GPUs.

    `moving` is the part of `nominated` that its workload holds elsewhere until it moves, `awaiting` the part of work
    that waits for nodes which boot, `booting` what that will have on these.
    """

    usage: int
    terminating: int
    nominated: int
    moving: int
    awaiting: int
    booting: int
    non_preemptible: int

    @property
    def future_usage(self) -> int:
        """Return what will count once terminating workloads are gone and nominations are used."""
        return self.usage - self.terminating + self.nominated

    @property
    def certain(self) -> int:
        """Return the future usage without work that waits for nodes which boot: it makes no work a candidate."""
        return self.future_usage - self.awaiting

    @property
    def taken(self) -> int:
        """Return how much of a reservation is spoken for; a moving workload counts once, with its larger place."""
        return self.usage + self.nominated - self.moving


NOTHING = Request()


def _count(cluster: Cluster, team: str, pools: Sequence[str]) -> Counts:
    """Count one team (with the teams of a department) in some pools."""
    running = [a for a in cluster.running.values() if team in a.chain]
    nominations = [c for c in cluster.nominations.values() if team in c.chain and c.pool in pools]
    return _counts(cluster, running, nominations, pools)


def _count_own(cluster: Cluster, team: str, pool: str) -> Counts:
    """Count one team without the teams below it in a pool."""
    running = [a for a in cluster.running.values() if a.chain[0] == team]
    nominations = [c for c in cluster.nominations.values() if c.chain[0] == team and c.pool == pool]
    return _counts(cluster, running, nominations, (pool,))


def _counts(
    cluster: Cluster, running: Sequence[Allocation], nominations: Sequence[Allocation], pools: Sequence[str]
) -> Counts:
    moving = 0
    for nomination in nominations:
        old = cluster.running.get(nomination.id)
        if old is not None:
            moving += min(old.amount_in(pools), nomination.amount)
    return Counts(
        sum(a.amount_in(pools) for a in running),
        sum(a.amount_in(pools) for a in running if a.id in cluster.terminating),
        sum(c.amount for c in nominations),
        moving,
        sum(c.amount for c in nominations if any(cluster.nodes[part.node].boots for part in c.parts)),
        sum(c.need.gpus for c in nominations for part in c.parts if cluster.nodes[part.node].boots),
        sum(a.amount_in(pools) for a in (*running, *nominations) if a.workload.non_preemptible),
    )


def counts(cluster: Cluster, line: TeamQuotaLine) -> Counts:
    """Count what a line covers."""
    return _count(cluster, line.team, line.quota.pools or tuple(cluster.pools))


def in_pool(cluster: Cluster, team: str, pool: str) -> int:
    """Return the future usage of a team in one pool."""
    return _count(cluster, team, (pool,)).future_usage


def owner_usage(cluster: Cluster, team: str, owner: str) -> int:
    """Return the future usage of one user in one team, in all pools."""
    mine = [a for a in cluster.running.values() if a.id not in cluster.terminating]
    every = [*mine, *cluster.nominations.values()]
    return sum(a.amount for a in every if a.chain[0] == team and a.workload.owner == owner)


# Lines


def covering(cluster: Cluster, team: str, pool: str) -> list[TeamQuotaLine]:
    """Return the team's lines that cover a pool."""
    return [TeamQuotaLine(team, quota) for quota in cluster.team(team).quotas if quota.covers(pool)]


def reserving(cluster: Cluster, team: str, pool: str) -> list[TeamQuotaLine]:
    """Return the team's lines that reserve something in a pool."""
    return [line for line in covering(cluster, team, pool) if line.quota.reserved > 0]


def limiting(cluster: Cluster, chain: Sequence[str], pool: str) -> list[TeamQuotaLine]:
    """Return the lines that limit what a team runs in a pool, its departments' included, nearest first."""
    lines = (line for level in chain for line in covering(cluster, level, pool))
    return [line for line in lines if line.quota.limit is not None]


def guarantor(cluster: Cluster, chain: Sequence[str], pool: str) -> str | None:
    """Return the level that reserves for a team: itself, else the nearest department; None without any."""
    return next((level for level in chain if reserving(cluster, level, pool)), None)


# In quota


Claimed = Callable[[TeamQuotaLine, bool], int]
"""Return what counts on a line besides running and nominated work; with True, only work without a line below it."""


def _nothing(line: TeamQuotaLine, without_own_line: bool) -> int:
    return 0


def in_quota(
    cluster: Cluster, chain: Sequence[str], pool: str, amount: int, non_preemptible: bool, claimed: Claimed = _nothing
) -> bool:
    """Whether `amount` more stays within the reservation; `non_preemptible`: counting such work only (rule 2).

    False where nothing is reserved, and for work without GPUs (`amount` 0) where the reservation is exceeded.
    """
    is_reserved = False
    nearest = guarantor(cluster, chain, pool)
    for at, level in enumerate(chain):
        if not non_preemptible and level != nearest:
            continue  # what others borrow of its team's reservation is reclaimed
        own = any(reserving(cluster, below, pool) for below in chain[:at])
        for line in reserving(cluster, level, pool):
            is_reserved = True
            counted = counts(cluster, line)
            used = counted.non_preemptible if non_preemptible else counted.taken
            if used + claimed(line, False) + amount > line.quota.reserved:
                return False
            promised = 0 if own or not non_preemptible else _promised_below(cluster, level, line.quota)
            direct = (_used_without_own_line(cluster, line, non_preemptible) if promised else 0) + claimed(line, True)
            if promised and direct + amount > max(0, line.quota.reserved - promised):
                return False
    return is_reserved


def _promised_below(cluster: Cluster, team: str, quota: QuotaLine, visited: tuple[str, ...] = ()) -> int:
    """Return what the nearest lines below a department reserve of one of its lines.

    `visited`: teams that are not descended into again, as departments may form a cycle.
    """
    visited = (*visited, team)
    total = 0
    for name, known in cluster.policies.items():
        if known.parent == team and name not in visited:
            total += _reserved_within(known, quota) or _promised_below(cluster, name, quota, visited)
    return total


def _reserved_within(team: TeamQuota, quota: QuotaLine) -> int:
    """Return what a team's own lines reserve within a department's line; of nested lines the outer one counts."""
    by_pools: dict[frozenset[str], int] = {}
    for line in team.quotas:
        pools = frozenset(line.pools)
        if line.reserved > 0 and _is_within(pools, frozenset(quota.pools)):
            by_pools[pools] = min(line.reserved, by_pools.get(pools, line.reserved))
    return sum(
        reserved
        for pools, reserved in by_pools.items()
        if not any(_is_within(pools, other) for other in by_pools if other != pools)
    )


def _is_within(pools: Collection[str], others: Collection[str]) -> bool:
    """Whether all pools of one line are among those of another; a line without pools covers all pools."""
    return not others or (bool(pools) and set(pools) <= set(others))


def _used_without_own_line(cluster: Cluster, line: TeamQuotaLine, non_preemptible: bool) -> int:
    """Return what a department's line serves of work for which no team below it reserves anything in the pool."""
    total = 0
    for name in cluster.policies:
        chain = cluster.chain(name)
        if line.team not in chain:
            continue
        below = chain[: chain.index(line.team)]
        for pool in line.quota.pools or tuple(cluster.pools):
            if not any(reserving(cluster, level, pool) for level in below):
                counted = _count_own(cluster, name, pool)
                total += counted.non_preemptible if non_preemptible else counted.taken
    return total


def quota_numbers(cluster: Cluster, chain: Sequence[str], pool: str, non_preemptible: bool) -> tuple[int, int]:
    """Return (reserved, used) of the tightest line that reserves in a pool."""
    level = guarantor(cluster, chain, pool)
    if level is None:
        return 0, in_pool(cluster, chain[0], pool)
    lines = [(line.quota, counts(cluster, line)) for line in reserving(cluster, level, pool)]
    numbers = [(q.reserved, c.non_preemptible if non_preemptible else c.future_usage, q.pools) for q, c in lines]
    reserved, used, _ = min(numbers, key=lambda n: (n[0] - n[1], n[2]))
    return reserved, used


# Limits, capacity and static quotas


def over_limit(cluster: Cluster, chain: Sequence[str], pool: str, amount: int, in_future: bool) -> TeamQuotaLine | None:
    """Return the first line whose limit `amount` more would exceed; `in_future`: in the future only."""
    for line in limiting(cluster, chain, pool):
        counted = counts(cluster, line)
        used = counted.future_usage if in_future else max(counted.usage, counted.future_usage)
        if used + amount > (line.quota.limit or 0):
            return line
    return None


def blocking(cluster: Cluster, chain: Sequence[str], pool: str, amount: int) -> list[TeamQuotaLine]:
    """Return the lines whose limits `amount` more would exceed in the future."""
    lines = limiting(cluster, chain, pool)
    return [line for line in lines if counts(cluster, line).future_usage + amount > (line.quota.limit or 0)]


def counts_on(cluster: Cluster, line: TeamQuotaLine, allocation: Allocation) -> bool:
    """Whether an allocation counts on a line: its team or a department of it has the line, which covers its pool."""
    pools = line.quota.pools or tuple(cluster.pools)
    return line.team in allocation.chain and allocation.amount_in(pools) > 0


def pool_usage(cluster: Cluster, pool: str, in_future: bool) -> int:
    """Return what runs (or will) in a pool, as its capacity counts it."""
    running = cluster.running.values()
    future = sum(a.amount_in((pool,)) for a in running if a.id not in cluster.terminating)
    future += sum(c.amount for c in cluster.nominations.values() if c.pool == pool)
    return future if in_future else max(future, sum(a.amount_in((pool,)) for a in running))


def over_capacity(cluster: Cluster, pool: str, amount: int, in_future: bool = False) -> bool:
    """Whether `amount` more exceeds the pool's capacity."""
    capacity = cluster.pools[pool].capacity
    return capacity is not None and pool_usage(cluster, pool, in_future) + amount > capacity


def unlent(line: TeamQuotaLine) -> int:
    """Return how much of a reservation is never lent."""
    quota = line.quota
    return max(0, quota.reserved - (quota.reserved if quota.lend is None else quota.lend))


def kept_free(cluster: Cluster, kept: Sequence[tuple[str, int]]) -> int:
    """Return what is kept free for teams together: pairs of a team and an amount.

    A department and its teams keep the larger of what the department keeps and what its teams keep in sum.
    """
    reached = {level for team, _ in kept for level in cluster.chain(team)}
    return sum(_kept_within(cluster, name, kept) for name in reached if len(cluster.chain(name)) == 1)


def _kept_within(cluster: Cluster, team: str, kept: Sequence[tuple[str, int]]) -> int:
    """Return what a team and the teams below it keep free together."""
    own = sum(amount for name, amount in kept if name == team)
    teams = [name for name, known in cluster.policies.items() if known.parent == team != name]
    return max(own, sum(_kept_within(cluster, name, kept) for name in teams))


def _kept_by(cluster: Cluster, line: TeamQuotaLine, in_future: bool) -> int:
    """Return what a static quota keeps free; nothing of it is lent for a node that is not ready yet."""
    counted = counts(cluster, line)
    return max(0, unlent(line) - (counted.future_usage - counted.booting if in_future else counted.usage))


def unused(cluster: Cluster, pool: str) -> int:
    """Return the milli-GPUs of a pool that reservations guarantee beyond what is used of them, now and later."""
    return sum(_unused(cluster, name, pool) for name in cluster.policies if len(cluster.chain(name)) == 1)


def _unused(cluster: Cluster, team: str, pool: str) -> int:
    """Return the larger of what a team and what the teams below it may still use."""
    lines = [(line.quota.reserved, counts(cluster, line)) for line in reserving(cluster, team, pool)]
    own = min((reserved - max(used.usage, used.future_usage) for reserved, used in lines), default=0)
    teams = [name for name, known in cluster.policies.items() if known.parent == team != name]
    return max(0, own, sum(_unused(cluster, name, pool) for name in teams))


def static_quota(
    cluster: Cluster, chain: Sequence[str], pool: str, amount: int, in_future: bool
) -> TeamQuotaLine | None:
    """Return another team's static quota whose idle GPUs `amount` more would use.

    Beside that line's GPUs, those of static quotas whose pools lie within its pools are kept free. Quotas that cover
    `pool` count fully; all others, this team's own included, count no more than is free in their own pools.
    """
    every = [TeamQuotaLine(name, quota) for name in cluster.policies for quota in cluster.policies[name].quotas]
    kept = [(line, idle) for line in every if unlent(line) and (idle := _kept_by(cluster, line, in_future))]
    covering = [(ln, idle) for ln, idle in kept if ln.quota.covers(pool) and ln.team not in chain]
    other_pools = [
        (ln, min(idle, _free_in(cluster, ln.quota.pools, in_future))) for ln, idle in kept if not ln.quota.covers(pool)
    ]
    for line, _ in covering:
        within = [(ln.team, idle) for ln, idle in covering if _is_within(ln.quota.pools, line.quota.pools)]
        others_within = [(ln, idle) for ln, idle in other_pools if _is_within(ln.quota.pools, line.quota.pools)]
        pools = {name for ln, _ in others_within for name in ln.quota.pools}
        free = _free_in(cluster, pools, in_future) if pools else 0
        at_most_free = [(ln.team, idle) for ln, idle in others_within]
        keep_free = min(kept_free(cluster, [*within, *at_most_free]), kept_free(cluster, within) + free)
        if _free_in(cluster, line.quota.pools, in_future) - amount < keep_free:
            return line
    return None


def _free_in(cluster: Cluster, pools: Collection[str], in_future: bool) -> int:
    return sum(_available(cluster, name, in_future) for name in cluster.pools if not pools or name in pools)


def _available(cluster: Cluster, pool: str, in_future: bool) -> int:
    free, capacity = cluster.free_gpus(pool, in_future), cluster.pools[pool].capacity
    return free if capacity is None else min(free, max(0, capacity - pool_usage(cluster, pool, in_future)))


def allowed(cluster: Cluster, chain: Sequence[str], pool: str, amount: int, in_future: bool = False) -> bool:
    """Whether limits, the pool's capacity and other teams' static quotas admit `amount` more."""
    if not amount:
        return True
    if over_capacity(cluster, pool, amount, in_future) or over_limit(cluster, chain, pool, amount, in_future):
        return False
    fits_now = in_future or static_quota(cluster, chain, pool, amount, False) is None
    return fits_now and static_quota(cluster, chain, pool, amount, True) is None


# Shares


def over_reservation(cluster: Cluster, chain: Sequence[str], pool: str, request: Request = NOTHING) -> int:
    """Return how far a team will be beyond its reservation in a pool, a request counted."""
    level = chain[0]
    more = request.amount if level in request.chain else 0
    lines = reserving(cluster, level, pool)
    if lines:
        return max(0, max(counts(cluster, line).future_usage + more - line.quota.reserved for line in lines))
    used = in_pool(cluster, level, pool) + more
    department = guarantor(cluster, chain, pool)
    if department is None:
        return used
    return min(used, over_reservation(cluster, chain[chain.index(department) :], pool, request))


def shares(cluster: Cluster, team: str, pool: str) -> tuple[int, ...]:
    """Return over-quota use and history per weight, of the departments from the top down, then of the team."""
    chain = cluster.chain(team)
    excesses = [(cluster.team(level), over_reservation(cluster, chain[at:], pool)) for at, level in enumerate(chain)]
    return tuple(over_per_weight(excess + known.history, known.weight) for known, excess in reversed(excesses))


def teams(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Iterate over the chain of every team that is no department."""
    parents = {team.parent for team in cluster.policies.values()}
    for name in cluster.policies:
        if name not in parents:
            yield cluster.chain(name)


def fair_share(cluster: Cluster, team: str, pool: str, request: Request) -> int:
    """Return how far beyond its reservation a team may fairly be, a request counted (rule 5.9).

    That is its weight's part of the GPUs that are not used within a reservation.
    """
    every = [(chain, over_reservation(cluster, chain, pool, request)) for chain in teams(cluster)]
    asking = request.chain[0] if request.chain else team
    sharing = [chain[0] for chain, excess in every if excess > 0 or chain[0] in (team, asking)]
    weights = sum(WEIGHTS[cluster.team(name).weight] for name in sharing)
    if not weights:
        return 0
    used = {chain: in_pool(cluster, chain[0], pool) for chain, _ in every}
    within = sum(used[chain] + (request.amount if chain[0] in request.chain else 0) - excess for chain, excess in every)
    unreserved = max(0, cluster.total_gpus(pool) - within)
    return unreserved * WEIGHTS[cluster.team(team).weight] // weights


def within_fair_share(cluster: Cluster, request: Request, pool: str) -> bool:
    """Whether a team stays within its fair share with a request (which may straddle its reservation)."""
    fair = fair_share(cluster, request.chain[0], pool, request)
    return over_reservation(cluster, request.chain, pool, request) <= fair


def is_above_reservation(
    cluster: Cluster,
    victim: Allocation,
    pool: str,
    request: Request,
    gone: Sequence[tuple[Allocation, int]],
    back: Sequence[tuple[Allocation, int]] = (),
) -> bool:
    """Whether a victim's team is above its reservation, a request in `pool` counted, those in `gone` not (rule 5.1).

    Every reserving level from the victim up has to be above. Lines that cover both the victim and the request are left
    out: to replace one with the other changes nothing there. `back`: of these, the one that counts most on a line is
    counted there.
    """
    reserves = guarantor(cluster, request.chain, pool) or request.chain[0]
    shared = request.chain[request.chain.index(reserves) + 1 :]
    at = victim.nearest(pool)
    for level in victim.chain:
        lines = reserving(cluster, level, at)
        if level in shared:
            lines = [line for line in lines if not line.quota.covers(pool)]
        if lines and not any(_line_is_above(cluster, line, pool, request, gone, back) for line in lines):
            return False
    return True


def _line_is_above(
    cluster: Cluster,
    line: TeamQuotaLine,
    pool: str,
    request: Request,
    gone: Sequence[tuple[Allocation, int]],
    back: Sequence[tuple[Allocation, int]],
) -> bool:
    more = request.amount if line.team in request.chain and line.quota.covers(pool) else 0
    more += max((counted_on(cluster, line, [item]) for item in back), default=0)
    return counts(cluster, line).certain + more - counted_on(cluster, line, gone) > line.quota.reserved


def counted_on(cluster: Cluster, line: TeamQuotaLine, gone: Sequence[tuple[Allocation, int]]) -> int:
    """Return how much of what is gone counted on a line."""
    pools = line.quota.pools or tuple(cluster.pools)
    mine = [(allocation, amount) for allocation, amount in gone if line.team in allocation.chain and amount]
    return sum(amount * allocation.amount_in(pools) // allocation.amount for allocation, amount in mine)
