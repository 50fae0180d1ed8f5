"""Who may be asked to leave for whom, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..index.cluster import Cluster
from ..index.nodes import Allocation, NodeState, PoolState
from ..index.queues import Queue
from ..request import Need
from ..state import WEIGHTS, Workload
from .order import rank_in_profile
from .quota import Account, Line

Right = Literal["reservation", "own_policy", "own_team", "fair_share"]
"""The rule by which a workload may be evicted: 5.1, 5.1 (non-preemptible work of the same policy), 5.7 and 5.9."""
_IN_QUOTA: tuple[Right, ...] = ("reservation", "own_policy")
"""The rights of work in quota."""

_NOT_YET = -(1 << 30)
"""Before every priority: a start of this very plan is struck out before anybody who runs has to leave."""


@dataclass(slots=True)
class Preemptor:
    """Somebody who is entitled to GPUs of a pool that others use."""

    cluster: Cluster
    workload: Workload
    need: Need
    account: Account
    pool: PoolState
    right: Right
    blocked: Sequence[Line] = ()
    """Lines of its own policy or departments whose limit is in its way."""
    minus: dict[Line, int] = field(default_factory=dict)
    """What those chosen so far take off each line."""
    minus_pool: int = 0
    first: dict[str, bool] = field(default_factory=dict)
    """Policy to whether its work could be asked before anybody was chosen."""
    _where: dict[int, list[Allocation]] | None = None
    _own_rank: tuple[int, int] | None = None

    @property
    def amount(self) -> int:
        """Give the milli-GPUs it needs."""
        return self.need.total

    def anybody(self) -> bool:
        """Say whether there is a team at all that could be asked first."""
        if self.right == "own_team":
            return self.cluster.lowest(self.workload.policy, (self.pool,)) < self.cluster.priority(self.workload)
        if self._without_gpus():
            return True
        stoppable = self.cluster.stoppable.get(self.pool.pool.name, {})
        if self.right == "fair_share" or self.blocked:
            return bool(stoppable)
        return any(self._may_ask_team(name) for name in stoppable)

    def may_take(self, allocation: Allocation) -> bool:
        """Say whether this one could ever be asked, however much its team uses at the moment."""
        victim = allocation.workload
        if allocation.terminating or victim.non_preemptible or allocation.pool is not self.pool:
            return False
        if not allocation.amount and victim.id not in self._without_gpus():
            return False
        return self._may_stop(victim)

    def _without_gpus(self) -> Mapping[str, Allocation]:
        """Map the workloads without GPUs that may be evicted for their CPU and memory, by id (rule 2)."""
        if self.right not in _IN_QUOTA or not (self.need.cpu or self.need.memory):
            return {}
        return self.cluster.without_gpus.get(self.pool.pool.name, {})

    def _may_stop(self, victim: Workload) -> bool:
        """Say whether somebody who may be stopped for others may be for this one."""
        if victim.profile in self.cluster.protecting and self.workload.kind == "job" and self._protected(victim):
            return False
        if self.right == "own_team":
            return self._ranks_below(victim)
        return True

    def _protected(self, victim: Workload) -> bool:
        least = self.cluster.profiles[victim.profile].min_runtime
        return victim.started_at is None or self.cluster.now - victim.started_at < least

    def _ranks_below(self, victim: Workload) -> bool:
        """Say whether a job of the same team comes after the preemptor in every respect that the order looks at."""
        if victim.policy != self.workload.policy:
            return False
        if self.cluster.priority(victim) >= self.cluster.priority(self.workload):
            return False
        if self._own_rank is None:
            self._own_rank = self._rank(self.workload)
        return self._rank(victim) >= self._own_rank

    def _rank(self, workload: Workload) -> tuple[int, int]:
        profile = self.cluster.profiles.get(workload.profile)
        in_pool = self.pool.rank.get(workload.profile, len(self.pool.rank))
        return in_pool, rank_in_profile(profile, workload.policy) if profile else 0

    def may_ask_now(self, allocation: Allocation) -> bool:
        """Whether a candidate may be evicted after those chosen so far; without GPUs, it always may."""
        return not allocation.amount or self.entitled(self.cluster.account(allocation.workload))

    def entitled(self, account: Account) -> bool:
        """Say whether a team may be asked at this moment, given who was chosen before."""
        name = self.pool.pool.name
        if self.right == "own_team":
            return True
        if self._is_own(account):
            return True
        if self.right == "fair_share":
            return account is not self.account and self._above_fair(account, name)
        return self.cluster.ledger.above(account, name, self.account, self.amount, self.minus)

    def _is_own(self, account: Account) -> bool:
        """Whether non-preemptible work may evict any job of this account: its own, or one that fills its limit (5.1)."""
        if self.right != "own_policy":
            return False
        return account is self.account or any(line.account in account.chain for line in self.blocked)

    def may_ask(self, allocation: Allocation) -> bool:
        """Say whether this one could be asked before anybody else is chosen: who cannot be then, never can be."""
        return (not allocation.amount or self._may_ask_team(allocation.workload.policy)) and self.may_take(allocation)

    def _may_ask_team(self, name: str) -> bool:
        known = self.first.get(name)
        if known is None:
            mine = self.right != "own_team" or name == self.workload.policy
            known = self.first[name] = mine and self.entitled(self.cluster.ledger.account(name))
        return known

    def askable(self, node: NodeState) -> list[Allocation]:
        """List those on a node who could be asked before anybody else is chosen."""
        if self._where is not None:
            return list(self._where.get(node.position, ()))
        return [allocation for allocation in node.allocations.values() if self.may_ask(allocation)]

    def nodes(self) -> list[NodeState]:
        """List the nodes where anybody could be asked, in their order."""
        return [self.pool.nodes[at] for at in sorted(self.where())]

    def where(self) -> dict[int, list[Allocation]]:
        """Position to those on that node who could be asked before anybody else is chosen: found out once for all."""
        if self._where is not None:
            return self._where
        found: dict[int, list[Allocation]] = {}
        picky = self.right == "own_team" or (self.cluster.protecting and self.workload.kind == "job")
        for allocation in self._all():
            if not allocation.terminating and (not picky or self._may_stop(allocation.workload)):
                for part in allocation.parts:
                    here = found.setdefault(part.node.position, [])
                    if not here or here[-1] is not allocation:
                        here.append(allocation)
        self._where = found
        return found

    def _all(self) -> Iterator[Allocation]:
        """List all who may be stopped, of the teams that could be asked."""
        cluster = self.cluster
        if self.right == "own_team":
            yield from cluster.less_than(self.pool, self.workload.policy, cluster.priority(self.workload))
            return
        for name in cluster.stoppable.get(self.pool.pool.name, {}):
            if self._may_ask_team(name):
                yield from cluster.loose[self.pool.pool.name, name].values()
        yield from self._without_gpus().values()

    def easier(self, grown: Iterable[Account]) -> set[str]:
        """Name the teams that may be asked, and give more than before these accounts came to use more."""
        pool, ledger = self.pool.pool.name, self.cluster.ledger
        levels = {level for account in grown for level in account.chain}
        levels.difference_update((self.account.guarantor(pool) or self.account).chain[1:])
        if not levels:
            return set()
        return {
            name
            for name in self.cluster.stoppable.get(pool, {})
            if not levels.isdisjoint((account := ledger.account(name)).chain)
            and ledger.above(account, pool, self.account, self.amount, {})
        }

    def right_over(self, account: Account) -> Right:
        """Return the right by which a workload of this account is evicted."""
        return "reservation" if self.right == "own_policy" and not self._is_own(account) else self.right

    def _above_fair(self, account: Account, pool: str) -> bool:
        minus = max((self.minus.get(line, 0) for line in account.covering(pool)), default=0)
        over = account.over(pool, self.amount, self.account)
        return over - minus > fair_over(self.cluster, account, self.pool, self.account, self.amount)

    def takes(self, allocation: Allocation) -> int:
        """Give the milli-GPUs that somebody has to give up; an elastic gang what one worker of the preemptor needs."""
        need, spare = allocation.need, len(allocation.parts) - allocation.need.least
        if spare <= 0 or allocation.fresh or not need.gpus:
            return allocation.amount
        workers = max(1, -(-self.need.gpus // need.gpus))
        return workers * need.gpus if workers <= spare else allocation.amount

    def choose(self, allocation: Allocation, sign: int = 1) -> None:
        """Count somebody as terminating (or, with -1, as staying after all)."""
        amount = sign * allocation.amount
        name = allocation.pool.pool.name
        for level in self.cluster.account(allocation.workload).chain:
            for line in level.covering(name):
                self.minus[line] = self.minus.get(line, 0) + amount
        self.minus_pool += amount

    def level(self, allocation: Allocation) -> int:
        """Give the first part of the order of terminating, which counts before the number of GPUs."""
        if allocation.fresh:
            return _NOT_YET
        return self.cluster.account(allocation.workload).policy.priority

    def order(self, allocation: Allocation) -> tuple[object, ...]:
        """Give the place in the order of terminating: smaller leaves first (rule 5.3); it ends in the id."""
        victim = allocation.workload
        account = self.cluster.account(victim)
        started = victim.started_at if victim.started_at is not None else self.cluster.now
        return (
            _NOT_YET if allocation.fresh else account.policy.priority,
            -account.share(self.pool.pool.name),
            self.cluster.priority(victim),
            self._lost(allocation) if self.cluster.settings.victim_order == "cheapest" else 0,
            -started,
            -victim.submitted_at,
            victim.id,
        )

    def _lost(self, allocation: Allocation) -> float:
        """Give the work that stopping it now would throw away, in milli-GPU seconds."""
        victim = allocation.workload
        since = [t for t in (victim.last_checkpoint_at, victim.started_at) if t is not None]
        return allocation.amount * (self.cluster.now - max(since)) if since else 0.0

    def within_caps(self) -> bool:
        """Say whether no limit and no cap stands in the way once those chosen are gone."""
        pool = self.pool.pool
        if not self.amount:
            return True
        if self.cluster.ledger.over_limit(self.account, pool.name, self.amount, True, self.minus) is not None:
            return False
        if pool.capacity is None:
            return True
        return self.cluster.pool_future[pool.name] - self.minus_pool + self.amount <= pool.capacity


def within_fair_share(cluster: Cluster, queue: Queue, pool: PoolState) -> bool:
    """Whether a policy stays within its fair share with one more of a queue, which may straddle its reservation."""
    account = queue.account
    amount = queue.need.total
    return account.over(pool.pool.name, amount, account) <= fair_over(cluster, account, pool, account, amount)


def fair_over(cluster: Cluster, account: Account, pool: PoolState, asking: Account, request: int) -> int:
    """Return by how much a policy's usage may fairly exceed its reservation, with the request of `asking` counted.

    That is its weight's part of the GPUs that are not used within a reservation.
    """
    name = pool.pool.name
    teams = [(a, a.over(name, request, asking)) for a in cluster.ledger.accounts.values() if not _is_parent(cluster, a)]
    weights = sum(WEIGHTS[a.policy.weight] for a, over in teams if over > 0 or a is account or a is asking)
    if not weights:
        return 0
    within = sum(a.in_pool.get(name, 0) + (request if a is asking else 0) - over for a, over in teams)
    return max(0, pool.total - within) * WEIGHTS[account.policy.weight] // weights


def _is_parent(cluster: Cluster, account: Account) -> bool:
    return any(other.parent is account for other in cluster.ledger.accounts.values())
