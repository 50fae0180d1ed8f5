"""Make one plan: the admission cycle, step by step (engine rules 3 to 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..snapshot import Workload
from .decisions import Decisions
from .relocation import relocate_victims
from .state.cluster import Cluster, WorkerPlacement
from .state.groups import GroupHeads, WorkloadGroup, waits_too_long, workload_groups
from .state.holds import Hold, hold, starving, would_be_preempted_in_team
from .state.placement import count_workers, find, find_when_ready
from .state.quota import allowed, in_quota, over_capacity, over_limit
from .victims.moves import consolidate
from .victims.selection import Choice, select
from .victims.victims import Preemptor, Rights, rights_of
from .withdrawal import cancel_moves_to_same_place, replace_preemptors, withdraw_superfluous

MAX_WITHDRAWN = 1000
"""Starts of one plan that may be withdrawn for other workloads; then nothing is evicted until the next plan. Far more
than any plan needs: it stops two workloads that would replace each other for ever."""

MAX_ROUNDS = 100
"""Rounds of one plan. Far more than any plan needs: it stops two workloads that would replace each other for ever."""


class Cycle:
    """One admission cycle over one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.decisions = cluster, Decisions(cluster)
        self.waiting, self.inadmissible = workload_groups(cluster)
        for name in self.inadmissible:
            cluster.nominations.pop(name, None)
        heads = [head for group in self.waiting for head in group.heads()]
        self.starvation_candidates = self.waiting if any(waits_too_long(cluster, head) for head in heads) else []
        """All groups that wait if any of their heads has starved, else none."""

    def run(self) -> None:
        """Decide until nothing changes any more."""
        self.rounds()
        if self.grow():
            self.rounds()  # a gang that grew has a larger share now
        if self.come_to_rest():
            self.come_to_rest()  # what was spared once, and evicted again, may be superfluous by now
        cancel_moves_to_same_place(self.decisions)
        replace_preemptors(self.decisions)
        self.suspend_holds()

    def come_to_rest(self) -> bool:
        """Spare and move victims until nothing changes, each spared once; return whether any was."""
        withdrawn_evictions: set[tuple[str, str, int]] = set()
        for _ in range(MAX_ROUNDS):
            if not withdraw_superfluous(self.decisions, withdrawn_evictions) and not relocate_victims(self.decisions):
                break
            self.rounds()
        return bool(withdrawn_evictions)

    def rounds(self) -> None:
        """Serve sessions in quota, jobs in quota, then over quota; again while that changes what others may do."""
        self.decisions.serve_again()
        self.start_earlier_nominations()
        sessions = [q for q in self.waiting if q.is_protected_session]
        non_preemptible = [q for q in self.waiting if q.non_preemptible and not q.is_protected_session]
        others = [q for q in self.waiting if not q.non_preemptible]
        borrowing = [q for q in self.waiting if not q.non_preemptible or not q.need.total]
        for _ in range(MAX_ROUNDS):
            before = self.decisions.count
            self.decisions.serve_again()
            self.suspend_holds()
            self.decisions.holds = {}
            self.start_nominated(False)
            self.serve(sessions, False)
            self.serve(non_preemptible, False)
            self.serve(others, False)
            self.hold_for_the_starving()
            self.start_nominated(True)
            self.serve([q for q in borrowing if q.nominated or q.may_borrow], True)
            if self.decisions.count == before:
                break

    # Nominations

    def start_earlier_nominations(self) -> None:
        """Start the workloads whose nominated devices are free by now."""
        heads = GroupHeads(self.cluster, [q for q in self.waiting if q.nominated and self.is_nominated(q)], False)
        while (following := heads.next()) is not None:
            group, workload, _ = following
            nominated = self.decisions.drop_nomination(workload)
            pool = self.cluster.nodes[nominated[0].node].pool
            in_quota = self.nomination_outlives_quota(group, nominated, pool) or self.in_quota(
                group, pool, len(nominated)
            )
            heads.remove(group)
            able = in_quota or group.may_borrow
            if able and self.free_now(nominated, group) and self.start(group, workload, pool, nominated, in_quota):
                group.members.remove(workload)
            else:
                self.cluster.nominate(workload, nominated)

    def is_nominated(self, group: WorkloadGroup) -> bool:
        """Whether a workload of the group has nominated devices."""
        return any(w.id in self.cluster.nominations for w in group.members)

    def nomination_outlives_quota(
        self, group: WorkloadGroup, nominated: tuple[WorkerPlacement, ...], pool: str
    ) -> bool:
        """Whether a nomination in a pool stays valid although the reservation is used up.

        True for work that may not run over quota: other teams of its department may have used the department's
        reservation meanwhile.
        """
        never_over_quota = group.non_preemptible or not group.may_borrow
        return bool(nominated) and never_over_quota and self.cluster.nodes[nominated[0].node].pool == pool

    def start_nominated(self, over_quota: bool) -> None:
        """Start the workloads that this plan nominated, where nothing is in their way any more.

        A workload in quota nowhere may start on its nominated devices in either pass. On other devices it starts only
        in the over-quota pass, and only if it does not delay the holder of a hold.
        """
        for name, group in list(self.decisions.nominated.items()):
            if name not in self.cluster.nominations:
                continue
            workload = self.cluster.live[name]
            nominated = self.decisions.drop_nomination(workload)
            outlives = [p for p in group.pools if self.nomination_outlives_quota(group, nominated, p)]
            in_quota = [p for p in group.pools if p in outlives or self.in_quota(group, p)]
            free = [self.cluster.nodes[nominated[0].node].pool] if self.free_now(nominated, group) else []
            pools = (group.pools if in_quota or over_quota else free) if group.may_borrow else in_quota
            if in_quota and (workload.nomination or self.replaces_or_was_replaced(name)):
                pools = in_quota  # over quota elsewhere, the other would replace it (again)
            if over_quota and not in_quota:
                done = any(self.start_here(group, workload, pool, nominated, True) for pool in pools)
            else:
                done = not over_quota and any(
                    self.start(group, workload, pool, nominated, pool in in_quota) for pool in pools
                )
            if done:
                del self.decisions.nominated[name]
            else:
                self.cluster.nominate(workload, nominated)

    def replaces_or_was_replaced(self, name: str) -> bool:
        """Whether a start of this plan was withdrawn for a workload, or one of it for another workload."""
        replaced = self.decisions.replaced
        return name in replaced or any(name in names for names in replaced.values())

    # Serving one class

    def serve(self, competing: Sequence[WorkloadGroup], over_quota: bool) -> None:
        """Serve one class in order: in the first pool with room, else by a nomination, else by reclaim.

        A workload that is in quota in one of its pools may start over quota in another: better than an eviction.
        """
        heads = GroupHeads(self.cluster, competing if over_quota else self.may_be_in_quota(competing), over_quota)
        while (following := heads.next()) is not None:
            group, workload, at = following
            pool, nominated = group.pools[at], self.decisions.drop_nomination(workload)
            eligible_pools = [p for p in group.pools if (group.may_borrow if over_quota else self.in_quota(group, p))]
            startable_pools = [
                p for p in group.pools if p in eligible_pools or self.nomination_outlives_quota(group, nominated, p)
            ]
            nominated_in_quota = bool(nominated) and self.cluster.nodes[nominated[0].node].pool in eligible_pools
            may_start_here = pool in startable_pools or (
                bool(startable_pools) and group.may_borrow and (over_quota or not nominated_in_quota)
            )
            # else its nomination outlives its quota
            starts_over_quota = pool not in startable_pools or (over_quota and group.may_borrow)
            if may_start_here and self.start_here(group, workload, pool, nominated, starts_over_quota):
                group.members.remove(workload)
            elif startable_pools and at + 1 < len(group.pools):
                if nominated:
                    self.cluster.nominate(workload, nominated)
                heads.pool_index[group] = at + 1
            elif self.make_room(group, workload, nominated, startable_pools, eligible_pools, over_quota) or (
                not (over_quota or nominated) and self.await_nodes(group, workload, eligible_pools)
            ):
                group.members.remove(workload)
            else:
                heads.remove(group)
                if nominated and not over_quota and not group.non_preemptible:
                    self.cluster.nominate(workload, nominated)
                elif nominated:
                    self.decisions.count += 1  # a nomination that cannot be kept any more

    def may_be_in_quota(self, competing: Sequence[WorkloadGroup]) -> list[WorkloadGroup]:
        """Return the groups that are in quota, and those that may be once a nomination of a shared level moves away."""
        easing = {level for group in competing if group.nominated for level in group.chain}
        in_quota = [q for q in competing if any(self.in_quota(q, pool) for pool in q.pools)]
        return [q for q in competing if q.nominated or q in in_quota or not easing.isdisjoint(q.chain)]

    def make_room(
        self,
        group: WorkloadGroup,
        workload: Workload,
        nominated: tuple[WorkerPlacement, ...],
        startable_pools: list[str],
        eligible_pools: list[str],
        over_quota: bool,
    ) -> bool:
        """Nominate what is on its way to be free for a workload, or evict others for it."""
        elsewhere = (
            bool(nominated) and group.may_borrow and self.cluster.nodes[nominated[0].node].pool not in startable_pools
        )
        if elsewhere and not over_quota:
            return False  # nominated over quota, in another pool
        return self.nominate(group, workload, startable_pools, nominated, over_quota) or self.reclaim(
            group, workload, eligible_pools, over_quota
        )

    def in_quota(self, group: WorkloadGroup, pool: str, workers: int = 0) -> bool:
        """Whether one of the group is in quota in a pool."""
        amount = max(group.need.total, group.need.gpus * workers)
        return in_quota(self.cluster, group.chain, pool, amount, group.non_preemptible)

    def start_here(
        self,
        group: WorkloadGroup,
        workload: Workload,
        pool: str,
        nominated: tuple[WorkerPlacement, ...],
        over_quota: bool,
    ) -> bool:
        """Start a workload if it fits now; over quota, it must not delay the one that waited too long."""
        pool_hold = self.decisions.holds.get(pool)
        if pool_hold is None or pool_hold.workload is workload:
            return self.start(group, workload, pool, nominated, not over_quota)
        if not over_quota or pool_hold.ends_in_time(self.cluster, workload):
            with pool_hold.in_state(self.cluster, enforced=False):
                return self.start(group, workload, pool, nominated, not over_quota)
        with pool_hold.in_state(self.cluster, enforced=True):
            if pool_hold.in_the_way(self.cluster, group) or pool_hold.over_capacity(self.cluster, group):
                return False
            done = self.start(group, workload, pool, nominated, False)
        if done:
            pool_hold.count(self.cluster, self.cluster.running[workload.id])
        return done

    def start(
        self,
        group: WorkloadGroup,
        workload: Workload,
        pool: str,
        nominated: tuple[WorkerPlacement, ...],
        in_quota: bool,
    ) -> bool:
        """Start a workload in a pool if it fits there now; where devices were nominated for it, on those."""
        cluster, need = self.cluster, group.need
        mine = (
            nominated
            if nominated and cluster.nodes[nominated[0].node].pool == pool and self.free_now(nominated, group)
            else ()
        )
        if len(mine) > need.min_workers and not allowed(cluster, group.chain, pool, need.gpus * len(mine)):
            mine = mine[: need.min_workers]
        if len(mine) <= need.min_workers and not allowed(cluster, group.chain, pool, need.total):
            return False
        parts = mine or find(cluster, pool, need)
        if parts:
            self.decisions.start(group, workload, parts, in_quota)
        return bool(parts)

    def free_now(self, parts: tuple[WorkerPlacement, ...], group: WorkloadGroup) -> bool:
        """Whether nominated devices are free by now."""
        up = bool(parts) and all(self.cluster.usable(part.node) for part in parts)
        return up and self.cluster.holds_parts(group.need, parts, self.cluster.free)

    def nominate(
        self,
        group: WorkloadGroup,
        workload: Workload,
        pools: list[str],
        nominated: tuple[WorkerPlacement, ...],
        over_quota: bool,
    ) -> bool:
        """Nominate what is on its way to be free: what was nominated already, or in quota whatever is enough."""
        if over_quota and not nominated and not group.nominated:
            return False
        was = self.cluster.nodes[nominated[0].node].pool if nominated else ""
        for pool in sorted(pools, key=lambda name: bool(nominated) and name != was):
            if not allowed(self.cluster, group.chain, pool, group.need.total, True):
                continue
            mine = nominated if pool == was else ()
            parts = mine or (find(self.cluster, pool, group.need, True) if not over_quota or group.nominated else ())
            if parts:
                self.decisions.nominate(group, workload, parts)
                return True
        return False

    def await_nodes(self, group: WorkloadGroup, workload: Workload, pools: list[str]) -> bool:
        """Nominate a workload in the first pool where it fits once nodes that boot are ready."""
        cluster, need = self.cluster, group.need
        for pool in pools if need.total else ():
            full = over_capacity(cluster, pool, need.total, True) or over_limit(
                cluster, group.chain, pool, need.total, True
            )
            if not full and (parts := find_when_ready(cluster, group.chain, pool, need)):
                self.decisions.await_nodes(group, workload, parts)
                return True
        return False

    # Reclaim and preemption

    def reclaim(self, group: WorkloadGroup, workload: Workload, pools: list[str], over_quota: bool) -> bool:
        """Evict others for a workload; over quota not where GPUs are held, but for the one they are held for."""
        if group.reclaim_deferred or not group.need.total:
            return False
        holds = self.decisions.holds
        held = [holds[pool] for pool in pools if over_quota and pool in holds]
        if self.reclaim_in(group, workload, [p for p in pools if not (over_quota and p in holds)], over_quota):
            return True
        for own_hold in (h for h in held if h.workload is workload):
            own_hold.suspend(self.cluster)
            done = self.reclaim_in(group, workload, [own_hold.pool], over_quota)
            own_hold.enforce(self.cluster)
            if done:
                return True
        return False

    def reclaim_in(self, group: WorkloadGroup, workload: Workload, pools: list[str], over_quota: bool) -> bool:
        """Move jobs if that is enough in a pool, else evict, by the rights that the workload has.

        The first pool with a set without a member that could return at once, else the first with any legal set.
        """
        for pool in () if over_quota else pools:
            if (change := consolidate(self.preemptor(group, workload, pool, ("reservation",)))) is not None:
                moved = self.decisions.move(workload, change)
                if moved or not self.start(group, workload, pool, change.parts, True):
                    self.decisions.nominate(group, workload, change.parts)
                return True
        ways = [
            self.preemptor(group, workload, pool, rights)
            for pool in pools
            if not (over_quota and self.is_on_its_way(group, pool))  # though not nominated for it
            for rights in rights_of(self.cluster, workload, group.need, pool, not over_quota)
        ]
        if self.evict(group, ways, over_quota):
            return True
        own: Rights = ("reservation", "own_team_any_priority")
        return (
            group.non_preemptible
            and not over_quota
            and self.evict(group, [replace(p, rights=own) for p in ways], over_quota)
        )

    def is_on_its_way(self, group: WorkloadGroup, pool: str) -> bool:
        """Whether a workload of the group would fit once all that terminates is gone."""
        if not allowed(self.cluster, group.chain, pool, group.need.total, True):
            return False
        return count_workers(self.cluster, pool, group.need, True) >= group.need.min_workers

    def preemptor(self, group: WorkloadGroup, workload: Workload, pool: str, rights: Rights) -> Preemptor:
        """Return a workload of the group as a preemptor."""
        replaced_by = self.decisions.replaced_by(workload.id)
        return Preemptor(self.cluster, workload, group.need, group.chain, pool, rights, replaced_by=replaced_by)

    def evict(self, group: WorkloadGroup, ways: Sequence[Preemptor], over_quota: bool) -> bool:
        """Evict the best legal victim set; start the workload (in quota, if it is) or nominate what becomes free."""
        if self.decisions.withdrawn_starts >= MAX_WITHDRAWN:
            return False
        chosen: tuple[Preemptor, Choice] | None = None
        for p in ways:
            choice = select(p)
            if choice is not None and (chosen is None or not choice.victim_returns):
                chosen = p, choice
                if not choice.victim_returns:
                    break
        if chosen is None:
            return False
        workload, parts, own = chosen[0].workload, self.decisions.evict(*chosen), chosen[0].pool
        for pool in [own, *(other for other in group.pools if other != own)]:
            quota = not over_quota and self.in_quota(group, pool)
            if (quota or over_quota) and self.start_here(group, workload, pool, parts, not quota):
                return True
        self.decisions.nominate(group, workload, parts)
        return True

    # Holds and growth

    def suspend_holds(self) -> None:
        """Suspend all holds: the held GPUs are free."""
        for active in self.decisions.holds.values():
            active.suspend(self.cluster)

    def hold_for_the_starving(self) -> None:
        """Serve the workloads that waited too long first, one a pool; hold what would do where they do not fit."""
        for group, workload in starving(self.cluster, self.starvation_candidates):
            free = [pool for pool in group.pools if pool not in self.decisions.holds]
            if not free:
                continue
            team = [
                q
                for q in self.starvation_candidates
                if q.members and q.team == group.team and q.priority > group.priority
            ]
            pools = [
                pool for pool in free if not (team and would_be_preempted_in_team(self.cluster, group, pool, team))
            ]
            if any(self.start_late(group, workload, pool) for pool in pools):
                group.members.remove(workload)
                continue
            new_hold: Hold | None = next((h for p in pools if (h := hold(self.cluster, group, workload, p))), None)
            if new_hold is not None:
                new_hold.enforce(self.cluster)
                self.decisions.holds[new_hold.pool] = new_hold

    def start_late(self, group: WorkloadGroup, workload: Workload, pool: str) -> bool:
        """Start a workload that waited too long, if it fits."""
        quota = self.in_quota(group, pool)
        return (quota or group.may_borrow) and self.start(group, workload, pool, (), quota)

    def grow(self) -> bool:
        """Add workers to the elastic gangs that this plan starts, where no in-quota workload wants the GPUs."""
        running = [self.cluster.running[name] for name in self.decisions.started]
        waiting = [(group, pool) for group in self.waiting if group.members for pool in group.pools]
        wanted = {pool for group, pool in waiting if self.in_quota(group, pool)}
        wanted |= {other for pool in wanted for other in self.cluster.pools_beside(pool)}
        grew = False
        for gang in running:
            if gang.need.workers > gang.need.min_workers and gang.pool not in wanted:
                grew |= len(self.decisions.widen(gang).parts) > gang.need.min_workers
        return grew
