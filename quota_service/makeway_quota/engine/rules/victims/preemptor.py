"""Find the allocations that a workload may evict, by which rule, and their order of protection (rules 5.1 to 5.3).

Called by the search for victims (rules/reclaim.py) and by consolidation. Reads the cluster, changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...index.cluster import Cluster
from ...index.ledger import Account, LineState
from ...index.nodes import Allocation, NodeState, PoolState
from ...request import Need
from ...snapshot import Workload
from ..fair_share import fair_over
from ..order import rank_in_profile

Right = Literal["reservation", "own_policy", "own_team", "fair_share"]
"""The rule by which a workload may be evicted: 5.1, 5.1 (non-preemptible work of the same policy), 5.7 and 5.9."""
_IN_QUOTA: tuple[Right, ...] = ("reservation", "own_policy")
"""The rights of work in quota."""
WITHOUT_GPUS = ""
"""Instead of the policy of work without GPUs, which is a candidate whatever its policy uses."""
Order = tuple[int, int, int, float, float, float, str]
"""The sort key of protection; its first three parts decide before the number of victims does."""
Standing = tuple[tuple[int, ...], tuple[int, ...]]
"""A policy's shares, and the usage of the reservations that count it: what ranks and entitles its work."""


@dataclass(slots=True)
class Preemptor:
    """A pending workload that may evict others in a pool, by one right."""

    cluster: Cluster
    workload: Workload
    need: Need
    account: Account
    pool: PoolState
    right: Right
    blocked: LineState | None = None
    """The line whose limit is in the way; only messages depend on it."""
    kept_out: bool = False
    """Whether a static quota kept it out although victims had made room on a node."""
    gone: dict[Account, int] = field(default_factory=dict)
    """Policy to the milli-GPUs of the victims chosen so far."""
    gone_on: dict[LineState, int] = field(default_factory=dict)
    """The same by the lines that count them."""
    _entitled_first: dict[str, bool] = field(default_factory=dict)
    """Policy to whether its work is a candidate before any victim is chosen."""
    _fair: dict[Account, int] = field(default_factory=dict)
    _orders: dict[str, Order] = field(default_factory=dict)
    _standings: dict[str, Standing] = field(default_factory=dict)
    _able: list[Allocation] | None = None
    _where: dict[int, list[Allocation]] | None = None
    _own_rank: tuple[int, int] | None = None

    @property
    def amount(self) -> int:
        """Return the milli-GPUs of the request."""
        return self.need.total

    # Candidates

    def has_candidates(self) -> bool:
        """Whether there could be any candidate; False is certain, True is not."""
        if self.right == "own_team":
            return self.cluster.lowest(self.workload.policy, (self.pool,)) < self.cluster.priority(self.workload)
        if self._without_gpus():
            return True
        return any(map(self.is_candidate_policy, self.cluster.lowest_priorities.get(self.pool.pool.name, {})))

    def is_candidate(self, allocation: Allocation) -> bool:
        """Whether an allocation may be evicted first; if not, it may not be evicted after other victims either."""
        victim = allocation.workload
        evicted = allocation.terminating or allocation.stuck
        if evicted or victim.non_preemptible or self.pool not in allocation.pools:
            return False
        if allocation.amount:
            return self.is_candidate_policy(victim.policy) and self._may_evict(victim)
        return victim.id in self._without_gpus() and self._frees(allocation) and self._may_evict(victim)

    def shares(self) -> dict[str, int]:
        """Return the share of each policy with candidates."""
        pool, ledger = self.pool.pool.name, self.cluster.ledger
        names = [name for name in self.cluster.lowest_priorities.get(pool, {}) if self.is_candidate_policy(name)]
        found = {name: ledger.account(name).share(pool) for name in names}
        return found | {WITHOUT_GPUS: 0} if self.is_candidate_policy(WITHOUT_GPUS) else found

    def may_tighten(self) -> bool:
        """Whether a victim may make less room than it takes: its team's static quota grows by more than it frees."""
        ledger = self.cluster.ledger
        if not ledger.holding:
            return False
        return ledger.counts_twice or any(
            not allocation.parts or not all(part.node.usable for part in allocation.parts)
            for allocation in self.candidates()
        )

    def candidates_on(self, node: NodeState) -> list[Allocation]:
        """Return the candidates on a node."""
        if self._where is not None:
            return list(self._where.get(node.position, ()))
        return [allocation for allocation in node.allocations.values() if self.is_candidate(allocation)]

    def nodes(self) -> list[NodeState]:
        """Return the nodes with candidates, in order."""
        return [self.pool.nodes[at] for at in sorted(self.where())]

    def where(self) -> dict[int, list[Allocation]]:
        """Return the candidates by position of their node; computed once."""
        if self._where is None:
            found: dict[int, list[Allocation]] = {}
            for allocation in self.candidates():
                for part in allocation.parts_in(self.pool):
                    here = found.setdefault(part.node.position, [])
                    if not here or here[-1] is not allocation:
                        here.append(allocation)
            self._where = found
        return self._where

    def candidates(self) -> list[Allocation]:
        """Return all candidates; those on nodes outside the inventory hold quota, but no GPUs. Computed once."""
        if self._able is None:
            self._able = list(self._candidates())
        return self._able

    def _candidates(self) -> Iterator[Allocation]:
        cluster, pool = self.cluster, self.pool.pool.name
        names = [name for name in cluster.lowest_priorities.get(pool, {}) if self.is_candidate_policy(name)]
        checked = self.right == "own_team" or bool(cluster.protecting)
        light = {name: a for name, a in self._without_gpus().items() if self._frees(a)}
        for known in (*(cluster.preemptible[pool, name] for name in names), light):
            for allocation in known.values():
                if not allocation.terminating and (not checked or self._may_evict(allocation.workload)):
                    yield allocation

    def _without_gpus(self) -> Mapping[str, Allocation]:
        """Return by id the work without GPUs that is a candidate for its CPU and memory (rule 2)."""
        if self.right not in _IN_QUOTA or not (self.need.cpu or self.need.memory):
            return {}
        return self.cluster.without_gpus.get(self.pool.pool.name, {})

    def _frees(self, allocation: Allocation) -> bool:
        """Whether work without GPUs holds CPU or memory that the preemptor requests."""
        return bool((allocation.need.cpu and self.need.cpu) or (allocation.need.memory and self.need.memory))

    def _may_evict(self, victim: Workload) -> bool:
        """Whether neither `min_runtime` nor, within a policy, its priority and ranks protect a workload."""
        if self.workload.kind == "job" and self.cluster.is_protected(victim):
            return False
        return self.right != "own_team" or self._ranks_below(victim)

    def _ranks_below(self, victim: Workload) -> bool:
        """Whether a workload of the same policy has a lower priority, and no better rank in pool and profile."""
        if not self.cluster.is_below(victim, self.cluster.priority(self.workload)):
            return False
        if self._own_rank is None:
            self._own_rank = self._rank(self.workload)
        return self._rank(victim) >= self._own_rank

    def _rank(self, workload: Workload) -> tuple[int, int]:
        profile = self.cluster.profiles.get(workload.profile)
        in_pool = self.pool.rank.get(workload.profile, len(self.pool.rank))
        return in_pool, rank_in_profile(profile, workload.policy) if profile else 0

    # Entitlement: whether the victim's policy is above its reservation (or fair share) at this moment

    def may_evict_now(self, allocation: Allocation) -> bool:
        """Whether a candidate may be evicted after the victims chosen so far; without GPUs, it always may."""
        return not allocation.amount or self.entitled(self.cluster.account(allocation.workload))

    def entitled(self, account: Account) -> bool:
        """Whether work of a policy may be evicted after the victims chosen so far."""
        if self.right == "own_team":
            return account is self.account
        if self.right == "own_policy" and account is self.account:
            return True
        if self.right == "fair_share":
            return account is not self.account and self._above_fair_share(account)
        return self.cluster.ledger.above(account, self.pool.pool.name, self.account, self.amount, self.gone_on)

    def standing(self, name: str) -> Standing:
        """Return a policy's standing before any victim is chosen."""
        known = self._standings.get(name)
        if known is None:
            account, pool = self.cluster.ledger.account(name), self.pool.pool.name
            usage = tuple(line.future for level in account.chain for line in level.reserving(pool))
            known = self._standings[name] = account.shares(pool), usage
        return known

    def is_candidate_policy(self, name: str) -> bool:
        """Whether work of a policy (or work `WITHOUT_GPUS`) is a candidate before any victim is chosen."""
        known = self._entitled_first.get(name)
        if known is None:
            entitled = (
                bool(self._without_gpus()) if name == WITHOUT_GPUS else self.entitled(self.cluster.ledger.account(name))
            )
            known = self._entitled_first[name] = entitled
        return known

    def _above_fair_share(self, account: Account) -> bool:
        if account not in self._fair:
            self._fair[account] = fair_over(self.cluster.ledger, account, self.pool, self.account, self.amount)
        over = account.over(self.pool.pool.name, self.amount, self.account)
        return over - self.gone.get(account, 0) > self._fair[account]

    def choose(self, allocation: Allocation, amount: int) -> None:
        """Subtract milli-GPUs of an allocation from its policy's usage (negative: add them again)."""
        for level in self.cluster.account(allocation.workload).chain:
            self.gone[level] = self.gone.get(level, 0) + amount
            for line in level.lines:
                counted = amount * allocation.counts_on(line.quota)
                if counted:
                    self.gone_on[line] = self.gone_on.get(line, 0) + counted // allocation.amount

    def chosen_so_far(self) -> tuple[dict[Account, int], dict[LineState, int]]:
        """Return what the chosen victims count, and forget it; `choose_again` restores it."""
        known = self.gone, self.gone_on
        self.gone, self.gone_on = {}, {}
        return known

    def choose_again(self, known: tuple[dict[Account, int], dict[LineState, int]]) -> None:
        """Restore what `chosen_so_far` returned."""
        self.gone, self.gone_on = known

    def became_candidates(self, grown: Iterable[Account]) -> set[str]:
        """Return the policies with more candidates than before, now that these accounts use more."""
        pool, ledger = self.pool.pool.name, self.cluster.ledger
        levels = {level for account in grown for level in account.chain}
        levels.difference_update((self.account.guarantor(pool) or self.account).chain[1:])
        if not levels:
            return set()
        return {
            name
            for name in self.cluster.lowest_priorities.get(pool, {})
            if not levels.isdisjoint((account := ledger.account(name)).chain)
            and ledger.above(account, pool, self.account, self.amount, {})
        }

    # Protection

    def order(self, allocation: Allocation) -> Order:
        """Return the sort key of protection (rule 5.3) before any victim is chosen: smaller is evicted first."""
        known = self._orders.get(allocation.workload.id)
        if known is None:
            known = self._orders[allocation.workload.id] = order_of(self.cluster, allocation, self.pool)
        return known


def order_of(cluster: Cluster, allocation: Allocation, pool: PoolState) -> Order:
    """Return an allocation's sort key of protection (rule 5.3): smaller is evicted first; it ends in the id."""
    victim, account = allocation.workload, cluster.account(allocation.workload)
    started = victim.started_at if victim.started_at is not None else cluster.now
    return (
        account.policy.priority,
        -account.share(pool.pool.name),
        cluster.priority(victim),
        lost_work(cluster, allocation) if cluster.settings.victim_order == "cheapest" else 0,
        -started,
        -victim.submitted_at,
        victim.id,
    )


def lost_work(cluster: Cluster, allocation: Allocation) -> float:
    """Return the work that an eviction now would lose, in milli-GPU seconds."""
    victim = allocation.workload
    since = [t for t in (victim.last_checkpoint_at, victim.started_at) if t is not None]
    return allocation.amount * (cluster.now - max(since)) if since else 0.0
