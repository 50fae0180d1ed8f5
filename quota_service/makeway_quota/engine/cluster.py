"""The snapshot on its feet: everything in its place, and the four moves that a plan is made of.

`start`, `leave`, `claim` and their reverse keep nodes, pools and the ledger in step. A search tries moves
and takes them back; what stays is the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .limits import Account, Ledger
from .packing import Shape
from .state import ADMITTED, GPU, LIVE, Placement, Pool, Profile, Snapshot, Workload
from .world import Need, NodeState, Part, PoolState, Tenancy, devices_of, need_of, pick, placement_of


class Cluster:
    """All that one decision looks at and changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.now = snapshot.now
        self.settings = snapshot.settings
        self.profiles: dict[str, Profile] = {p.name: p for p in snapshot.profiles}
        self.pools: dict[str, PoolState] = {p.name: PoolState(p) for p in sorted(snapshot.pools, key=lambda p: p.name)}
        self.ledger = Ledger(sorted(snapshot.policies, key=lambda p: p.name))
        self.nodes: dict[str, NodeState] = {}
        self.tenancies: dict[str, Tenancy] = {}
        self.claims: dict[str, Tenancy] = {}
        self.pool_now: dict[str, int] = dict.fromkeys(self.pools, 0)
        self.pool_future: dict[str, int] = dict.fromkeys(self.pools, 0)
        self.rankings: dict[tuple[object, ...], Any] = {}
        """What a search for victims learned that the next one may use."""
        self.answers: dict[tuple[object, ...], Any] = {}
        """What was found out about the finished plan, for those who wait and ask the same."""
        self.stoppable: dict[str, dict[str, int]] = {}
        """Pool to policy to the lowest priority among its work there that may be stopped."""
        self.promised_by: dict[str, list[Tenancy]] = {}
        self._needs: dict[tuple[object, ...], Need] = {}
        live = sorted((w for w in snapshot.workloads if w.state in LIVE), key=lambda w: w.id)
        self.workloads: dict[str, Workload] = {w.id: w for w in live}
        self._add_nodes()
        self._seat([w for w in live if w.state in ADMITTED])
        for pool in self.pools.values():
            pool.index()
        self._learn_mix()
        self._hold([w for w in live if w.claim])

    # What is where

    def _add_nodes(self) -> None:
        for node in sorted(self.snapshot.nodes, key=lambda n: (n.pool, n.name)):
            pool = self.pools.get(node.pool)
            if pool is None:
                pool = self.pools[node.pool] = PoolState(Pool(node.pool))
                self.pool_now[node.pool] = self.pool_future[node.pool] = 0
            state = NodeState(node, pool, len(pool.nodes))
            pool.nodes.append(state)
            self.nodes[node.name] = state

    def _seat(self, admitted: list[Workload]) -> None:
        """Put running work on its nodes: first where the devices are known, then where only the node is."""
        known = [w for w in admitted if all(p.devices for p in w.placement)]
        vague = [w for w in admitted if not all(p.devices for p in w.placement)]
        vague.sort(key=lambda w: (w.started_at or 0.0, w.id))
        for workload in known + vague:
            self._admit(workload)
        for node in self.nodes.values():
            _seat_foreign(node)

    def _admit(self, workload: Workload) -> None:
        need = self.need(workload)
        parts = self._parts(workload.placement, need)
        pool = parts[0].node.pool if parts else self._home(workload)
        if pool is None:
            return
        amount = sum(p.milli * len(p.devices) for p in parts) if parts else need.total
        tenancy = Tenancy(workload, need, pool, parts, amount)
        self.tenancies[workload.id] = tenancy
        self._book(tenancy, now=amount)
        self._settle_in(tenancy)
        if workload.state == "checkpointing":
            self.leave(tenancy)
            if workload.promised_to is not None:
                self.promised_by.setdefault(workload.promised_to, []).append(tenancy)

    def _parts(self, placement: Placement, need: Need) -> tuple[Part, ...]:
        parts = []
        taken: dict[str, list[int]] = {}
        for placed in placement:
            node = self.nodes.get(placed.node)
            if node is None:
                continue
            if placed.devices or not need.gpus:
                at = {index: position for position, index in enumerate(devices_of(node.node))}
                devices = tuple(at[d] for d in placed.devices if d in at)
                parts.append(Part(placed.worker, node, devices, placed.milli))
                continue
            left = taken.setdefault(placed.node, list(node.free))
            if any(free >= min(need.gpus, GPU) for free in left):
                devices, milli = pick(need, left)
                parts.append(Part(placed.worker, node, devices, milli))
        return tuple(parts)

    def _home(self, workload: Workload) -> PoolState | None:
        """Find the pool that work counts on whose node is gone."""
        profile = self.profiles.get(workload.profile)
        names = profile.pools if profile and profile.pools else tuple(self.pools)
        return next((self.pools[name] for name in names if name in self.pools), None)

    def _hold(self, claimants: list[Workload]) -> None:
        """Keep what was promised, where the promise can still be kept."""
        for workload in sorted(claimants, key=lambda w: (w.submitted_at, w.id)):
            need = self.need(workload)
            parts = self._parts(workload.claim, need)
            if workload.state == "running" or workload.state == "starting" or not parts:
                continue
            if len(parts) < need.least or not all(p.node.usable for p in parts):
                continue
            if any(len(p.devices) * p.milli != need.gpus for p in parts):
                continue  # a device of the promise is gone
            if self._takes(parts, need):
                self.claim(workload, need, parts)

    @staticmethod
    def _takes(parts: Iterable[Part], need: Need) -> bool:
        wanted: dict[tuple[str, int], int] = {}
        hosted: dict[str, int] = {}
        for part in parts:
            node = part.node
            hosted[node.node.name] = count = hosted.get(node.node.name, 0) + 1
            if node.cpu_future < count * need.cpu or node.memory_future < count * need.memory:
                return False
            for at in part.devices:
                key = (node.node.name, at)
                wanted[key] = wanted.get(key, 0) + part.milli
                if node.future[at] < wanted[key]:
                    return False
        return True

    def _learn_mix(self) -> None:
        """Tell each pool what it serves: the shapes of its profiles, and of all work that waits or runs."""
        found: dict[tuple[str, Need], int] = {}
        for workload in self.workloads.values():
            key = (workload.profile, self.need(workload))
            found[key] = found.get(key, 0) + 1
        for name, profile in self.profiles.items():
            need = need_of(Workload("", "", name), profile)
            found[name, need] = found.get((name, need), 0) + 1
        for (name, need), count in found.items():
            profile_of = self.profiles.get(name)
            pools = profile_of.pools if profile_of and profile_of.pools else tuple(self.pools)
            shape = Shape(need.gpus, need.cpu, need.memory, need.models)
            for pool in (self.pools[each] for each in pools if each in self.pools):
                pool.mix[shape] = pool.mix.get(shape, 0) + count * need.least

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
        return self.ledger.account(workload.policy)

    def pools_of(self, workload: Workload) -> tuple[PoolState, ...]:
        """List the pools a workload may use, first choice first."""
        profile = self.profiles.get(workload.profile)
        names = profile.pools if profile and profile.pools else tuple(sorted(self.pools))
        return tuple(self.pools[name] for name in names if name in self.pools)

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
        self.tenancies[workload.id] = tenancy
        self._book(tenancy, now=tenancy.amount)
        self._settle_in(tenancy)
        return tenancy

    def widen(self, tenancy: Tenancy, part: Part) -> None:
        """Give one more worker to a gang that was just started."""
        amount = part.milli * len(part.devices)
        tenancy.parts = (*tenancy.parts, part)
        tenancy.amount += amount
        self._book(tenancy, now=amount)
        part.node.shift(part, tenancy.need, -1, -1)
        part.node.guests[tenancy.workload.id] = tenancy

    def withdraw(self, tenancy: Tenancy) -> None:
        """Take `start` back."""
        del self.tenancies[tenancy.workload.id]
        self._book(tenancy, now=-tenancy.amount)
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, 1, 1)
            part.node.guests.pop(tenancy.workload.id, None)

    def leave(self, tenancy: Tenancy) -> None:
        """Tell a workload to go: what it holds is part of the future, not of now."""
        tenancy.leaving = True
        self._book(tenancy, leaving=tenancy.amount)
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, 0, 1)

    def stay(self, tenancy: Tenancy) -> None:
        """Take `leave` back."""
        tenancy.leaving = False
        self._book(tenancy, leaving=-tenancy.amount)
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, 0, -1)

    def claim(self, workload: Workload, need: Need, parts: tuple[Part, ...]) -> Tenancy:
        """Promise GPUs of the future to a workload."""
        tenancy = self._tenancy(workload, need, parts)
        self.claims[workload.id] = tenancy
        old = self.tenancies.get(workload.id)
        if old is not None and old.pool is tenancy.pool:
            tenancy.moving = min(old.amount, tenancy.amount)
        self._book(tenancy, claimed=tenancy.amount, moving=tenancy.moving)
        for part in parts:
            part.node.shift(part, need, 0, -1)
        return tenancy

    def unclaim(self, workload: Workload) -> tuple[Part, ...]:
        """Take a promise back, and give what had been promised."""
        tenancy = self.claims.pop(workload.id, None)
        if tenancy is None:
            return ()
        self._book(tenancy, claimed=-tenancy.amount, moving=-tenancy.moving)
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, 0, 1)
        return tenancy.parts

    def _settle_in(self, tenancy: Tenancy) -> None:
        workload = tenancy.workload
        for part in tenancy.parts:
            part.node.shift(part, tenancy.need, -1, -1)
            part.node.guests[workload.id] = tenancy
        if not workload.firm and tenancy.amount:
            lowest = self.stoppable.setdefault(tenancy.pool.pool.name, {})
            lowest[workload.policy] = min(workload.priority, lowest.get(workload.policy, workload.priority))

    def _tenancy(self, workload: Workload, need: Need, parts: tuple[Part, ...]) -> Tenancy:
        return Tenancy(workload, need, parts[0].node.pool, parts, need.gpus * len(parts))

    def _book(self, tenancy: Tenancy, now: int = 0, leaving: int = 0, claimed: int = 0, moving: int = 0) -> None:
        workload, pool = tenancy.workload, tenancy.pool.pool.name
        account, firm, owner = self.account(workload), workload.firm, workload.owner
        self.ledger.book(account, pool, firm, owner, now=now, leaving=leaving, claimed=claimed, moving=moving)
        self.pool_now[pool] += now
        self.pool_future[pool] += now - leaving + claimed


def _seat_foreign(node: NodeState) -> None:
    """Take what strangers hold off the devices that are free, from the last one down."""
    rest = node.node.foreign_gpus
    for at in range(len(node.open) - 1, -1, -1):
        if rest <= 0:
            break
        taken = min(rest, max(0, node.open[at]))
        if node.open[at] == GPU or rest < GPU:
            node.open[at] -= taken
            node.future[at] -= taken
            node.free[at] = min(node.open[at], node.future[at])
            rest -= taken
    node.whole_free = node.free.count(GPU)
    node.whole_future = node.future.count(GPU)


__all__ = ["Cluster", "placement_of"]
