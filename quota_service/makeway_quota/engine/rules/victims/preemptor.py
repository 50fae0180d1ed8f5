"""Find the allocations that a workload may evict, by which rule, and their order of protection (rules 5.1 to 5.3).

Called by the search for victims (rules/reclaim.py) and by consolidation. Reads the cluster, changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...index.cluster import Cluster
from ...index.hosts import shortage_on
from ...index.ledger import Account, LineState
from ...index.nodes import Allocation, NodeState, PoolState
from ...request import Need
from ...snapshot import STARTING, Workload
from ..fair_share import fair_over
from ..order import rank_in_profile

Right = Literal["reservation", "own_team_any_priority", "own_team", "fair_share"]
"""A rule by which a workload may be evicted: 5.1, 5.1 by non-preemptible work of its own team, 5.7 and 5.9."""
Rights = tuple[Right, ...]
BORROWERS_FIRST: Rights = ("reservation", "own_team")
"""The rights of a job in quota where no borrower can leave without other workloads of its own team."""
ONLY_ABOVE: tuple[Rights, ...] = (("reservation",), ("fair_share",))
"""Rights over nothing but what teams use beyond a reservation, or a fair share."""
WITHOUT_GPUS = ""
"""Instead of the team of work without GPUs, which is a candidate whatever its team uses."""
SEVERAL_POOLS = ("", "")
"""Instead of the team of work beside the preemptor's pool that counts in several others."""
Team = str | tuple[str, str]
"""A team (or work `WITHOUT_GPUS`) in the preemptor's pool; or a pool with nodes on its hosts, and one there."""
Order = tuple[int, int, int, float, float, float, str]
"""The sort key of protection; its first three parts decide before the number of victims does."""
Standing = tuple[tuple[int, ...], tuple[int, ...]]
"""A team's shares, and the usage of the reservations that count it: what ranks and entitles its work."""


@dataclass(slots=True)
class Preemptor:
    """A pending workload that may evict others to start in a pool, by some rights."""

    cluster: Cluster
    workload: Workload
    need: Need
    account: Account
    pool: PoolState
    rights: Rights
    blocked: LineState | None = None
    """The line whose limit is in the way; only messages depend on it."""
    replaced_by: frozenset[str] = frozenset()
    """The workloads that replaced a start of it in this plan: it withdraws theirs only if they do not return."""
    kept_out: bool = False
    """Whether a static quota kept it out although victims had made room on a node."""
    gone: dict[Account, int] = field(default_factory=dict)
    """Team to the milli-GPUs of the victims chosen so far."""
    gone_on: dict[LineState, int] = field(default_factory=dict)
    """The same by the lines that count them."""
    _right_at_first: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Team and pool to whether all its work there is a candidate before any victim is chosen."""
    _beyond: dict[str, list[LineState]] | None = None
    _fair: dict[Account, int] = field(default_factory=dict)
    _orders: dict[str, Order] = field(default_factory=dict)
    _standings: dict[Team, Standing] = field(default_factory=dict)
    _able: list[Allocation] | None = None
    _where: dict[int, list[Allocation]] | None = None
    _beside: dict[int, list[Allocation]] | None = None
    _numbered: dict[str, list[tuple[int, Allocation]]] | None = None
    """Node to the candidates on it in any pool, each with its number among all candidates."""
    _own_rank: tuple[int, int] | None = None

    @property
    def milli_gpus(self) -> int:
        """Return the milli-GPUs of the request."""
        return self.need.total

    @property
    def over_quota(self) -> bool:
        """Whether it may evict by rules 7 and 9 only."""
        return "reservation" not in self.rights

    # Candidates

    def has_candidates(self) -> bool:
        """Whether there could be any candidate; False is certain, True is not."""
        if "own_team" in self.rights:
            pools = (self.pool, *(self.cluster.pools[name] for name in (*self.beyond(), *self.pool.peer_pools)))
            if self.cluster.lowest_priority(self.workload.team, pools) < self.cluster.priority(self.workload):
                return True
            if self.rights == BORROWERS_FIRST:
                return False  # the candidates are those of "reservation" alone
        if self._without_gpus():
            return True
        lowest = self.cluster.lowest_priorities
        beside = self.pool.peer_pools
        if beside and "reservation" in self.rights and any(self.cluster.without_gpus.get(pool) for pool in beside):
            return True
        names = (self.pool.pool.name, *self.beyond(), *beside)
        return any(self._any_are_candidates(lowest.get(name, {}), name) for name in names)

    def _any_are_candidates(self, names: Mapping[str, int], pool: str) -> bool:
        """Whether all work of any of some teams in a pool may be evicted, before any victim is chosen."""
        ledger = self.cluster.ledger
        alone = "reservation" in self.rights and "fair_share" not in self.rights and not ledger.nested
        if not alone or self.gone_on:
            return any(self._all_are_candidates(name, pool) for name in names)
        known = ledger.accounts
        if self.account.team.name in names and self._all_are_candidates(self.account.team.name, pool):
            return True
        if any(account in names for account in ledger.exceeding(pool) if account != self.account.team.name):
            return True
        return not names.keys() <= known.keys() and any(
            self._all_are_candidates(name, pool) for name in names if name not in known
        )

    def beyond(self) -> dict[str, list[LineState]]:
        """Return the other pools with candidates, and the lines there whose limits are in the way; computed once."""
        if self._beyond is None:
            own = self.pool.pool.name
            limits = self.account.limiting(own) if self.milli_gpus else ()
            need = self.milli_gpus
            lines = [line for line in limits if line.future_usage + need > (line.quota.limit or 0)]
            if not lines:
                self._beyond = {}
                return self._beyond
            others = [name for name in self.cluster.pools if name != own]
            reached = {name: [line for line in lines if line.quota.covers(name)] for name in others}
            self._beyond = {name: covering for name, covering in reached.items() if covering}
        return self._beyond

    def is_candidate(self, allocation: Allocation) -> bool:
        """Whether an allocation may be evicted first; if not, it may not be evicted after other victims either."""
        known = self.cluster.allocations.get(allocation.workload.id)
        here = known is not None and self.cluster.evictable(known) is allocation and allocation.is_in(self.pool)
        return here and self._is_candidate(allocation)

    def _is_candidate(self, allocation: Allocation) -> bool:
        """Whether an allocation in the pool that can be evicted may be evicted first."""
        victim = allocation.workload
        if victim.non_preemptible:
            return False
        if allocation.milli_gpus:
            return self.is_candidate_team_named(victim.team) and self._may_evict(allocation)
        return victim.id in self._without_gpus() and self._frees(allocation) and self._may_evict(allocation)

    def shares(self) -> dict[Team, int]:
        """Return the share of each team with candidates, in the pool and in those beside it."""
        pool, ledger = self.pool.pool.name, self.cluster.ledger
        names = [name for name in self.cluster.lowest_priorities.get(pool, {}) if self.is_candidate_team_named(name)]
        shares: dict[Team, int] = {name: ledger.account(name).share(pool) for name in names}
        if self.is_candidate_team_named(WITHOUT_GPUS):
            shares[WITHOUT_GPUS] = 0
        if self.pool.peer_pools:
            shares[SEVERAL_POOLS] = 0
        for other in self.pool.peer_pools:
            for name in self.cluster.lowest_priorities.get(other, {}):
                if self.is_candidate_team_named(name, other):
                    shares[other, name] = ledger.account(name).share(other)
            if "reservation" in self.rights:
                shares[other, WITHOUT_GPUS] = 0
        return shares

    def may_tighten(self) -> bool:
        """Whether a victim may make less room than it takes: its team's static quota grows by more than it frees."""
        ledger = self.cluster.ledger
        if not ledger.unlent_lines:
            return False
        return ledger.counts_twice or any(
            _freed(allocation) < allocation.milli_gpus or not allocation.parts for allocation in self.candidates()
        )

    def candidates_on(self, node: NodeState) -> list[Allocation]:
        """Return the candidates on a node, and those on other nodes of its host that hold what it has too little of."""
        if self._where is not None:
            return list(self._where.get(node.position, ()))
        if node.host_peers:
            here = [allocation for allocation in self.cluster.evictable_on(node) if self._is_candidate(allocation)]
            return each_once([*here, *self._candidates_beside(node)])
        if self.rights not in ONLY_ABOVE or self.cluster.protecting:
            return [allocation for allocation in self.cluster.evictable_on(node) if self._is_candidate(allocation)]
        candidates, able = [], dict[str, bool]()
        for allocation in self.cluster.evictable_on(node):  # the same, with one question for each team
            team = allocation.workload.team
            if not allocation.milli_gpus:
                may = self._is_candidate(allocation)
            elif allocation.workload.non_preemptible:
                may = False
            elif team in able:
                may = able[team]
            else:
                may = able[team] = self.is_candidate_team_named(team)
            if may:
                candidates.append(allocation)
        return candidates

    def _candidates_beside(self, node: NodeState) -> Iterator[Allocation]:
        """Iterate over the candidates on other nodes of a node's host that hold what it has too little of."""
        shortage = shortage_on(node, self.need) if node.suits(self.need) else None
        for other in node.host_peers if shortage else ():
            for allocation in self.cluster.evictable_on(other):
                if shortage and shortage.is_held_by(allocation.need) and self._may_leave(allocation):
                    yield allocation

    def _may_leave(self, allocation: Allocation) -> bool:
        """Whether an allocation beside the preemptor's nodes may be evicted first."""
        if allocation.workload.non_preemptible:
            return False
        if not allocation.milli_gpus:
            return "reservation" in self.rights and self._may_evict(allocation)
        team = allocation.workload.team
        return self.is_candidate_team_named(team, self.nearest(allocation)) and self._may_evict(allocation)

    def _beside_each(self) -> dict[int, list[Allocation]]:
        """Return the candidates beside each node of the pool, by its position; computed once."""
        if self._beside is None:
            nodes = [node for node in self.pool.nodes if node.host_peers] if self.pool.peer_pools else []
            self._beside = {n.position: beside for n in nodes if (beside := list(self._candidates_beside(n)))}
        return self._beside

    def candidates_beside(self, node: NodeState) -> list[Allocation]:
        """Return the candidates on the other nodes of a node's host, whose CPU, memory and pods it could use."""
        if not node.host_peers:
            return []
        if self._numbered is None:
            self._numbered = {}
            for number, allocation in enumerate(self.candidates()):
                for name in {part.node.node.name for part in allocation.parts}:
                    self._numbered.setdefault(name, []).append((number, allocation))
        candidates = dict(numbered for other in node.host_peers for numbered in self._numbered.get(other.node.name, ()))
        return [candidates[number] for number in sorted(candidates)]

    def nodes(self) -> list[NodeState]:
        """Return the nodes with candidates on them, or beside them on the same host, in order."""
        beside = {
            other.position
            for allocation in self.candidates()
            for part in allocation.parts
            for other in part.node.host_peers
            if other.pool is self.pool
        }
        return [self.pool.nodes[at] for at in sorted(beside.union(self.where()))]

    def where(self) -> dict[int, list[Allocation]]:
        """Return the candidates by position of the node of the pool on or beside which they are; computed once."""
        if self._where is None:
            by_node: dict[int, list[Allocation]] = {}
            for allocation in self.candidates():
                parts = allocation.parts_in(self.pool) if allocation.shares else allocation.parts
                for part in parts if allocation.shares or allocation.pool is self.pool else ():
                    here = by_node.setdefault(part.node.position, [])
                    if not here or here[-1] is not allocation:
                        here.append(allocation)
            for position, others in self._beside_each().items() if self.pool.peer_pools else ():
                by_node[position] = each_once([*by_node.get(position, ()), *others])
            self._where = by_node
        return self._where

    def candidates(self) -> list[Allocation]:
        """Return all candidates, those in other pools included that count on a limit in the way, or hold what a node of
        the pool on their host has too little of; computed once.

        Those on nodes outside the inventory hold quota, but no GPUs.
        """
        if self._able is None:
            self._able = list(self._candidates())
            if self.pool.peer_pools:
                beside = [allocation for candidates in self._beside_each().values() for allocation in candidates]
                self._able = each_once([*self._able, *beside])
        return self._able

    def _candidates(self) -> Iterator[Allocation]:
        cluster, pool = self.cluster, self.pool.pool.name
        names = [(pool, n) for n in cluster.lowest_priorities.get(pool, {}) if self.is_candidate_team_named(n)]
        light = {name: a for name, a in self._without_gpus().items() if self._frees(a)}
        for allocations in (*map(cluster.preemptible.__getitem__, names), light, self._elsewhere()):
            for running in allocations.values():
                planned = running.terminating or running.stuck or running.started_in_plan
                allocation = cluster.evictable(running) if planned else running
                if allocation is not None and self._may_evict(allocation):
                    yield allocation

    def _elsewhere(self) -> dict[str, Allocation]:
        """Return by id the candidates by team in other pools that count on a limit in the way."""
        cluster, limited = self.cluster, dict[str, Allocation]()
        for pool, lines in self.beyond().items():
            for name in cluster.lowest_priorities.get(pool, {}):
                chain = cluster.ledger.account(name).chain
                if any(line.account in chain for line in lines):
                    limited |= cluster.preemptible[pool, name]
        others = {id: a for id, a in limited.items() if not a.is_in(self.pool)}
        return {id: a for id, a in others.items() if self.is_candidate_team_named(a.workload.team, self.nearest(a))}

    def nearest(self, allocation: Allocation) -> str:
        """Return the pool in which an allocation stands in the way: the preemptor's, if it counts there."""
        if not allocation.shares:
            return allocation.pool.pool.name
        return (self.pool if allocation.is_in(self.pool) else allocation.pool).pool.name

    def _without_gpus(self) -> Mapping[str, Allocation]:
        """Return by id the work without GPUs that is a candidate for its CPU and memory (rule 2)."""
        in_the_way = self.need.cpu or self.need.memory or self.pool.limits_pods
        if "reservation" not in self.rights or not in_the_way:
            return {}
        return self.cluster.without_gpus.get(self.pool.pool.name, {})

    def _frees(self, allocation: Allocation) -> bool:
        """Whether work without GPUs holds CPU or memory that the preemptor requests, or pods where too few are left."""
        if (allocation.need.cpu and self.need.cpu) or (allocation.need.memory and self.need.memory):
            return True
        return any(part.node.pods_free_later < self.need.min_workers for part in allocation.parts)

    def _may_evict(self, allocation: Allocation) -> bool:
        """Whether neither `min_runtime` nor (where they matter) priority and ranks protect candidates of a team."""
        victim = allocation.workload
        if self.workload.kind == "job" and self.cluster.protecting and self.cluster.is_protected(victim):
            return False
        if "own_team" not in self.rights or not allocation.milli_gpus or victim.team != self.workload.team:
            return True
        return self._all_are_candidates(victim.team, self.nearest(allocation)) or self._ranks_below(victim)

    def _ranks_below(self, victim: Workload) -> bool:
        """Whether a workload of the same team has a lower priority, and no better rank in pool and profile."""
        if not self.cluster.is_below(victim, self.cluster.priority(self.workload)):
            return False
        if self._own_rank is None:
            self._own_rank = self._rank(self.workload)
        return self._rank(victim) >= self._own_rank

    def _rank(self, workload: Workload) -> tuple[int, int]:
        profile = self.cluster.profiles.get(workload.profile)
        in_pool = self.pool.rank.get(workload.profile, len(self.pool.rank))
        return in_pool, rank_in_profile(profile, workload.team) if profile else 0

    # Entitlement: whether the victim's team is above its reservation (or fair share) at this moment

    def may_evict_now(self, allocation: Allocation) -> bool:
        """Whether a candidate may be evicted after the victims chosen so far."""
        if (self.rights not in ONLY_ABOVE or not allocation.milli_gpus) and self.always_has_right(allocation):
            return True
        pool = self.nearest(allocation) if allocation.shares else allocation.pool.pool.name
        return self.has_right(self.cluster.account(allocation.workload), pool)

    def always_has_right(self, allocation: Allocation) -> bool:
        """Whether a candidate may be evicted whatever its team uses."""
        if not allocation.milli_gpus:
            return True
        if self.rights in ONLY_ABOVE:
            return False
        if allocation.workload.team != self.workload.team:
            return False
        any_priority = "own_team_any_priority" in self.rights
        return any_priority or ("own_team" in self.rights and self._ranks_below(allocation.workload))

    def right_over(self, allocation: Allocation) -> Right:
        """Return the right by which a victim is evicted."""
        if allocation.milli_gpus and self.always_has_right(allocation):
            return "own_team_any_priority" if "own_team_any_priority" in self.rights else "own_team"
        return "reservation" if "reservation" in self.rights else "fair_share"

    def has_right(self, account: Account, pool: str) -> bool:
        """Whether all work of a team in a pool may be evicted after the victims chosen so far."""
        if "own_team_any_priority" in self.rights and account is self.account:
            return True
        own_pool = self.pool.pool.name
        if "fair_share" in self.rights:  # of the GPUs of one pool
            return account is not self.account and pool == own_pool and self._above_fair_share(account)
        return "reservation" in self.rights and self.cluster.ledger.above(
            account, pool, self.account, own_pool, self.milli_gpus, self.gone_on
        )

    def standing(self, team: Team) -> Standing:
        """Return a team's standing before any victim is chosen."""
        known = self._standings.get(team)
        if known is None:
            pool, name = team if isinstance(team, tuple) else (self.pool.pool.name, team)
            account = self.cluster.ledger.account(name)
            usage = tuple(line.certain for level in account.chain for line in level.reserving(pool))
            known = self._standings[team] = account.shares(pool), usage
        return known

    def is_candidate_team_named(self, name: str, pool: str = "") -> bool:
        """Whether work of a team (or work `WITHOUT_GPUS`) may be a candidate before any victim is chosen.

        In the preemptor's pool, or in another one where a limit is in the way.
        """
        if "own_team" in self.rights and name == self.workload.team:
            return True
        return self._all_are_candidates(name, pool or self.pool.pool.name)

    def is_candidate_team(self, team: Team) -> bool:
        """Whether work of a team may be a candidate before any victim is chosen, in the pool or beside it."""
        return (
            self.is_candidate_team_named(team)
            if isinstance(team, str)
            else self.is_candidate_team_named(team[1], team[0])
        )

    def _all_are_candidates(self, name: str, pool: str) -> bool:
        """Whether all work of a team in a pool may be evicted, before any victim is chosen."""
        known = self._right_at_first.get((name, pool))
        if known is None:
            if name == WITHOUT_GPUS:
                known = bool(self._without_gpus())
            else:
                known = self.has_right(self.cluster.ledger.account(name), pool)
            self._right_at_first[name, pool] = known
        return known

    def _above_fair_share(self, account: Account) -> bool:
        if account not in self._fair:
            self._fair[account] = fair_over(self.cluster.ledger, account, self.pool, self.account, self.milli_gpus)
        over = account.over_quota_use(self.pool.pool.name, self.milli_gpus, self.account)
        return over - self.gone.get(account, 0) > self._fair[account]

    def choose(self, allocation: Allocation, amount: int) -> None:
        """Subtract milli-GPUs of an allocation from its team's usage (negative: add them again)."""
        gone, gone_on, shares = self.gone, self.gone_on, allocation.shares
        for level in self.cluster.account(allocation.workload).chain:
            gone[level] = gone.get(level, 0) + amount
            for line in level.lines if shares or level.covers_all else level.covering(allocation.pool.pool.name):
                part = amount * allocation.counts_on(line.quota) // max(1, allocation.milli_gpus) if shares else amount
                gone_on[line] = gone_on.get(line, 0) + part

    def chosen_so_far(self) -> tuple[dict[Account, int], dict[LineState, int]]:
        """Return what the chosen victims count, and forget it; `choose_again` restores it."""
        known = self.gone, self.gone_on
        self.gone, self.gone_on = {}, {}
        return known

    def choose_again(self, known: tuple[dict[Account, int], dict[LineState, int]]) -> None:
        """Restore what `chosen_so_far` returned."""
        self.gone, self.gone_on = known

    def became_candidates(self, grown: Iterable[Account]) -> set[str]:
        """Return the teams with more candidates than before, now that these accounts use more."""
        pool, ledger = self.pool.pool.name, self.cluster.ledger
        levels = {level for account in grown for level in account.chain}
        levels.difference_update((self.account.guarantor(pool) or self.account).chain[1:])
        if not levels:
            return set()
        return {
            name
            for name in self.cluster.lowest_priorities.get(pool, {})
            if not levels.isdisjoint((account := ledger.account(name)).chain)
            and ledger.above(account, pool, self.account, pool, self.milli_gpus, {})
        }

    # Protection

    def order(self, allocation: Allocation) -> Order:
        """Return the sort key of protection (rule 5.3) before any victim is chosen: smaller is evicted first."""
        known = self._orders.get(allocation.workload.id)
        if known is None:
            pool = self.cluster.pools[self.nearest(allocation)] if allocation.shares else allocation.pool
            known = self._orders[allocation.workload.id] = order_of(self.cluster, allocation, pool)
        return known


def _freed(allocation: Allocation) -> int:
    """Return the milli-GPUs that an eviction frees: none of nodes that are down or gone, nor of devices that are."""
    return sum(len(part.devices) * part.milli_per_device for part in allocation.parts if part.node.usable)


def each_once(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Return each allocation once, in the order in which they first occur."""
    return list({allocation.workload.id: allocation for allocation in allocations}.values())


def order_of(cluster: Cluster, allocation: Allocation, pool: PoolState) -> Order:
    """Return an allocation's sort key of protection (rule 5.3): smaller is evicted first; it ends in the id."""
    victim, account = allocation.workload, cluster.account(allocation.workload)
    started = victim.running_since
    return (
        victim.protected_with(account.team.priority) if victim.state == STARTING else account.team.priority,
        -account.share(pool.pool.name),
        cluster.priority(victim),
        lost_work(cluster, allocation) if cluster.settings.victim_order == "cheapest" else 0,
        -(cluster.now if started is None else started),
        -victim.submitted_at,
        victim.id,
    )


def lost_work(cluster: Cluster, allocation: Allocation) -> float:
    """Return the work that an eviction now would lose, in milli-GPU seconds."""
    victim = allocation.workload
    if allocation.started_in_plan:
        return 0.0
    since = [t for t in (victim.last_checkpoint_at, victim.started_at) if t is not None]
    return allocation.milli_gpus * (cluster.now - max(since)) if since else 0.0
