"""The snapshot on its feet: everything in its place, and the four moves that a plan is made of.

`start`, `leave`, `claim` and their reverse keep nodes, pools and the ledger in step. A search tries moves
and takes them back; what stays is the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .limits import Account, Ledger, Line
from .need import Need, need_of
from .seats import furnish, honour, reseat
from .state import Node, Profile, Snapshot, Workload
from .world import NodeState, Part, PoolState, Tenancy, placement_of

NOBODY = 1 << 30
"""After every priority."""


class Cluster:
    """All that one decision looks at and changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.now = snapshot.now
        self.settings = snapshot.settings
        self.paused = frozenset(snapshot.paused)
        self.profiles: dict[str, Profile] = {p.name: p for p in snapshot.profiles}
        self.policies = frozenset(p.name for p in snapshot.policies)
        self.pools: dict[str, PoolState] = {p.name: PoolState(p) for p in sorted(snapshot.pools, key=lambda p: p.name)}
        self.ledger = Ledger(sorted(snapshot.policies, key=lambda p: p.name))
        self.nodes: dict[str, NodeState] = {}
        self.workloads: dict[str, Workload] = {}
        self.tenancies: dict[str, Tenancy] = {}
        self.claims: dict[str, Tenancy] = {}
        self.claimants: dict[str, Workload] = {}
        """Those who were promised a place when the snapshot was taken."""
        self.staying: list[str] = []
        """The ids of those who run, and below of those who were told to go, in order."""
        self.leaving: list[str] = []
        self.pool_now: dict[str, int] = dict.fromkeys(self.pools, 0)
        self.pool_future: dict[str, int] = dict.fromkeys(self.pools, 0)
        self.protecting = frozenset(name for name, profile in self.profiles.items() if profile.min_runtime)
        """The profiles whose work jobs may not stop at once."""
        self.rankings: dict[tuple[object, ...], Any] = {}
        """What a search for victims learned that the next one may use."""
        self.answers: dict[tuple[object, ...], Any] = {}
        """What was found out about the finished plan, for those who wait and ask the same."""
        self.capacities: dict[tuple[str, Need], tuple[int, int]] = {}
        """How many workers the nodes of a pool would host, were they empty: all nodes, and those that are up."""
        self.rooms: dict[tuple[object, ...], Any] = {}
        """When there will be room for a need in a pool, kept from one decision to the next."""
        self.endings: dict[Line, Any] = {}
        """Who ends when under a limit, kept likewise."""
        self.stoppable: dict[str, dict[str, int]] = {}
        """Pool to policy to the lowest priority among its work there that may be stopped."""
        self.loose: dict[tuple[str, str], dict[str, Tenancy]] = {}
        """Pool and policy to all the work there that may be stopped, by id."""
        self.yielding: set[str] = set()
        """The ids of those who ran so long that they count one priority lower."""
        self.yields_at: list[tuple[float, str]] = []
        """When others will have, the first one first (a heap)."""
        self.promised_by: dict[str, list[Tenancy]] = {}
        self.attached: dict[tuple[str, str], bool] = {}
        """Policy and profile to whether the one may use the other."""
        self._priorities: dict[tuple[str, str], dict[int, int]] = {}
        self.fresh: dict[str, Tenancy] = {}
        """Starts of this plan, or of the last one, of which the world has not been heard yet."""
        self._told: dict[str, Tenancy] = {}
        self._needs: dict[tuple[object, ...], Need] = {}
        self._serving: dict[str, tuple[PoolState, ...]] = {}
        furnish(self, snapshot.nodes, snapshot.workloads)
        self.begin()

    # From one decision to the next

    def begin(self) -> None:
        """Begin a decision: forget what was learned in the last one, and keep what was promised."""
        self.rankings.clear()
        self.answers.clear()
        self.ledger.grown.clear()
        for pool in self.pools.values():
            pool.begin()
        honour(self)

    def renew(self, node: Node) -> None:
        """Take a node as it is now: up or down, cordoned, or with other strangers on it."""
        state = self.nodes[node.name]
        reseat(self, state, node)
        state.pool.packing = None
        self.capacities.clear()
        self.rooms.clear()

    def take_back(self) -> None:
        """Undo all moves of a decision, so that everything is as the snapshot showed it, and nothing promised."""
        self.take_back_but_starts()
        for tenancy in list(self.fresh.values()):
            self.withdraw(tenancy)

    def take_back_but_starts(self) -> None:
        """Undo the others: what was started is left where it is, for the world is likely to say the same."""
        for tenancy in list(self.claims.values()):
            self.unclaim(tenancy.workload)
        for tenancy in list(self._told.values()):
            self.stay(tenancy)

    # Looking things up

    def need(self, workload: Workload) -> Need:
        """Give what a workload asks for."""
        w = workload
        key = (w.profile, w.gpus, w.workers, w.min_workers, w.cpu, w.memory)
        need = self._needs.get(key)
        if need is None:
            need = self._needs[key] = need_of(workload, self.profiles.get(workload.profile))
        return need

    def account(self, workload: Workload) -> Account:
        """Give the account that a workload counts on."""
        found = self.ledger.accounts.get(workload.policy)
        return found if found is not None else self.ledger.account(workload.policy)

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

    def priority(self, workload: Workload) -> int:
        """Give the priority that a workload has now: one lower once it ran long, so that shorter work gets its turn."""
        return workload.priority - (workload.id in self.yielding)

    def less_than(self, pool: PoolState, policy: str, priority: int) -> Iterator[Tenancy]:
        """List a team's work in a pool that may be stopped, has not been told to go, and has a lower priority."""
        yielding = self.yielding
        for name, tenancy in self.loose.get((pool.pool.name, policy), {}).items():
            if tenancy.workload.priority - (name in yielding) < priority and not tenancy.leaving:
                yield tenancy

    def lowest(self, policy: str, pools: Iterable[PoolState]) -> int:
        """Give the lowest priority among the work that a team may stop for its own in these pools; else NOBODY."""
        found = NOBODY
        if self.settings.in_team_preemption:
            for pool in pools:
                teams = self.stoppable.get(pool.pool.name)
                if teams and policy in teams:
                    found = min(found, teams[policy])
        return found

    def grace(self, workload: Workload) -> float:
        """Give how long a workload may take to save and leave."""
        profile = self.profiles.get(workload.profile)
        return profile.grace if profile and profile.grace is not None else self.settings.grace

    def time_limit(self, workload: Workload) -> float | None:
        """Give the longest time that one attempt may take; None where nothing limits it."""
        profile = self.profiles.get(workload.profile)
        return workload.time_limit if workload.time_limit is not None else profile.time_limit if profile else None

    def waits_too_long(self, workload: Workload) -> bool:
        """Say whether a workload has waited so long that GPUs are held for it."""
        return self.now - workload.submitted_at >= self.settings.starvation_after

    def over_capacity(self, pool: PoolState, amount: int, later: bool = False) -> bool:
        """Say whether `amount` more would exceed the pool's own cap."""
        capacity = pool.pool.capacity
        if capacity is None:
            return False
        name = pool.pool.name
        used = self.pool_future[name] if later else max(self.pool_now[name], self.pool_future[name])
        return used + amount > capacity

    # The moves

    def start(self, workload: Workload, need: Need, parts: tuple[Part, ...]) -> Tenancy:
        """Give GPUs to a workload, now."""
        tenancy = self._tenancy(workload, need, parts)
        tenancy.fresh = True
        self.tenancies[workload.id] = self.fresh[workload.id] = tenancy
        self.book(tenancy, now=tenancy.amount)
        self.count(tenancy, 1)
        for part in parts:
            part.node.shift(part, need, -1, -1)
            part.node.guests[workload.id] = tenancy
        return tenancy

    def widen(self, tenancy: Tenancy, part: Part) -> None:
        """Give one more worker to a gang that was just started."""
        amount = part.milli * len(part.devices)
        tenancy.parts = (*tenancy.parts, part)
        tenancy.amount += amount
        self.book(tenancy, now=amount)
        self.note(tenancy)
        part.node.shift(part, tenancy.need, -1, -1)
        part.node.guests[tenancy.workload.id] = tenancy

    def withdraw(self, tenancy: Tenancy) -> None:
        """Take `start` back."""
        del self.tenancies[tenancy.workload.id], self.fresh[tenancy.workload.id]
        self.book(tenancy, now=-tenancy.amount)
        self.count(tenancy, -1)
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, 1, 1)
            part.node.guests.pop(tenancy.workload.id, None)

    def leave(self, tenancy: Tenancy) -> None:
        """Tell a workload to go: what it holds is part of the future, not of now."""
        tenancy.leaving = True
        self._told[tenancy.workload.id] = tenancy
        self.book(tenancy, leaving=tenancy.amount)
        self._shift(tenancy, 1)

    def stay(self, tenancy: Tenancy) -> None:
        """Take `leave` back."""
        tenancy.leaving = False
        del self._told[tenancy.workload.id]
        self.book(tenancy, leaving=-tenancy.amount)
        self._shift(tenancy, -1)

    def claim(self, workload: Workload, need: Need, parts: tuple[Part, ...]) -> Tenancy:
        """Promise GPUs of the future to a workload."""
        tenancy = self._tenancy(workload, need, parts)
        self.claims[workload.id] = tenancy
        old = self.tenancies.get(workload.id)
        if old is not None and old.pool is tenancy.pool:
            tenancy.moving = min(old.amount, tenancy.amount)
        self.book(tenancy, claimed=tenancy.amount, moving=tenancy.moving)
        for part in parts:
            part.node.shift(part, need, 0, -1)
        return tenancy

    def unclaim(self, workload: Workload) -> tuple[Part, ...]:
        """Take a promise back, and give what had been promised."""
        tenancy = self.claims.pop(workload.id, None)
        if tenancy is None:
            return ()
        self.book(tenancy, claimed=-tenancy.amount, moving=-tenancy.moving)
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, 0, 1)
        return tenancy.parts

    def count(self, tenancy: Tenancy, sign: int) -> None:
        """Count somebody (or, with -1, no longer) among those who may be stopped and those under limits."""
        workload, pool = tenancy.workload, tenancy.pool.pool.name
        for line in self.account(workload).limiting(pool):
            line.see(workload.id, tenancy if sign > 0 else None)
        if workload.firm or not tenancy.amount:
            return
        key = (pool, workload.policy)
        if sign > 0:
            self.loose.setdefault(key, {})[workload.id] = tenancy
        else:
            del self.loose[key][workload.id]
        many = self._priorities.setdefault(key, {})
        priority = self.priority(workload)
        many[priority] = many.get(priority, 0) + sign
        if not many[priority]:
            del many[priority]
        lowest = self.stoppable.setdefault(pool, {})
        if many:
            lowest[workload.policy] = min(many)
        else:
            del lowest[workload.policy]

    def note(self, tenancy: Tenancy) -> None:
        """Note on the limits that count somebody that its end is another than before."""
        for line in self.account(tenancy.workload).limiting(tenancy.pool.pool.name):
            line.changes += 1

    def _shift(self, tenancy: Tenancy, later: int) -> None:
        self.note(tenancy)
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, 0, later)

    def _tenancy(self, workload: Workload, need: Need, parts: tuple[Part, ...]) -> Tenancy:
        return Tenancy(workload, need, parts[0].node.pool, parts, need.gpus * len(parts))

    def book(self, tenancy: Tenancy, now: int = 0, leaving: int = 0, claimed: int = 0, moving: int = 0) -> None:
        """Add to the lines and to the pool what somebody holds, gives up or was promised."""
        workload, pool = tenancy.workload, tenancy.pool.pool.name
        account, firm, owner = self.account(workload), workload.firm, workload.owner
        self.ledger.book(account, pool, firm, owner, now=now, leaving=leaving, claimed=claimed, moving=moving)
        self.pool_now[pool] += now
        self.pool_future[pool] += now - leaving + claimed


__all__ = ["Cluster", "placement_of"]
