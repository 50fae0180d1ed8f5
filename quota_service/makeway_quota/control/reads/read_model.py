"""Keep the read model: one immutable answer to "what is there and how is it used" for each version of the world.

Requests read it through `ReadModels.current()`; nothing else counts GPUs for pages, API or metrics. A new version costs
what changed since the last one: commits are taken in row by row, nodes by comparison. Planning is no part of it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType

from ...backends.base import NodeStatus
from ...engine.rules.usage import TeamCount
from ...engine.snapshot import ADMITTED
from ...policy import Document
from ...store.records import Workload
from ...store.store import Store
from ...values import ordinal
from ..world.active_rows import is_newer
from ..world.pool_assignment import PoolAssignment
from ..world.world import World
from .cycle_gate import CycleGate
from .usage_ledger import UsageLedger

SHARE = 0.2
"""The part of a processor that new versions may take: one that took 10 ms is followed by 40 ms without another."""

MAX_UNREAD = 10_000
"""Rows that wait to be taken in; beyond, the oldest commits are dropped, and the next request reads all rows again"""

STEP = "showing it on pages"
NodeKey = tuple[str, str]
"""Node and pool: a node that is divided among pools counts once in each."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One node of a pool and the workloads that hold something on it, by id. Amounts are milli-GPUs.

    The object stays the same from version to version while nothing on the node changes.
    """

    status: NodeStatus
    holders: tuple[Workload, ...]
    used: int
    free: int
    """what can start here: 0 if the node is not ready or cordoned"""
    free_on: Mapping[int, int]
    """the same for each device"""
    outside: tuple[int, ...] = ()
    """devices that are in no pool any more and are held by work that counts here; they count until it ends"""
    shown_as: Mapping[int, int] = field(default_factory=dict)
    """Held index to the device that it is shown as, where devices are only counted and got other indices since."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of this pool, and those that its work still holds outside of every pool."""
        return tuple(sorted((*self.status.devices, *self.outside))) if self.outside else self.status.devices


@dataclass(frozen=True, slots=True)
class TeamLoad:
    """The numbers of a team's pending and running workloads."""

    waiting: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class ReadModel:
    """The cluster at one moment. Amounts are milli-GPUs; nodes are in the backend's order."""

    version: int
    at: float
    document: Document
    nodes: Mapping[str, Sequence[NodeUse]]
    """pool to its nodes, for every pool of the document"""
    usage: Mapping[str, TeamCount]
    loads: Mapping[str, TeamLoad]
    held_by: Mapping[tuple[str, str], int]
    """(team, owner) to what the owner's workloads hold"""
    workloads: Mapping[tuple[str, str], int]
    """(kind, state) to the number of live workloads"""
    sessions: Mapping[str, Workload]
    """live sessions by id"""
    total: int
    """GPUs as whole devices"""
    used: int
    free: int
    virtual: bool
    over_quota: Mapping[str, bool] = field(default_factory=dict)
    """the id of each workload that holds GPUs of a team to whether it is over quota now"""

    def present(self, row: Workload) -> Workload:
        """Return a row with what holds of its quota now; a start that is newer than the model stays as it was made."""
        over = self.over_quota.get(row.id)
        if over is None or row.state not in ADMITTED:
            return row
        count = self.usage.get(row.team or "") if over else None
        lenders = tuple(team for team, _ in count.borrowed_from) if count else ()
        if (over, lenders) == (row.over_quota, row.borrowed_from):
            return row
        return row._replace(over_quota=over, borrowed_from=lenders)


@dataclass(slots=True)
class _Counts:
    """The counts over all live rows; changed by one row at a time."""

    waiting: Counter[str] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)
    held_by: Counter[tuple[str, str]] = field(default_factory=Counter)
    workloads: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, row: Workload, sign: int) -> None:
        """Count a row (1), or stop counting it (-1)."""
        self.workloads[row.kind, row.state] += sign
        team = row.team or ""
        if row.state == "pending":
            self.waiting[team] += sign
        elif row.state in ADMITTED:
            self.running[team] += sign
            self.held_by[team, row.owner] += sign * row.size
            if not self.held_by[team, row.owner]:  # people come and go, for years
                del self.held_by[team, row.owner]


class ReadModels:
    """Makes the versions. `current` may be called by any number of requests at once; they share one construction."""

    def __init__(
        self,
        world: World,
        store: Store,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        gate: CycleGate | None = None,
    ) -> None:
        self._world = world
        self._gate = gate or CycleGate()
        self._clock = clock
        self._monotonic = monotonic
        self._unread: deque[Sequence[Workload]] = deque()
        self._unread_rows = 0
        self._guard = threading.Lock()
        """of the unread rows: commits are noted in the threads that write"""
        self._missed = True
        """Whether commits were dropped since the last version, or there is none yet"""
        self._rows: dict[str, Workload] = {}
        self._sessions: dict[str, Workload] = {}
        self._counts = _Counts()
        self._document: Document | None = None
        self._assignment: PoolAssignment | None = None
        self._ledger = UsageLedger(world.document, PoolAssignment())
        self._on_node: dict[str, dict[str, Workload]] = {}
        self._uses: dict[NodeKey, NodeUse] = {}
        self._over_quota: Mapping[str, bool] = {}
        self._stale: set[str] = set()
        """Nodes whose holders changed since the last version"""
        self._failed: dict[str, Workload] = {}
        """Rows that could not be taken in, which are tried again"""
        self._unknown: set[str] = set()
        """Nodes of which it cannot be told what is free there"""
        self._lock = asyncio.Lock()
        self._model: ReadModel | None = None
        self._not_before = 0.0
        self.stop_following = store.on_change(self._committed)

    def _committed(self, changed: Sequence[Workload]) -> None:
        """Note what a commit changed, in the thread that wrote."""
        with self._guard:
            self._unread.append(changed)
            self._unread_rows += len(changed)
            while self._unread_rows > MAX_UNREAD:
                self._unread_rows -= len(self._unread.popleft())
                self._missed = True

    async def current(self) -> ReadModel:
        """Return a model that has everything that was committed and observed before the call.

        Versions follow each other at a pace (`SHARE`): under load the requests of some milliseconds share one.
        """
        if self._fresh():
            assert self._model is not None
            return self._model
        async with self._lock:
            if not self._fresh():
                if (wait := self._not_before - self._monotonic()) > 0:
                    await asyncio.sleep(wait)
                await self._gate.wait_async()
                missed, self._missed = self._missed, False
                try:
                    rows = await self._world.rows() if missed else None
                except BaseException:
                    self._missed |= missed
                    raise
                began = self._monotonic()
                self._model = self._next(rows)
                now = self._monotonic()
                self._not_before = now + (now - began) * (1 / SHARE - 1)
        assert self._model is not None
        return self._model

    def _fresh(self) -> bool:
        world = self._world
        return (
            self._model is not None
            and not self._unread
            and not self._missed
            and all(self._world.quarantine.is_backing_off(STEP, "workload", id) for id in self._failed)
            and all(self._world.quarantine.is_backing_off(STEP, "node", name) for name in self._unknown)
            and self._document is world.document
            and self._assignment is world.assignment
        )

    def _next(self, rows: Mapping[str, Workload] | None) -> ReadModel:
        """Apply what changed, and return the next version."""
        self._take_rows(rows)
        self._take_nodes()
        document = self._world.document
        uses: dict[str, list[NodeUse]] = {pool.name: [] for pool in document.pools}
        for (_, pool), use in self._uses.items():
            if pool in uses:
                uses[pool].append(use)
        shown = [use for nodes in uses.values() for use in nodes]
        counts = self._counts
        return ReadModel(
            version=self._model.version + 1 if self._model else 1,
            at=self._clock(),
            document=document,
            nodes=MappingProxyType(uses),
            usage=self._ledger.count(),
            loads={
                team: TeamLoad(counts.waiting[team], counts.running[team]) for team in counts.waiting | counts.running
            },
            held_by=dict(counts.held_by),
            workloads={key: many for key, many in counts.workloads.items() if many},
            sessions=dict(self._sessions),
            total=sum(len(use.devices) for use in shown),
            used=sum(use.used for use in shown),
            free=sum(use.free for use in shown),
            virtual=any(use.status.virtual for use in shown),
            over_quota=self._over_quota,
        )

    def _take_rows(self, rows: Mapping[str, Workload] | None) -> None:
        if rows is not None:
            for gone in [row for id, row in self._rows.items() if id not in rows]:
                self._forget(gone)
            with self._guard:
                self._unread.appendleft(tuple(rows.values()))
                self._unread_rows += len(rows)
        with self._guard:
            committed = [row for changed in self._unread for row in changed]
            self._unread.clear()
            self._unread_rows = 0
        failed, self._failed = self._failed, {}
        for row in (*failed.values(), *committed):
            try:
                self._put(row)
            except Exception as error:  # it is on no page, and all others are
                self._world.quarantine.failed(STEP, "workload", row.id, error)
                self._failed[row.id] = row
            else:
                self._world.quarantine.passed(STEP, "workload", row.id)

    def _put(self, row: Workload) -> None:
        """Replace what is known of a workload, unless that is newer."""
        before = self._rows.get(row.id)
        if before is not None:
            if not is_newer(row, before):
                return
            self._forget(before)
        if not row.live:
            return
        if row.state in ADMITTED:
            self._ledger.add(row)
        self._rows[row.id] = row
        if row.kind == "session":
            self._sessions[row.id] = row
        self._counts.add(row, 1)
        if row.state in ADMITTED:
            for node in {place.node for place in row.placement}:
                self._on_node.setdefault(node, {})[row.id] = row
                self._stale.add(node)

    def _forget(self, row: Workload) -> None:
        del self._rows[row.id]
        self._sessions.pop(row.id, None)
        self._counts.add(row, -1)
        for node in {place.node for place in row.placement} if row.state in ADMITTED else ():
            self._on_node[node].pop(row.id, None)
            self._stale.add(node)
        self._ledger.remove(row.id)

    def _take_nodes(self) -> None:
        """Rebuild the nodes that changed, or whose holders did; count usage again after a new document or pool."""
        world = self._world
        document, assignment = world.document, world.assignment
        if self._document is not document:
            self._ledger = UsageLedger(document, assignment)
            for row in self._rows.values():
                self._ledger.add(row)
        elif self._assignment is not assignment:
            moved = self._ledger.use(assignment)
            for id in {id for node in moved for id in self._on_node.get(node, ())}:
                self._ledger.remove(id)
                self._ledger.add(self._rows[id])
        self._judge()
        self._stale |= self._unknown
        self._unknown &= {node.name for node in assignment.nodes}
        old, self._uses = self._uses, {}
        before = self._assignment.parts if self._assignment is not None and self._document is document else {}
        outside = {
            machine: assignment.outside(machine, [(row, self._pools_of(row)) for row in held.values()])
            for machine, held in self._on_node.items()
            if held and (machine in self._stale or before.get(machine) != assignment.parts.get(machine))
        }
        self._stale |= outside.keys()
        for node in (*assignment.nodes, *self._without_pool(outside, old)):
            use = old.get((node.name, node.pool))
            if use is None or node.name in self._stale or (use.status is not node and use.status != node):
                held = self._on_node.get(node.name, {})
                strays = outside.get(node.name, {}).get(node.pool, ())
                use = self._use_of(node, [self._judged(held[id]) for id in sorted(held)], strays)
            self._uses[node.name, node.pool] = use
        self._stale.clear()
        self._document, self._assignment = document, assignment

    def _pools_of(self, row: Workload) -> Sequence[str]:
        """Return the pools of a workload's profile; all where the profile is gone, or names none."""
        profile = self._world.document.profile(row.profile)
        return (profile.pools if profile else ()) or tuple(pool.name for pool in self._world.document.pools)

    def _without_pool(
        self, outside: Mapping[str, Mapping[str, Sequence[int]]], old: Mapping[NodeKey, NodeUse]
    ) -> Iterator[NodeStatus]:
        """Yield machines that no pool takes, as they are while work of a pool runs on them: without GPUs of their own.

        `outside` has those that changed.
        """
        for machine, status in self._world.assignment.unassigned.items():
            if machine in outside:
                yield from (replace(status, pool=pool, devices=()) for pool in outside[machine])
            elif machine not in self._stale and self._on_node.get(machine):
                yield from (use.status for (name, _), use in old.items() if name == machine)

    def _judge(self) -> None:
        """Derive what is over quota now; the nodes of what was not, or is no more, are rebuilt."""
        before = self._over_quota
        with self._world.quarantine.step("deriving what is over quota"):
            self._over_quota = self._ledger.over_quota()
        if before is not self._over_quota:
            for id, over in self._over_quota.items():
                if before.get(id) != over and id in self._rows:
                    self._stale.update(place.node for place in self._rows[id].placement)

    def _judged(self, row: Workload) -> Workload:
        over = self._over_quota.get(row.id, row.over_quota)
        return row if over == row.over_quota else row._replace(over_quota=over)

    def _use_of(self, node: NodeStatus, rows: Sequence[Workload], strays: tuple[int, ...]) -> NodeUse:
        """Return what is used and free on a node; nothing is free where that cannot be told."""
        self._unknown.discard(node.name)
        with self._world.quarantine.guard(STEP, "node", node.name):
            return use_of(node, rows, strays)
        self._unknown.add(node.name)
        return NodeUse(node, (), 0, 0, dict.fromkeys(node.devices, 0))


def use_of(node: NodeStatus, rows: Sequence[Workload], outside: tuple[int, ...] = ()) -> NodeUse:
    """Return what is used and free on the devices of a node, for every page and answer.

    Overbooked devices have 0 free, and so has every device of a node that is not ready or cordoned: nothing can start
    there. What other pods hold of devices that are not known is taken off the last ones. On devices `outside` of every
    pool nothing can start; where devices are only counted, work there holds some of those that the node still shows,
    and only what is held beyond their number is outside.
    """
    shown_as = _shown_as(node, rows, outside) if node.anonymous_devices else {}
    if shown_as:
        outside = tuple(sorted(set(shown_as.values()).difference(node.devices)))
    taken = dict.fromkeys((*node.devices, *outside), 0)
    used = 0
    for row in rows:
        for place in row.placement:
            if place.node == node.name:
                for held, milli in zip(place.devices, place.milli, strict=False):
                    index = shown_as.get(held, held)
                    if index in taken:
                        taken[index] += milli
                        used += milli
    for ended in node.terminating:
        for index in ended.devices:
            if index in taken:
                taken[index] += ended.milli_per_device
    takes_work, unknown = node.ready and not node.cordoned, node.foreign_gpus
    free = dict.fromkeys(outside, 0)
    if node.anonymous_devices:
        unknown += sum(taken[index] for index in outside)
    for index, held in reversed([(index, taken[index]) for index in node.devices]):
        remaining = max(0, 1000 - held - node.foreign.get(index, 0)) if takes_work else 0
        free[index] = remaining - min(remaining, unknown)
        unknown -= min(remaining, unknown)
    return NodeUse(node, tuple(rows), used, sum(free.values()), free, outside, shown_as)


def _shown_as(node: NodeStatus, rows: Sequence[Workload], strays: Sequence[int]) -> dict[int, int]:
    """Return the device that each held index stands for which a node that counts its devices does not show.

    As for the engine, these are the last devices that nothing else holds; further ones have ordinals of their own.
    """
    places = [place for row in rows for place in row.placement if place.node == node.name]
    held = {index for place in places for index in place.devices}
    free = [index for index in node.devices if index not in held]
    result, taken = dict[int, int](), set(map(ordinal, node.devices))
    for index in strays:
        if free:
            result[index] = free.pop()
            continue
        own = ordinal(index)
        result[index] = index if own not in taken else next(at for at in count() if at not in taken)
        taken.add(ordinal(result[index]))
    return result
