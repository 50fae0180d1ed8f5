"""Group equivalent pending workloads; the groups are kept from one decision to the next."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from ..plan import Fact, Waiting
from ..request import Need
from ..snapshot import Profile, Workload
from .cluster import Cluster
from .ledger import Account
from .nodes import PoolState

OwnerQueue = list[Workload] | deque[Workload]
_MAX_EMPTY = 1_000
"""So many empty groups are kept for reuse, those that became empty last."""
_MAX_CLASSES = 4_096
"""So many classes that no group belongs to any more keep their numbers."""


@dataclass(slots=True, eq=False)
class WorkloadGroup:
    """An equivalence class of pending workloads: for the rules they differ only in owner and age.

    It is neither a gang nor a group of the Hub. What one of its workloads is denied, all of them are: so the rules are
    evaluated once for the group, not once per workload.
    """

    account: Account
    profile: Profile
    need: Need
    non_preemptible: bool
    kind: str
    priority: int
    reclaim_deferred: bool
    nominated: bool
    pools: tuple[PoolState, ...]
    owner_queues: dict[str, OwnerQueue] = field(default_factory=dict)
    """Owner to that owner's workloads, oldest first."""
    is_protected_session: bool = False
    """Whether these are non-preemptible sessions."""
    number: int = 0
    """The group's number, stable from one decision to the next; never 0."""
    total: int = 0
    """The milli-GPUs that one of its workloads needs to start."""
    candidate_pools: Iterable[PoolState] = ()
    """The pools in which its workloads may have candidates for an eviction in one of `pools`."""
    may_borrow: bool = True
    """Whether its workloads may run over quota; without GPUs they always may."""
    rights_class: int = 0
    """The same number for all groups with the same account, pools and preemptibility."""
    request_class: int = 0
    """The same number for all groups with the same need and pools."""
    reason_class: int = 0
    """The same number for all groups whose reasons to wait are the same."""
    ranks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Pool to the part of the order that comes from ranks."""
    keys: tuple[dict[str, tuple[object, ...]], ...] = field(default_factory=lambda: ({}, {}))
    """Pool to the part of the order that the whole group shares: in quota, and over quota."""
    _whole: dict[str, OwnerQueue] = field(default_factory=dict)
    _members: tuple[Workload, ...] | None = None
    _changes: int = 0
    _versions: dict[str, int] = field(default_factory=dict)

    def heads(self) -> Iterator[Workload]:
        """List each owner's first workload."""
        return (line[0] for line in self.owner_queues.values() if line)

    def pop(self, workload: Workload) -> None:
        """Remove a workload for this decision: mostly its owner's first, or the next one after a start was put back."""
        line = self._thinned(workload.owner)
        assert isinstance(line, deque)
        if line[0] is workload:
            line.popleft()
        else:
            line.remove(workload)

    def put_back(self, workload: Workload) -> None:
        """Requeue a workload whose start was withdrawn."""
        line = self._thinned(workload.owner)
        if line and isinstance(line, deque) and age(workload) < age(line[0]):
            line.appendleft(workload)
        else:
            self.owner_queues[workload.owner] = deque(sorted([*line, workload], key=age))

    def _thinned(self, owner: str) -> OwnerQueue:
        if owner not in self._whole:
            self._whole[owner] = self.owner_queues[owner]
            self.owner_queues[owner] = deque(self.owner_queues[owner])
        return self.owner_queues[owner]

    def restore(self) -> None:
        """Requeue all workloads that this decision removed."""
        if self._whole:
            self.owner_queues.update(self._whole)
            self._whole.clear()

    def members(self) -> tuple[Workload, ...]:
        """Return the workloads that still wait."""
        if self._whole:
            return tuple(workload for line in self.owner_queues.values() for workload in line)
        if self._members is None:
            self._members = tuple(workload for line in self.owner_queues.values() for workload in line)
        return self._members

    def version_of(self, owner: str) -> int | None:
        """Return what changes with the workloads of an owner, between two decisions; None if this one removed any."""
        whole = self._whole.get(owner)
        removed = whole is not None and len(whole) != len(self.owner_queues[owner])
        return None if removed else self._versions[owner]

    def has_members(self) -> bool:
        """Whether any workload still waits in it."""
        return any(self.owner_queues.values())

    def in_quota_somewhere(self) -> bool:
        """Whether one of the group would be within the reservation in one of its pools."""
        return self.total <= max([self.account.unreserved(pool.pool.name, self.non_preemptible) for pool in self.pools])

    def add(self, workload: Workload) -> None:
        """Add a workload, between two decisions."""
        line = self.owner_queues.setdefault(workload.owner, [])
        assert isinstance(line, list)
        if not line or age(line[-1]) < age(workload):
            line.append(workload)
        else:
            insort(line, workload, key=age)
        self._members = None
        self._changes += 1
        self._versions[workload.owner] = self._changes

    def remove(self, workload: Workload) -> None:
        """Remove a workload, between two decisions."""
        line = self.owner_queues[workload.owner]
        del line[bisect_left(line, age(workload), key=age)]
        self._members = None
        self._changes += 1
        self._versions[workload.owner] = self._changes
        if not line:
            del self.owner_queues[workload.owner], self._versions[workload.owner]


def age(workload: Workload) -> tuple[float, str]:
    """Return the sort key of a workload by age: the oldest first, ties by id."""
    return workload.submitted_at, workload.id


class PendingWorkloads:
    """The pending workloads of one cluster, in groups.

    Workloads come and go between decisions; `open` returns the groups of the next one.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.inadmissible: dict[str, Waiting] = {}
        """Id of a workload whose queue is closed or paused, to the reason."""
        self._groups: dict[Hashable, WorkloadGroup] = {}
        self._empty: dict[Hashable, WorkloadGroup] = {}
        """Empty groups, for reuse."""
        self._of: dict[str, tuple[Hashable, WorkloadGroup, Workload]] = {}
        self._ages: list[tuple[float, str]] = []
        self._deferral_ends: list[tuple[float, str]] = []
        self._classes: dict[Hashable, int] = {}
        """What the groups of a class share, to the number of the class."""
        self._classes_so_far = 0
        self._made_so_far = 0
        self._began = cluster.now
        self._by_time = False
        self._fill()

    def _fill(self) -> None:
        """Group all pending workloads; by time limit too once any waits too long, since holds depend on it."""
        waiting = [w for w in self.cluster.workloads.values() if w.state == "pending"]
        self.inadmissible, self._groups, self._of, self._deferral_ends, self._empty = {}, {}, {}, [], {}
        open_to = []
        for workload in waiting:
            why = cannot_start_at_all(self.cluster, workload)
            if why is not None:
                self.inadmissible[workload.id] = why
            else:
                open_to.append(workload)
        self._ages = sorted(map(age, open_to))
        self._by_time = self.any_starving()
        for workload in sorted(open_to, key=age):
            self._enter(workload)

    def any_starving(self) -> bool:
        """Whether the oldest workload waited for longer than `starvation_after`."""
        return bool(self._ages) and self.cluster.waits_too_long(self.cluster.workloads[self._ages[0][1]])

    def change(self, ids: Iterable[str]) -> None:
        """Requeue workloads that came, went or changed, or whose nomination did."""
        for name in ids:
            self._leave(name)
            workload = self.cluster.workloads.get(name)
            if workload is None or workload.state != "pending":
                continue
            why = cannot_start_at_all(self.cluster, workload)
            if why is not None:
                self.inadmissible[name] = why
            else:
                insort(self._ages, age(workload))
                self._enter(workload)

    def begin(self) -> list[WorkloadGroup]:
        """Return the groups of this decision; time alone may have moved workloads from one into another."""
        now = self.cluster.now
        if now < self._began or self._by_time != self.any_starving():
            self._fill()
        self._began = now
        while self._deferral_ends and self._deferral_ends[0][0] <= now:
            _, name = heapq.heappop(self._deferral_ends)
            if name in self._of:
                _, group, workload = self._of[name]
                if group.reclaim_deferred and not self._reclaim_deferred(workload):
                    self._out(name)
                    self._enter(workload)
        for name in self.cluster.nominees:
            if name in self._of and self._of[name][1].nominated != self._nominated(name):
                workload = self._of[name][2]
                self._out(name)
                self._enter(workload)
        return list(self._groups.values())

    def end(self) -> None:
        """End a decision: requeue all workloads that it removed."""
        for group in self._groups.values():
            group.restore()
        if len(self._classes) > _MAX_CLASSES + 3 * len(self._groups):
            self._forget_classes()

    def _forget_classes(self) -> None:
        """Forget the classes without groups, and the empty groups; a number is never given twice."""
        self._empty = {}
        used = {n for q in self._groups.values() for n in (q.rights_class, q.request_class, q.reason_class)}
        self._classes = {key: number for key, number in self._classes.items() if number in used}

    def _nominated(self, name: str) -> bool:
        """Whether a workload has a nomination, or a victim terminates for it."""
        return name in self.cluster.terminating_for or name in self.cluster.nominations

    def _reclaim_deferred(self, workload: Workload) -> bool:
        profile = self.cluster.profiles[workload.profile]
        after = profile.reclaim_delay(
            workload.kind
        )  # a clock that was set back makes no workload older or younger than 0
        return after > 0.0 and self.cluster.now - workload.submitted_at < after

    def _enter(self, workload: Workload) -> None:
        cluster, w = self.cluster, workload
        need, deferred = cluster.need(w), self._reclaim_deferred(w)
        if deferred:
            until = w.submitted_at + cluster.profiles[w.profile].reclaim_delay(w.kind)
            heapq.heappush(self._deferral_ends, (until, w.id))
        own = w.id if self._nominated(w.id) else ""
        limit = cluster.time_limit(w) if self._by_time else None
        priority = cluster.priority(w)
        key = (own, w.team, w.profile, need, w.non_preemptible, w.kind, priority, deferred, limit)
        group = self._groups.get(key)
        if group is None:
            group = self._empty.pop(key, None) or self._new_group(w, need, deferred, bool(own))
            self._made_so_far += 1
            group.number = self._made_so_far
            self._groups[key] = group
        group.add(w)
        self._of[w.id] = key, group, w

    def _new_group(self, w: Workload, need: Need, reclaim_deferred: bool, nominated: bool) -> WorkloadGroup:
        pools = self.cluster.pools_of(w)
        names = tuple(pool.pool.name for pool in pools)
        profile, priority = self.cluster.profiles[w.profile], self.cluster.priority(w)
        group = WorkloadGroup(
            self.cluster.account(w),
            profile,
            need,
            w.non_preemptible,
            w.kind,
            priority,
            reclaim_deferred,
            nominated,
            pools,
        )
        group.is_protected_session = w.non_preemptible and w.kind == "session"
        group.total = need.total
        group.candidate_pools = (
            self.cluster.pools_with_candidates(group.account, pools) if group.account.is_limited else pools
        )
        group.may_borrow = not need.total or (not w.non_preemptible and group.account.team.weight != "None")
        group.rights_class = self._number((w.team, names, w.non_preemptible))
        group.request_class = self._number((need, names))
        group.reason_class = self._number((w.team, need, names, w.non_preemptible, w.kind, reclaim_deferred))
        return group

    def group_of(self, workload: Workload) -> WorkloadGroup:
        """Return a group with no members for a workload that does not wait, as a victim of this plan."""
        return self._new_group(workload, self.cluster.need(workload), self._reclaim_deferred(workload), False)

    def _number(self, key: Hashable) -> int:
        number = self._classes.get(key)
        if number is None:
            self._classes_so_far += 1
            number = self._classes[key] = self._classes_so_far
        return number

    def _leave(self, name: str) -> None:
        self.inadmissible.pop(name, None)
        if name in self._of:
            workload = self._of[name][2]
            self._out(name)
            del self._ages[bisect_left(self._ages, age(workload))]

    def _out(self, name: str) -> None:
        key, group, workload = self._of.pop(name)
        group.remove(workload)
        if not group.owner_queues:
            del self._groups[key]
            if not group.nominated:
                self._empty[key] = group
                if len(self._empty) > _MAX_EMPTY:
                    del self._empty[next(iter(self._empty))]


def cannot_start_at_all(cluster: Cluster, workload: Workload) -> Waiting | None:
    """Return why a workload may not start at all (closed or paused queue, no pool of its profile); else None."""
    queue = f"{workload.team}/{workload.profile}"
    if not _open(cluster, workload.team, workload.profile):
        closed = Fact("queue_closed", {"queue": queue, "kind": workload.kind})
        return Waiting(workload.id, "queue_closed", "queue", (closed,), {"queue": queue})
    if workload.paused or queue in cluster.paused:
        code = "workload_paused" if workload.paused else "queue_paused"
        paused = Fact(code, {"queue": queue, "kind": workload.kind})
        return Waiting(workload.id, "paused", "queue", (paused,), {"queue": queue})
    if not cluster.pools_of(workload):
        missing = Fact("no_pool", {"profile": workload.profile})
        return Waiting(workload.id, "too_large", "place", (missing,), {"profile": workload.profile})
    return None


def _open(cluster: Cluster, team: str, profile: str) -> bool:
    """Whether a profile is attached to a team, and both still exist."""
    asked = (team, profile)
    if asked not in cluster.attached:
        known = team in cluster.policies and profile in cluster.profiles
        cluster.attached[asked] = known and any(team in names for names in cluster.profiles[profile].policies)
    return cluster.attached[asked]
