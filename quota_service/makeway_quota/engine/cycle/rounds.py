"""Serve the classes of pending workloads in order, until nothing changes any more (rule 3).

Called by the admission cycle (schedule.py). A start over quota can put its team above its reservation, and an
eviction can free more than its preemptor needs: both may help a workload that was denied before. Deciding that in
further rounds of the same cycle keeps plans stable: planning again with nothing changed yields an empty plan (I7).
"""

from __future__ import annotations

from dataclasses import replace

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup
from ..index.nodes import PoolState
from ..plan_builder import PlanBuilder
from ..progress import Progress
from ..rules.hold import hold, starving, would_be_preempted_in_team
from ..snapshot import Workload
from .admission import try_start
from .booting import serve_again
from .nominations import start_earlier_nominations, start_nominated
from .serving import guaranteed, serve
from .unschedulable import Unschedulable

MAX_ROUNDS = 100
"""Rounds of one plan. Far more than any plan needs: it stops two workloads that would replace each other for ever."""


class Rounds:
    """The classes of one cycle, and whether another round could change anything.

    `late`: the groups in which a workload may have waited too long. `why`: compute holds even where they make
    no difference to what starts.
    """

    def __init__(
        self, cluster: Cluster, builder: PlanBuilder, heads: list[WorkloadGroup], late: list[WorkloadGroup], why: bool
    ) -> None:
        self.cluster, self.builder, self.heads, self.late, self.why = cluster, builder, heads, late, why
        self.sessions = [group for group in heads if group.is_protected_session]
        self.non_preemptible = [group for group in heads if group.non_preemptible and not group.is_protected_session]
        """Jobs that count on the reservation like sessions, and so go before the others."""
        self.others = [group for group in heads if not group.non_preemptible]
        self.borrowing = [group for group in heads if not group.non_preemptible or group.may_borrow]
        """The groups of the class over quota: also of non-preemptible work without GPUs."""
        self.sparing = [group for group in heads if group.need.only_spare]
        """The groups of work that a start may give room: it leaves CPU to guaranteed GPUs only while they are free."""
        self.quiet = self.quota_served = False
        """Whether the last round only used up room; and whether another round cannot help work in quota."""

    def run(self) -> None:
        """Start what is nominated and free, then serve all classes until a round changes nothing."""
        serve_again(self.cluster, self.builder)
        start_earlier_nominations(self.cluster, self.builder, self.heads)
        self.quiet = self.quota_served = False
        for _ in range(MAX_ROUNDS):
            before = replace(self.builder.progress)
            if self._round(before) or self.builder.progress.decisions == before.decisions:
                break

    def _round(self, before: Progress) -> bool:
        """Serve sessions in quota, jobs in quota, then over quota; return whether another round is needless."""
        serve_again(self.cluster, self.builder)
        builder, nominations = self.builder, bool(self.cluster.nominations)
        held = _what_is_held(builder)
        builder.drop_holds()
        start_nominated(self.cluster, builder, False)
        for groups in (self.sessions, self.non_preemptible, self.others) if not self.quota_served else ():
            serve(self.cluster, builder, groups)
        in_quota = builder.progress.decisions
        if self._serve_over_quota(before, held):
            return True
        waits = bool(builder.nominated or builder.awaiting)
        if not waits and not any(group.has_members() for group in self.heads):
            builder.drop_holds()
            return True
        self.quiet = self._only_took_room(before)
        self.quota_served = self.quiet and not nominations and self._quota_gains_nothing(before)
        same_holds = builder.progress.decisions == in_quota or not (builder.holds or (self.why and self.late))
        return self.quota_served and same_holds

    def _serve_over_quota(self, before: Progress, held: list[tuple[object, ...]]) -> bool:
        """Hold GPUs for starving workloads and serve the class over quota; return whether its last result stands.

        It stands where all were denied with more room, and only starts followed.
        """
        builder, unschedulable = self.builder, Unschedulable(self.cluster, self.builder)
        able = any(_may_start(group, unschedulable) for group in self.borrowing)
        if not self.why and not able and not builder.nominated:
            return False
        _hold_for_the_starving(self.cluster, builder, self.late)
        if self.quiet and builder.progress.decisions == before.decisions and _what_is_held(builder) == held:
            return True
        asked = builder.progress.decisions
        start_nominated(self.cluster, builder, True)
        changed = builder.holds or builder.progress.decisions != asked
        again = Unschedulable(self.cluster, builder) if changed else unschedulable
        serve(self.cluster, builder, self.borrowing, again)
        return False

    def _only_took_room(self, before: Progress) -> bool:
        """Whether the round only used up room, from the view of work over quota.

        Otherwise there may be new candidates: of teams beyond their fair share now, or of the own team,
        where a start used GPUs that were about to be free.
        """
        builder, cluster = self.builder, self.cluster
        released = builder.progress.releases != before.releases or cluster.ledger.counts_twice
        if released or builder.nominated or builder.awaiting or cluster.settings.fair_share == "reclaim":
            return False
        if any(group.has_members() for group in self.sparing):
            return False
        return not (cluster.terminating or cluster.late.nodes or builder.evicted or builder.moved)

    def _quota_gains_nothing(self, before: Progress) -> bool:
        """Whether the starts of the round made no work a candidate that work in quota could evict.

        A start is a candidate once its team is above its reservation; with departments also once its department is,
        and for non-preemptible work of its own team always.
        """
        if self.cluster.nominations:
            return False
        none_over = self.builder.progress.over_reservation == before.over_reservation
        own_team_only = none_over and not self.cluster.ledger.nested
        able = (group for group in self.heads if group.non_preemptible or not own_team_only)
        return not any(group.in_quota_somewhere() and group.has_members() for group in able)


def _may_start(group: WorkloadGroup, unschedulable: Unschedulable) -> bool:
    """Whether there may be room over quota, or victims, for a workload of the group."""
    return (group.nominated or group.may_borrow) and not unschedulable(group) and group.has_members()


def _what_is_held(builder: PlanBuilder) -> list[tuple[object, ...]]:
    return [(hold.workload, hold.pool, hold.until, hold.openings) for hold in builder.holds.values()]


def _hold_for_the_starving(cluster: Cluster, builder: PlanBuilder, waiting: list[WorkloadGroup]) -> None:
    """Start the workloads that waited too long, one per pool; hold GPUs for those that do not fit."""
    for group, workload in starving(cluster, waiting):
        free = [pool for pool in group.pools if pool.pool.name not in builder.holds]
        if not free:
            continue
        team = [other for other in waiting if other.account is group.account and other.priority > group.priority]
        pools = [pool for pool in free if not (team and would_be_preempted_in_team(cluster, group, pool, team))]
        if any(_started_late(cluster, builder, group, workload, pool) for pool in pools):
            group.pop(workload)
            continue
        new_hold = next((new_hold for pool in pools if (new_hold := hold(cluster, group, workload, pool))), None)
        if new_hold is not None:
            new_hold.enforce()
            builder.holds[new_hold.pool.pool.name] = new_hold


def _started_late(
    cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, workload: Workload, pool: PoolState
) -> bool:
    in_quota = guaranteed(cluster, group, pool)
    return (in_quota or group.may_borrow) and try_start(builder, group, workload, pool, (), in_quota)
