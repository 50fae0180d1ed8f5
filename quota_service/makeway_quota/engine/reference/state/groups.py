"""Group pending workloads that are alike, and order the groups (engine rule 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...plan import Code
from ...request import Need
from ...snapshot import Profile, Workload
from .cluster import Cluster
from .quota import Request, owner_usage, shares

Key = tuple[object, ...]


@dataclass(slots=True, eq=False)
class WorkloadGroup:
    """An equivalence class of pending workloads: they are alike for every rule but their owner and their age.

    It is neither a gang nor a group of the Hub. What one of its workloads is denied, all are: the group
    leaves the admission cycle until its next round.
    """

    team: str
    profile: Profile
    need: Need
    non_preemptible: bool
    kind: str
    priority: int
    reclaim_deferred: bool
    nominated: bool
    chain: tuple[str, ...]
    pools: tuple[str, ...]
    may_borrow: bool
    members: list[Workload] = field(default_factory=list)

    @property
    def is_protected_session(self) -> bool:
        """Whether these are sessions that are never evicted."""
        return self.non_preemptible and self.kind == "session"

    @property
    def request(self) -> Request:
        """Return one workload's request."""
        return Request(self.chain, self.need.total)

    def heads(self) -> Iterator[Workload]:
        """Iterate over each owner's oldest workload."""
        seen = set()
        for workload in sorted(self.members, key=age):
            if workload.owner not in seen:
                seen.add(workload.owner)
                yield workload


def age(workload: Workload) -> tuple[float, str]:
    """Return the order of age: submit time, then id."""
    return workload.submitted_at, workload.id


def workload_groups(cluster: Cluster) -> tuple[list[WorkloadGroup], dict[str, tuple[Code, str]]]:
    """Return the open groups, and (code, rule) of every pending workload that may not start at all."""
    pending = sorted((w for w in cluster.live.values() if w.state == "pending"), key=age)
    inadmissible = {w.id: why for w in pending if (why := closed(cluster, w)) is not None}
    waiting = [w for w in pending if w.id not in inadmissible]
    late = bool(waiting) and waits_too_long(cluster, waiting[0])
    nominated = {w.evicted_for for w in cluster.live.values() if w.state == "checkpointing" and w.id in cluster.running}
    by_key: dict[tuple[object, ...], WorkloadGroup] = {}
    for w in waiting:
        need, priority, patient = cluster.need(w), cluster.priority(w), is_patient(cluster, w)
        own = w.id if w.id in nominated or w.id in cluster.nominations else ""
        limit = cluster.time_limit(w) if late else None
        key = (own, w.team, w.profile, need, w.non_preemptible, w.kind, priority, patient, limit)
        if key not in by_key:
            by_key[key] = replace(group_of(cluster, w), nominated=bool(own), members=[])
        by_key[key].members.append(w)
    return list(by_key.values()), inadmissible


def group_of(cluster: Cluster, workload: Workload) -> WorkloadGroup:
    """Return a group with one workload, for which nothing is nominated."""
    w, need, chain = workload, cluster.need(workload), cluster.chain(workload.team)
    priority, patient, borrow = cluster.priority(w), is_patient(cluster, w), may_borrow(cluster, w)
    profile, pools = cluster.profiles[w.profile], cluster.pools_of(w)
    return WorkloadGroup(
        w.team, profile, need, w.non_preemptible, w.kind, priority, patient, False, chain, pools, borrow, [w]
    )


def may_borrow(cluster: Cluster, workload: Workload) -> bool:
    """Whether a workload may run over quota; without GPUs any may."""
    if not cluster.need(workload).total:
        return True
    return not workload.non_preemptible and cluster.team(workload.team).weight != "None"


def is_patient(cluster: Cluster, workload: Workload) -> bool:
    """Whether a workload still waits for free GPUs before anything is evicted for it."""
    return max(0.0, cluster.now - workload.submitted_at) < cluster.profiles[workload.profile].reclaim_delay(
        workload.kind
    )


def waits_too_long(cluster: Cluster, workload: Workload) -> bool:
    """Whether a workload waited for so long that GPUs are held for it."""
    return cluster.now - workload.submitted_at >= cluster.settings.starvation_after


def closed(cluster: Cluster, workload: Workload) -> tuple[Code, str] | None:
    """Return (code, rule) if a workload's queue starts nothing at the moment."""
    queue, profile = f"{workload.team}/{workload.profile}", cluster.profiles.get(workload.profile)
    attached = profile is not None and any(workload.team in names for names in profile.policies)
    if not attached or workload.team not in cluster.policies:
        return "queue_closed", "queue"
    if workload.paused or queue in cluster.snapshot.paused:
        return "paused", "queue"
    return None if cluster.pools_of(workload) else ("too_large", "place")


def rank(cluster: Cluster, team: str, profile: Profile | None, pool: str) -> tuple[int, int]:
    """Return the rank of the profile in the pool and of the team in the profile; unnamed ones come last."""
    names = cluster.pools[pool].profiles
    in_pool = names.index(profile.name) if profile is not None and profile.name in names else len(set(names))
    ranks = profile.policies if profile is not None else ()
    return in_pool, next((at for at, names in enumerate(ranks) if team in names), len(ranks))


def full_rank(cluster: Cluster, group: WorkloadGroup, pool: str) -> tuple[int, int, int]:
    """Return the ranks of a group in a pool, the team's priority included."""
    return (*rank(cluster, group.team, group.profile, pool), -cluster.team(group.team).priority)


def group_sort_key(cluster: Cluster, group: WorkloadGroup, pool: str, over_quota: bool) -> Key:
    """Return the part of the order that a whole group shares."""
    team = cluster.team(group.team)
    share = shares(cluster, group.team, pool) if over_quota else (0,)
    last = over_quota and team.weight == "Lowest"
    return not group.nominated, last, *full_rank(cluster, group, pool), share, -group.priority


def sort_key(cluster: Cluster, group: WorkloadGroup, pool: str, workload: Workload, over_quota: bool) -> Key:
    """Return the sort key of a workload, in quota or over quota; smaller is earlier, and it ends in the id."""
    owner = owner_usage(cluster, group.team, workload.owner) if cluster.settings.user_fairness else 0
    return (*group_sort_key(cluster, group, pool, over_quota), owner, *age(workload))


class GroupHeads:
    """The order of groups, in quota or over quota: every group competes in one of its pools at a time."""

    def __init__(self, cluster: Cluster, competing: Iterable[WorkloadGroup], over_quota: bool) -> None:
        self.cluster, self.over_quota = cluster, over_quota
        self.pool_index = dict.fromkeys(competing, 0)
        """Group to the index of the pool in which it competes."""

    def next(self) -> tuple[WorkloadGroup, Workload, int] | None:
        """Return the first workload as things are now, its group and the index of its pool."""
        best: tuple[Key, WorkloadGroup] | None = None
        for group, at in self.pool_index.items():
            if group.members:
                first = group_sort_key(self.cluster, group, group.pools[at], self.over_quota)
                tail = min(self._tail(group, w) for w in group.heads())
                if best is None or (*first, *tail) < best[0]:
                    best = (*first, *tail), group
        if best is None:
            return None
        group, name = best[1], best[0][-1]
        return group, next(w for w in group.members if w.id == name), self.pool_index[group]

    def _tail(self, group: WorkloadGroup, workload: Workload) -> tuple[int, float, str]:
        fair = self.cluster.settings.user_fairness
        return owner_usage(self.cluster, group.team, workload.owner) if fair else 0, *age(workload)

    def remove(self, group: WorkloadGroup) -> None:
        """Remove a group: no workload in it can start or evict."""
        del self.pool_index[group]


def waiting(competing: Sequence[WorkloadGroup]) -> list[Workload]:
    """Return all workloads that still wait in some groups."""
    return [workload for group in competing for workload in group.members]
