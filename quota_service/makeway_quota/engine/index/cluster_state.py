"""The cluster of one decision: nodes, allocations, ledger, and the operations that a plan is made of.

`start`, `evict`, `nominate` and their inverses keep nodes, pools and the ledger in step. A search tries operations
and undoes them; what remains is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..request import Need, need_of
from ..snapshot import Profile, Snapshot, Workload
from .capacity import CapacityCache
from .ledger import Account, Ledger, LineState
from .nodes import Allocation, NodeState, PoolState, WorkerPlacement, numbered

NO_PRIORITY = 1 << 30
"""Higher than every priority: no candidate."""
_MAX_NEEDS = 8_192
"""Requests that are kept; beyond, all of them are made again."""


def _no_pause() -> None:
    """Go on at once."""


@dataclass(slots=True)
class Late:
    """When what terminates is stuck (rule 5.2)."""

    workloads: list[tuple[float, str]] = field(default_factory=list)
    """A heap of the times at which evicted workloads are stuck if they still terminate, with their ids."""
    nodes: set[str] = field(default_factory=set)
    """The nodes on which ended attempts still hold something."""
    nodes_at: list[tuple[float, str]] = field(default_factory=list)
    """A heap of the times at which what they hold is stuck, with the names of the nodes."""


class ClusterState:
    """The state that one decision reads and changes."""

    hosts: dict[str, list[NodeState]]
    """The nodes of each host that has a name, as they were added."""
    launches: bool = True
    """Whether machines of autoscaled pools are launched whose size is not known."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.now = snapshot.now
        self.settings = snapshot.settings
        self.paused = frozenset(snapshot.paused)
        self.profiles: dict[str, Profile] = {p.name: p for p in snapshot.profiles}
        self.policies = frozenset(p.name for p in snapshot.policies)
        self.pools: dict[str, PoolState] = {p.name: PoolState(p) for p in sorted(snapshot.pools, key=lambda p: p.name)}
        self.declared = frozenset(self.pools)
        """The pools that the snapshot declares, without those that only a node names."""
        self.ledger = Ledger(sorted(snapshot.policies, key=lambda p: p.name))
        self.nodes: dict[str, NodeState] = {}
        self.workloads: dict[str, Workload] = {}
        self.allocations: dict[str, Allocation] = {}
        self.nominations: dict[str, Allocation] = {}
        self.shrunk: dict[str, Allocation] = {}
        """The gangs that gave up workers in this plan, by id: what they keep."""
        self.nominees: dict[str, Workload] = {}
        """Workloads with a nomination in the snapshot, by id."""
        self.running: list[str] = []
        """The ids of running workloads, sorted; `terminating` has those of terminating ones."""
        self.terminating: list[str] = []
        self.pool_usage: dict[str, int] = dict.fromkeys(self.pools, 0)
        self.future_pool_usage: dict[str, int] = dict.fromkeys(self.pools, 0)
        self.protecting = frozenset(name for name, profile in self.profiles.items() if profile.min_runtime)
        """The profiles with a `min_runtime`."""
        self._protection_at: float | None = None
        self.rankings: dict[tuple[object, ...], Any] = {}
        """Rankings of nodes by the cost of their victims, kept for the next search."""
        self.keeps_bounds = False
        """Whether the bounds of victims are kept from one decision to the next, as for many questions in a row."""
        self.pause: Callable[[], None] = _no_pause
        """Called between the steps of a search for victims: a what-if waits there while a cycle is under way."""
        self.answers: dict[tuple[object, ...], Any] = {}
        """Results about the finished plan, shared by workloads with the same request."""
        self.capacities = CapacityCache()
        """Present and future room for a request in a pool, kept from one cycle to the next."""
        self.absent: dict[str, set[str]] = {}
        """Node outside the inventory to the ids of admitted workloads whose placement names it."""
        self.endings: dict[LineState, Any] = {}
        """Line to the expected ends of the allocations that count on its limit, kept from one cycle to the next."""
        self.lowest_priorities: dict[str, dict[str, int]] = {}
        """Pool to team to the lowest priority among its preemptible work there."""
        self.preemptible: dict[tuple[str, str], dict[str, Allocation]] = {}
        """Pool and team to the preemptible work there, by id."""
        self.without_gpus: dict[str, dict[str, Allocation]] = {}
        """Pool to the preemptible work there that holds no GPUs, by id."""
        self.yielding: set[str] = set()
        """The ids of jobs that ran for `yields_after` and so count one priority lower."""
        self.yields_at: list[tuple[float, str]] = []
        """A heap of the times at which other jobs will, with their ids."""
        self.terminating_for: dict[str, list[Allocation]] = {}
        self.hosts, self.late = {}, Late()
        self.attached: dict[tuple[str, str], bool] = {}
        """Team and profile to whether the team may use the profile."""
        self._priorities: dict[tuple[str, str], dict[int, int]] = {}
        self.fresh: dict[str, Allocation] = {}
        """Starts of this plan, or of the last one, that no snapshot has confirmed yet."""
        self._evicted: dict[str, Allocation] = {}
        self._needs: dict[tuple[object, ...], Need] = {}
        self._serving: dict[str, tuple[PoolState, ...]] = {}

    # Decisions

    def reset(self) -> None:
        """Undo all operations of a decision; the cluster is as the snapshot, without nominations."""
        self.reset_except_starts()
        for allocation in list(self.fresh.values()):
            self.withdraw(allocation)

    def reset_except_starts(self) -> None:
        """Undo all operations but starts, which the next snapshot is likely to confirm."""
        for allocation in list(self.nominations.values()):
            self.withdraw_nomination(allocation.workload)
        for allocation in list(self._evicted.values()):
            self.restore(allocation)

    # Lookups

    def need(self, workload: Workload) -> Need:
        """Return what a workload requests."""
        w = workload
        key = (w.profile, w.gpus, w.workers, w.min_workers, w.cpu, w.memory, w.avoid, w.kind, w.preemptible)
        need = self._needs.get(key)
        if need is None:
            if len(self._needs) >= _MAX_NEEDS:
                self._needs.clear()
            need = self._needs[key] = need_of(workload, self.profiles.get(workload.profile))
        return need

    def account(self, workload: Workload) -> Account:
        """Return the account that a workload counts on."""
        account = self.ledger.accounts.get(workload.team)
        return account if account is not None else self.ledger.account(workload.team)

    def pools_of(self, workload: Workload) -> tuple[PoolState, ...]:
        """List the pools a workload may use, first choice first."""
        return self.serving(workload.profile)

    def serving(self, profile: str) -> tuple[PoolState, ...]:
        """List the pools that work of a profile may use, first choice first."""
        if profile not in self._serving:
            known = self.profiles.get(profile)
            names = known.pools if known and known.pools else tuple(sorted(self.pools))
            self._serving[profile] = tuple(self.pools[name] for name in names if name in self.pools)
        return self._serving[profile]

    def know(self, pool: PoolState) -> None:
        """Connect a pool to what reservations guarantee there, and to its profiles."""
        name, known = pool.pool.name, dict[str, Need | None]()

        def smallest(model: str) -> Need | None:
            if model not in known:
                known[model] = self._smallest(pool, model)
            return known[model]

        pool.guaranteed, pool.smallest = partial(self.ledger.unused, name), smallest

    def _smallest(self, pool: PoolState, model: str) -> Need | None:
        """Return the request of the smallest profile with GPUs that runs on a model in a pool; ties go by name."""
        needs = ((need_of(Workload("", "", name), self.profiles[name]), name) for name in self.profiles)
        able = [
            ((need.total, need.gpus, need.cpu, need.memory, name), need)
            for need, name in needs
            if need.gpus and (not need.models or model in need.models) and pool in self.serving(name)
        ]
        return min(able, key=lambda item: item[0])[1] if able else None

    def priority(self, workload: Workload) -> int:
        """Return the present priority of a workload: one lower once it ran for `yields_after`."""
        return workload.priority - (workload.id in self.yielding)

    def evictable(self, allocation: Allocation) -> Allocation | None:
        """Return what of an allocation can be evicted: all of it, or what a gang keeps that shrank in this plan.

        None if it terminates, or if its start keeps a nomination: no plan withdraws such a start (rule 5.8). A gang
        that restarts with more than its least number of workers may still give some up.
        """
        if allocation.terminating or allocation.stuck:
            return self.shrunk.get(allocation.workload.id)
        keeps = allocation.started_in_plan and 0 < len(allocation.workload.nomination) <= allocation.need.min_workers
        return None if keeps else allocation

    def evictable_on(self, node: NodeState) -> list[Allocation]:
        """Return what of the allocations on a node can be evicted there."""
        result = []
        for allocation in node.allocations.values():
            if allocation.terminating or allocation.stuck:
                kept = self.shrunk.get(allocation.workload.id) if self.shrunk else None
                if kept is None or not any(part.node is node for part in kept.parts):
                    continue
                allocation = kept
            elif allocation.started_in_plan and self.evictable(allocation) is None:
                continue
            result.append(allocation)
        return result

    def preemptible_below(self, pool: PoolState, team: str, priority: int) -> Iterator[Allocation]:
        """List what a team's preemptible work of a lower priority in a pool has that can be evicted."""
        for allocation in self.preemptible.get((pool.pool.name, team), {}).values():
            victim = self.evictable(allocation)
            if victim is not None and self.is_below(allocation.workload, priority):
                yield victim

    def pools_with_candidates(self, account: Account, pools: Iterable[PoolState]) -> Iterable[PoolState]:
        """Return the pools with candidates for work in these pools: all, where a limit may be in the way."""
        limited = account.is_limited and any(account.limiting(pool.pool.name) for pool in pools)
        return self.pools.values() if limited else self.with_peer_pools(pools)

    def with_peer_pools(self, pools: Iterable[PoolState]) -> Iterable[PoolState]:
        """Return these pools, and those with nodes on the hosts of their nodes, where candidates may be, too."""
        if not self.hosts:
            return pools
        names = dict.fromkeys(name for pool in pools for name in (pool.pool.name, *pool.peer_pools))
        return [self.pools[name] for name in names]

    def is_below(self, workload: Workload, priority: int) -> bool:
        """Whether a workload's priority is lower than this, so that work of its own team may evict it (rule 5.7)."""
        return self.priority(workload) < priority

    def is_protected(self, workload: Workload) -> bool:
        """Whether a running workload is younger than the `min_runtime` of its profile."""
        if workload.profile not in self.protecting:
            return False
        if self._protection_at is not None:
            return self.protected_until(workload) > self._protection_at
        started = workload.running_since
        return started is None or self.now - started < self.profiles[workload.profile].min_runtime

    def protected_until(self, workload: Workload) -> float:
        """Return when a workload is as old as the `min_runtime` of its profile."""
        started = workload.running_since
        return (self.now if started is None else started) + self.profiles[workload.profile].min_runtime

    @contextmanager
    def protection_at(self, at: float) -> Iterator[None]:
        """Have `is_protected` tell what `min_runtime` protects at another time; all else stays as it is now."""
        rankings, self.rankings, self._protection_at = self.rankings, {}, at
        try:
            yield
        finally:
            self.rankings, self._protection_at = rankings, None

    def lowest_priority(self, team: str, pools: Iterable[PoolState]) -> int:
        """Return the lowest priority among a team's candidates for its own work in these pools; else NO_PRIORITY."""
        result = NO_PRIORITY
        if self.settings.in_team_preemption:
            for pool in pools:
                teams = self.lowest_priorities.get(pool.pool.name)
                if teams and team in teams:
                    result = min(result, teams[team])
        return result

    @property
    def stuck_before(self) -> float:
        """The deadline before which whatever still terminates is stuck (rule 5.2)."""
        return self.now - self.settings.stuck_after

    def is_stuck(self, workload: Workload) -> bool:
        """Whether an evicted workload should have ended long ago."""
        evicted = workload.state == "checkpointing" and workload.deadline is not None
        return evicted and (workload.deadline or 0.0) <= self.stuck_before

    def grace(self, workload: Workload) -> float:
        """Return the seconds that a workload may take to terminate."""
        profile = self.profiles.get(workload.profile)
        return profile.grace if profile and profile.grace is not None else self.settings.grace

    def time_limit(self, workload: Workload) -> float | None:
        """Return the longest time that one attempt may take; None where nothing limits it."""
        profile = self.profiles.get(workload.profile)
        return workload.time_limit if workload.time_limit is not None else profile.time_limit if profile else None

    def waits_too_long(self, workload: Workload) -> bool:
        """Whether a workload waited for longer than `starvation_after`, so that GPUs are held for it."""
        return self.now - workload.submitted_at >= self.settings.starvation_after

    def over_capacity(self, pool: PoolState, amount: int, in_future: bool = False) -> bool:
        """Whether `amount` more would exceed the pool's capacity."""
        capacity = pool.pool.capacity
        if capacity is None:
            return False
        name = pool.pool.name
        used = self.future_pool_usage[name] if in_future else max(self.pool_usage[name], self.future_pool_usage[name])
        return used + amount > capacity

    # Operations

    def start(self, workload: Workload, need: Need, parts: tuple[WorkerPlacement, ...]) -> Allocation:
        """Start a workload on GPUs that are free now; its workers are numbered from 0."""
        parts = numbered(parts)
        allocation = self._allocation(workload, need, parts)
        allocation.started_in_plan = True
        self.start_again(allocation)
        return allocation

    def start_again(self, allocation: Allocation) -> None:
        """Undo `withdraw`."""
        self.allocations[allocation.workload.id] = self.fresh[allocation.workload.id] = allocation
        self.record(allocation, usage=allocation.milli_gpus)
        self.count(allocation, 1)
        for part in allocation.parts:
            part.node.shift(part, allocation.need, -1, -1)
            part.node.allocations[allocation.workload.id] = allocation

    def widen(self, allocation: Allocation, part: WorkerPlacement) -> None:
        """Start one more worker of a gang that was just started."""
        amount = part.milli_per_device * len(part.devices)
        allocation.parts = (*allocation.parts, part)
        allocation.milli_gpus += amount
        self.record(allocation, usage=amount)
        self.note(allocation)
        part.node.shift(part, allocation.need, -1, -1)
        part.node.allocations[allocation.workload.id] = allocation

    def withdraw(self, allocation: Allocation) -> None:
        """Undo `start`."""
        del self.allocations[allocation.workload.id], self.fresh[allocation.workload.id]
        self.record(allocation, usage=-allocation.milli_gpus)
        self.count(allocation, -1)
        for part in allocation.parts:
            part.node.shift(part, allocation.need, 1, 1)
            part.node.allocations.pop(allocation.workload.id, None)

    def evict(self, allocation: Allocation) -> None:
        """Mark an allocation as terminating: what it holds is free later, not now."""
        allocation.terminating = True
        self._evicted[allocation.workload.id] = allocation
        self.record(allocation, terminating=allocation.milli_gpus)
        self._shift(allocation, 1)

    def restore(self, allocation: Allocation) -> None:
        """Undo `evict`."""
        allocation.terminating = False
        del self._evicted[allocation.workload.id]
        self.record(allocation, terminating=-allocation.milli_gpus)
        self._shift(allocation, -1)

    def nominate(self, workload: Workload, need: Need, parts: tuple[WorkerPlacement, ...]) -> Allocation:
        """Nominate GPUs of the future for a workload."""
        allocation = self._allocation(workload, need, parts)
        old = self.allocations.get(workload.id)
        if old is not None:
            shares = old.shares or ((old.pool, old.milli_gpus),)
            allocation.moving = tuple([(pool.pool.name, amount) for pool, amount in shares])
        self.nominate_again(allocation)
        return allocation

    def nominate_again(self, allocation: Allocation) -> None:
        """Restore a nomination that was withdrawn."""
        self.nominations[allocation.workload.id] = allocation
        if allocation.is_shrunk_gang:
            self.shrunk[allocation.workload.id] = allocation
        self.record(allocation, nominated=allocation.milli_gpus)
        for part in allocation.parts:
            part.node.shift(part, allocation.need, 0, -1)

    @contextmanager
    def later(self, starts: Iterable[Allocation]) -> Iterator[None]:
        """Treat starts of this plan, and nominations, as work that runs already, within a block."""
        turned = list(starts)
        for start in turned:
            self._turn(start, 1)
        yield
        for start in turned:
            self._turn(start, -1)

    def _turn(self, start: Allocation, sign: int) -> None:
        name = start.workload.id
        if name in self.fresh:
            start.started_in_plan = sign < 0
        elif self.allocations.get(name, start) is not start:  # a gang that shrinks, and holds more as yet
            start.is_shrunk_gang = sign > 0
            self.shrunk.update({name: start}) if sign > 0 else self.shrunk.pop(name)
        else:
            start.is_shrunk_gang = sign > 0
            for pool in start.pools:
                self._count_candidate(start, pool.pool.name, sign)
            self._list(start, sign > 0)
        for part in start.parts:
            for node in part.node.host if part.node.host_peers else (part.node,):
                node.pool.touch(node)

    def _list(self, nomination: Allocation, there: bool) -> None:
        """List a nomination among what runs, or no more."""
        name = nomination.workload.id
        for known in (self.allocations, *[part.node.allocations for part in nomination.parts]):
            if there:
                known[name] = nomination
            else:
                known.pop(name, None)

    def shrink(self, workload: Workload, need: Need, parts: tuple[WorkerPlacement, ...]) -> None:
        """Nominate a gang that gives up workers to the parts that it keeps, which can be evicted, too."""
        allocation = self.nominate(workload, need, parts)
        allocation.is_shrunk_gang = True
        self.shrunk[workload.id] = allocation

    def is_shrinking(self, nomination: Allocation) -> bool:
        """Whether a nomination is what a gang keeps that gives up workers because of an earlier plan."""
        if nomination.is_shrunk_gang or nomination.workload.state != "checkpointing":
            return False
        return set(nomination.workload.nomination) <= set(nomination.workload.placement)

    def withdraw_nomination(self, workload: Workload) -> tuple[WorkerPlacement, ...]:
        """Withdraw a nomination and return its parts."""
        allocation = self.nominations.pop(workload.id, None)
        if allocation is None:
            return ()
        self.shrunk.pop(workload.id, None)
        self.record(allocation, nominated=-allocation.milli_gpus)
        for part in allocation.parts:
            part.node.shift(part, allocation.need, 0, 1)
        return allocation.parts

    def count(self, allocation: Allocation, sign: int) -> None:
        """Add an allocation to the candidates and to the limits that count it (-1: remove it)."""
        workload = allocation.workload
        if self.account(workload).is_limited:
            for line in self._limits(allocation):
                line.see(workload.id, allocation if sign > 0 else None)
        if workload.non_preemptible or allocation.stuck:
            return
        for pool in allocation.pools if allocation.shares else (allocation.pool,):
            self._count_candidate(allocation, pool.pool.name, sign)

    def _limits(self, allocation: Allocation) -> Iterable[LineState]:
        """Return the limits that count an allocation, each once."""
        account = self.account(allocation.workload)
        if not allocation.shares:
            return account.limiting(allocation.pool.pool.name)
        return dict.fromkeys(line for pool in allocation.pools for line in account.limiting(pool.pool.name))

    def _count_candidate(self, allocation: Allocation, pool: str, sign: int) -> None:
        workload = allocation.workload
        if not allocation.milli_gpus:
            light = self.without_gpus.setdefault(pool, {})
            light.update({workload.id: allocation}) if sign > 0 else light.pop(workload.id)
            return
        key = (pool, workload.team)
        if sign > 0:
            self.preemptible.setdefault(key, {})[workload.id] = allocation
        else:
            del self.preemptible[key][workload.id]
        many = self._priorities.setdefault(key, {})
        priority = self.priority(workload)
        many[priority] = many.get(priority, 0) + sign
        if not many[priority]:
            del many[priority]
        lowest = self.lowest_priorities.setdefault(pool, {})
        if many:
            lowest[workload.team] = min(many)
        else:
            del lowest[workload.team]

    def note(self, allocation: Allocation) -> None:
        """Record a changed end of an allocation on the limits that count it."""
        if self.account(allocation.workload).is_limited:
            for line in self._limits(allocation):
                line.changes += 1

    def _shift(self, allocation: Allocation, later: int) -> None:
        self.note(allocation)
        for part in allocation.parts:
            part.node.shift(part, allocation.need, 0, later)

    def _allocation(self, workload: Workload, need: Need, parts: tuple[WorkerPlacement, ...]) -> Allocation:
        return Allocation(workload, need, parts[0].node.pool, parts, need.gpus * len(parts))

    def record(self, allocation: Allocation, usage: int = 0, terminating: int = 0, nominated: int = 0) -> None:
        """Add amounts that an allocation holds, releases or is nominated for to its lines and its pools."""
        workload = allocation.workload
        account, non_preemptible, owner = self.account(workload), workload.non_preemptible, workload.owner
        amounts = usage, terminating, nominated
        for state, part in allocation.shares or ((allocation.pool, allocation.milli_gpus),):
            pool = state.pool.name
            if allocation.shares:  # all of it starts, ends or terminates at once
                usage, terminating, nominated = (amount * part // max(1, allocation.milli_gpus) for amount in amounts)
            self.ledger.record(
                account,
                pool,
                non_preemptible,
                owner,
                usage=usage,
                terminating=terminating,
                nominated=nominated,
                booting=nominated and allocation.milli_gpus_on_booting * nominated // allocation.milli_gpus,
                moving=allocation.moving if nominated else (),
            )
            self.pool_usage[pool] += usage
            self.future_pool_usage[pool] += usage - terminating + nominated
