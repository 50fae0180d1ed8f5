"""Build the plan: record every decision with its rule, facts and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .index.cluster import Cluster
from .index.cluster_state import ClusterState
from .index.devices import devices_of
from .index.groups import WorkloadGroup
from .index.hosts import shortage_on
from .index.ledger import Account, LineState
from .index.nodes import Allocation, NodeState, PoolState, WorkerPlacement, placement_of
from .index.pending import Pending, PendingGroup
from .placement.together import Search
from .plan import Demand, Evict, Fact, Facts, Move, Number, Plan, Refusal, Scale, Start, Waiting
from .progress import Progress
from .rules.consolidation import Moving
from .rules.hold import Hold
from .rules.usage import line_usage
from .rules.victims.preemptor import Preemptor, Right
from .rules.victims.sets import SHRINK, Victim
from .snapshot import Terminating, Workload, from_milli

_RULE_OF_RIGHT: dict[Right, str] = {
    "reservation": "reclaim",
    "own_team_any_priority": "reclaim_own_policy",
    "own_team": "preempt_in_team",
    "fair_share": "reclaim_fair_share",
}


class PlanBuilder:
    """The decisions of one plan, in the order in which they are made."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.started: dict[str, Start] = {}
        self.evicted: dict[str, Evict] = {}
        self.moved: dict[str, Move] = {}
        self.scaled: list[Scale] = []
        self.demand: tuple[Demand, ...] = ()
        self.waiting: dict[str, Waiting] = {}
        self.refused: dict[str, Refusal] = {}
        self.nominated: dict[str, tuple[Workload, WorkloadGroup]] = {}
        self.awaiting: dict[str, tuple[Workload, WorkloadGroup]] = {}
        """Workloads that are nominated to nodes which boot, as far as this round."""
        self.helped_by_booting: dict[int, int] = {}
        """Number of a group to the decisions of the plan by the time that only nodes which boot helped it."""
        self.group_of_started: dict[str, WorkloadGroup] = {}
        """Id of a workload that this plan starts, to its group."""
        self.preemptors_of_withdrawn: dict[str, set[str]] = {}
        """Id of a workload whose start was withdrawn, to the workloads that evicted it."""
        self.withdrawn_starts: list[tuple[WorkloadGroup, str]] = []
        """The group and owner of each start that was withdrawn since the last time that the groups were served."""
        self.lowered_usage: list[tuple[Account, str]] = []
        """The account and owner of each victim and withdrawn start since then, which use less than before."""
        self.groups: list[PendingGroup] = []
        """The reasons to wait, each with the workloads that share it."""
        self._own_reasons: dict[str, Waiting] = {}
        self.progress = Progress()
        self.served_in_pool: dict[str, list[str]] = {}
        """Pool to the ids of the workloads that got its GPUs in this plan."""
        self.holds: dict[str, Hold] = {}
        """Pool to the hold there for the workload that waited too long."""
        self.search = Search()
        """The search for places without a victim of the plan; it is bounded over all of them."""

    def suspend_holds(self) -> None:
        """Release the held GPUs; the holds are kept for the reasons."""
        for held in self.holds.values():
            held.suspend()

    def drop_holds(self) -> None:
        """Release the held GPUs and forget the holds."""
        self.suspend_holds()
        self.holds = {}

    def start(self, workload: Workload, allocation: Allocation, in_quota: bool) -> None:
        """Record a start."""
        pool = allocation.pool.pool.name
        account = self.cluster.account(workload)
        beyond = [line.certain - line.quota.reserved for line in account.reserving(pool)]
        self.progress.over_reservation += bool([more for more in beyond if 0 < more <= allocation.milli_gpus])
        reserved, used = quota_numbers(account, pool, workload.non_preemptible and in_quota)
        values: dict[str, Number] = {
            "nodes": tuple(sorted({p.node.node.name for p in allocation.parts})),
            "team": account.team.name,
            "by": "sessions" if workload.non_preemptible else "all",
            "uses": from_milli(used),
            "reserved": from_milli(reserved),
            "pool": pool,
        }
        numbers = {
            "gpus": from_milli(allocation.milli_gpus),
            "team_uses": values["uses"],
            "reserved": values["reserved"],
        }
        numbers["pool"] = pool
        code = "starts_in_quota" if in_quota else "starts_over_quota"
        if in_quota and used > reserved:  # since the nomination its reservation was cut, or used by other work
            code = "starts_nominated"
        elif not allocation.milli_gpus:
            code = "starts_without_gpus"
        rule = ("session_in_quota" if workload.non_preemptible else "job_in_quota") if in_quota else "over_quota"
        self.started[workload.id] = Start(
            workload.id, pool, placement_of(allocation.parts), in_quota, rule, (Fact(code, values),), numbers
        )
        self.served_in_pool.setdefault(pool, []).append(workload.id)
        self.progress.decisions += 1

    def widen(self, allocation: Allocation) -> None:
        """Record that a gang starts with more workers than its least number."""
        start = self.started[allocation.workload.id]
        numbers = {**start.numbers, "gpus": from_milli(allocation.milli_gpus), "workers": len(allocation.parts)}
        fact = Fact("starts_with_workers", {"workers": len(allocation.parts), "of": allocation.need.workers})
        placement = placement_of(allocation.parts)
        self.started[start.id] = replace(start, placement=placement, facts=(start.facts[0], fact), numbers=numbers)

    def withdraw(self, workload: Workload) -> None:
        """Withdraw a start of this plan: a workload that may reclaim needs these GPUs."""
        start = self.started.pop(workload.id)
        self.lowered_usage.append((self.cluster.account(workload), workload.owner))
        self.served_in_pool[start.pool].remove(workload.id)
        self.progress.decisions += 1
        self.progress.releases += 1

    def replaced_by(self, workload: Workload) -> frozenset[str]:
        """Return the workloads that replaced a start of a workload in this plan, and those that replaced theirs."""
        if not self.preemptors_of_withdrawn:
            return frozenset()
        workloads, following = set[str](), [workload.id]
        while following:
            more = self.preemptors_of_withdrawn.get(following.pop(), set()) - workloads
            workloads |= more
            following += more
        return frozenset(workloads)

    def evict(self, preemptor: Preemptor, victims: Sequence[Victim]) -> None:
        """Record the victims of a preemptor in this order; the cluster has evicted them already."""
        cluster, later = self.cluster, {v.allocation.workload.team: 0 for v in victims}
        frees = [v.milli_gpus for v in victims]
        for item, amount in zip(victims, frees, strict=True):
            later[item.allocation.workload.team] += amount
        for item, amount in zip(victims, frees, strict=True):
            allocation = item.allocation
            victim, account = allocation.workload, cluster.account(allocation.workload)
            self.lowered_usage.append((account, victim.owner))
            rule = self._rule(preemptor, allocation)
            reserved, used = quota_numbers(account, allocation.pool.pool.name, False)
            used += later[victim.team]
            later[victim.team] -= amount
            deadline = cluster.now + cluster.grace(victim)
            why = (
                *self._eviction_facts(preemptor, rule, used, reserved, allocation),
                *_shared_host_facts(preemptor, item, victims),
            )
            numbers: dict[str, Number] = {
                "needs": from_milli(preemptor.milli_gpus),
                "frees": from_milli(amount),
                "victim_team": account.team.name,
                "victim_uses": from_milli(used),
                "victim_reserved": from_milli(reserved),
                "for_team": preemptor.account.team.name,
                "pool": allocation.pool.pool.name,
            }
            if item.kind != SHRINK:
                self.moved.pop(victim.id, None)  # a gang may have given up workers before
                self.evicted[victim.id] = Evict(victim.id, preemptor.workload.id, deadline, rule, why, numbers)
                continue
            source, to = placement_of(cluster.allocations[victim.id].parts), placement_of(item.kept)
            why = (*why, _shrink_fact(len(to), len(source)))
            numbers |= {"workers": len(source), "keeps": len(to)}
            self.moved[victim.id] = Move(victim.id, preemptor.workload.id, source, to, deadline, "shrink", why, numbers)
        self.progress.decisions += 1
        self.progress.releases += 1

    def _rule(self, preemptor: Preemptor, allocation: Allocation) -> str:
        """Return the code of the rule by which an allocation is evicted."""
        account, right = self.cluster.account(allocation.workload), preemptor.right_over(allocation)
        own_limit = preemptor.blocked is not None and preemptor.blocked.account in account.chain
        if own_limit and right in ("reservation", "own_team_any_priority"):
            return "reclaim_own_limit"
        return _RULE_OF_RIGHT[right]

    def _eviction_facts(
        self, preemptor: Preemptor, rule: str, used: int, reserved: int, allocation: Allocation
    ) -> Facts:
        account, victim = self.cluster.account(allocation.workload), allocation.workload
        values: dict[str, Number] = {
            **preemptor_values(preemptor.workload, preemptor.account),
            "needs": from_milli(preemptor.milli_gpus),
            "victim": victim.id,
            "victim_kind": victim.kind,
            "victim_team": account.team.name,
            "uses": from_milli(used),
            "reserved": from_milli(reserved),
            "order": self.cluster.settings.victim_order,
        }
        code = rule
        if rule == "preempt_in_team" and victim.priority >= preemptor.workload.priority:
            code = "yield_in_team"
            values["yields_after"] = self.cluster.settings.yields_after
        elif rule != "preempt_in_team" and not allocation.milli_gpus:
            code = "reclaim_cpu"
            holds = len(allocation.parts)
            values |= {"cpu": from_milli(allocation.need.cpu * holds), "memory": allocation.need.memory * holds}
        elif rule == "reclaim" and account is preemptor.account:
            code = "reclaim_own_team"
        return (Fact(code, values),)

    def move(self, workload: Workload, moves: Sequence[Moving]) -> None:
        """Record the moves that make room for a workload."""
        account = self.cluster.account(workload)
        for moving in moves:
            victim = moving.allocation.workload
            source, to = placement_of(moving.allocation.parts), placement_of(moving.to)
            before, after = (tuple(sorted({part.node.node.name for part in parts})) for parts in moving.changes)
            values: dict[str, Number] = {
                **preemptor_values(workload, account),
                "from": before,
                "to": after,
                "moving": len(moving.changes[0]),
                "workers": len(to),
            }
            self.moved[victim.id] = Move(
                victim.id,
                workload.id,
                source,
                to,
                self.cluster.now + self.cluster.grace(victim),
                "consolidate",
                (Fact("moves", values),),
                {"gpus": from_milli(moving.allocation.milli_gpus), "from": before, "to": after},
            )
        self.progress.decisions += 1
        self.progress.releases += 1

    def nominate(self, workload: Workload, group: WorkloadGroup, pool: PoolState) -> None:
        """Record a nomination: the workload starts once the terminating work on its GPUs is gone."""
        self.nominated[workload.id] = workload, group
        self.served_in_pool.setdefault(pool.pool.name, []).append(workload.id)
        self.progress.decisions += 1

    def _write_nominations(self) -> None:
        """Write placement, time and terminating workloads of each nomination."""
        victims: dict[str, list[Allocation]] = {}
        for eviction in self.evicted.values():
            victims.setdefault(eviction.preemptor, []).append(self.cluster.allocations[eviction.id])
        for move in self.moved.values():
            victims.setdefault(move.preemptor, []).append(self.cluster.allocations[move.id])
        for workload, _ in self.nominated.values():
            nomination = self.cluster.nominations.get(workload.id)
            if nomination is not None:
                self.waiting[workload.id] = self._reclaiming_reason(workload, nomination, victims.get(workload.id, ()))

    def _reclaiming_reason(self, workload: Workload, nomination: Allocation, victims: Sequence[Allocation]) -> Waiting:
        pool, parts = nomination.pool, nomination.parts
        ids, deadline = self._blocking_workloads(workload, parts, victims)
        amount = from_milli(self.cluster.need(workload).total)
        outliving: list[tuple[NodeState, Terminating]] = []
        for part in parts:
            if part.node.node.terminating:
                outliving += [(part.node, pod) for pod in _terminating_on(self.cluster, part)]
        if outliving:
            deadline = max([deadline] + [pod.deadline for _, pod in outliving])
        facts: Facts = (Fact("nomination_free_soon", {"needs": amount, "kind": workload.kind}),)
        if ids or outliving:
            values: dict[str, Number] = {"needs": amount, "within": max(0.0, deadline - self.cluster.now)}
            facts = (Fact("reclaiming", values), *[self._victim_fact(id) for id in ids])
        if outliving:
            pods = dict.fromkeys([(pod.workload, node.node.name) for node, pod in outliving])
            facts += tuple([Fact("by_pod", {"workload": id, "node": name}) for id, name in pods])
        if workload.id in self.cluster.terminating_for:
            late = [a for a in self.cluster.terminating_for[workload.id] if a.stuck]
            facts += tuple([stuck_fact(self.cluster, a) for a in sorted(late, key=lambda a: a.workload.id)])
        return Waiting(
            workload.id,
            "reclaiming",
            "nomination",
            facts,
            {"gpus": amount, "terminating": tuple(ids), "pool": pool.pool.name},
            deadline,
            placement_of(parts),
            tuple(ids),
        )

    def cancel_eviction(self, workload: Workload) -> None:
        """Remove the eviction or move of a workload."""
        self.evicted.pop(workload.id, None)
        self.moved.pop(workload.id, None)
        self.progress.decisions += 1

    def keep_workers(self, allocation: Allocation, parts: tuple[WorkerPlacement, ...]) -> None:
        """Record that a gang that shrinks goes on with these parts."""
        move = self.moved[allocation.workload.id]
        facts = (*move.facts[:-1], _shrink_fact(len(parts), len(move.source)))
        frees = from_milli(allocation.milli_gpus - allocation.need.gpus * len(parts))
        numbers = {**move.numbers, "keeps": len(parts), "frees": frees}
        self.moved[move.id] = replace(move, to=placement_of(parts), facts=facts, numbers=numbers)
        self.progress.decisions += 1

    def _blocking_workloads(
        self, workload: Workload, parts: Sequence[WorkerPlacement], victims: Sequence[Allocation]
    ) -> tuple[list[str], float]:
        """Return the workloads that have to terminate first, and the time by which they are gone."""
        leaving = {t.workload.id: t for t in victims}
        for allocation in self.cluster.terminating_for.get(workload.id, ()):
            if not allocation.stuck:
                leaving[allocation.workload.id] = allocation
        for part in parts:
            for allocation in part.node.allocations.values():
                if allocation.terminating and _shares_devices(allocation, part):
                    leaving[allocation.workload.id] = allocation
        ends = [self._ends_by(allocation.workload) for allocation in leaving.values()]
        return sorted(leaving), max(ends, default=self.cluster.now)

    def _ends_by(self, victim: Workload) -> float:
        if victim.state == "checkpointing" and victim.deadline is not None:
            return victim.deadline
        return self.cluster.now + self.cluster.grace(victim)

    def _victim_fact(self, id: str) -> Fact:
        allocation = self.cluster.allocations[id]
        victim, account = allocation.workload, self.cluster.account(allocation.workload)
        values: dict[str, Number] = {"victim": id, "kind": victim.kind, "owner": victim.owner}
        return Fact("by_victim", {**values, "team": account.team.name, "gpus": from_milli(allocation.milli_gpus)})

    def wait(self, waiting: Waiting) -> None:
        """Record that a workload waits, and why."""
        self.waiting[waiting.id] = waiting

    def wait_with_own_reason(self, waiting: Waiting) -> None:
        """Record a more exact reason for one workload than for the others of its group."""
        self._own_reasons[waiting.id] = waiting

    def _pending(self) -> Pending:
        groups = self.groups
        if self._own_reasons:
            groups = [
                PendingGroup(number, tuple(w for w in members if w.id not in self._own_reasons), reason)
                for number, members, reason in groups
            ]
        return Pending(self.waiting | self._own_reasons, groups)

    def plan(self) -> Plan:
        """Return the plan."""
        self._write_nominations()
        leaving = self.evicted.keys() | self.moved.keys()
        running = self.cluster.running
        return Plan(
            start=tuple(self.started.values()),
            evict=tuple(self.evicted.values()),
            move=tuple(self.moved.values()),
            scale=tuple(self.scaled),
            pending=self._pending(),
            refused=tuple(self.refused[i] for i in sorted(self.refused)),
            keep=tuple(i for i in running if i not in leaving) if leaving else tuple(running),
            terminating=tuple(self.cluster.terminating),
            usage=line_usage(self.cluster),
            demand=self.demand,
        )


def _shrink_fact(workers: int, of: int) -> Fact:
    return Fact("goes_on", {"workers": workers, "of": of})


def preemptor_values(workload: Workload, account: Account) -> dict[str, Number]:
    """Return the values by which a sentence names the preemptor."""
    known: dict[str, Number] = {"preemptor": workload.id, "kind": workload.kind, "owner": workload.owner}
    return {**known, "team": account.team.name}


def stuck_fact(cluster: ClusterState, allocation: Allocation) -> Fact:
    """Return what an evicted workload that does not end holds, where, and for how long too long."""
    workload = allocation.workload
    values: dict[str, Number] = {
        "workload": workload.id,
        "kind": workload.kind,
        "owner": workload.owner,
        "team": cluster.account(workload).team.name,
        "nodes": tuple(sorted({part.node.node.name for part in allocation.parts})),
        "late": max(0.0, cluster.now - (workload.deadline or cluster.now)),
    }
    return Fact("by_stuck", values)


def stuck_in(cluster: ClusterState, pool: PoolState) -> tuple[Facts, int]:
    """Return what does not end in a pool, and its milli-GPUs: evicted workloads, then what outlived its attempt."""
    late = [a for id in cluster.terminating if (a := cluster.allocations.get(id)) and a.stuck and a.is_in(pool)]
    facts = [stuck_fact(cluster, allocation) for allocation in late]
    held = (part for allocation in late for part in allocation.parts_in(pool) if part.node.usable)
    amount = sum(part.milli_per_device * len(part.devices) for part in held)
    for name in sorted(cluster.late.nodes):
        state = cluster.nodes[name]
        for pod in state.node.terminating if state.pool is pool and state.usable else ():
            if pod.deadline <= cluster.stuck_before and pod.devices:
                values: dict[str, Number] = {"workload": pod.workload, "nodes": (name,)}
                amount += pod.milli_per_device * len(pod.devices)
                facts.append(Fact("by_stuck", values | {"late": cluster.now - pod.deadline}))
    return tuple(facts), amount


def _terminating_on(cluster: ClusterState, part: WorkerPlacement) -> list[Terminating]:
    """Return what ended attempts still hold of a part's devices, without what is stuck."""
    node = part.node.node
    devices = {devices_of(node)[at] for at in part.devices}
    ending = [pod for pod in node.terminating if pod.deadline > cluster.stuck_before]
    return [pod for pod in ending if not devices.isdisjoint(pod.devices) or not part.devices]


def _shares_devices(allocation: Allocation, part: WorkerPlacement) -> bool:
    for other in allocation.parts:
        if other.node is part.node and (not part.devices or not set(part.devices).isdisjoint(other.devices)):
            return True
    return False


def quota_numbers(account: Account, pool: str, non_preemptible: bool) -> tuple[int, int]:
    """Return (reserved, used) of the line that decides in this pool: the tightest of those that reserve."""
    guarantor = account.guarantor(pool)
    if guarantor is None:
        return 0, account.used_in_pool.get(pool, 0)
    lines = guarantor.reserving(pool)

    def used(line: LineState) -> int:
        return line.non_preemptible if non_preemptible else line.future_usage

    line = min(lines, key=lambda ln: (ln.quota.reserved - used(ln), ln.quota.pools))
    return line.quota.reserved, used(line)


def _shared_host_facts(preemptor: Preemptor, victim: Victim, victims: Sequence[Victim]) -> Facts:
    """Return what the preemptor gets of the CPU, memory and pods of a victim in another pool, and on which nodes.

    `victims`: all that leave for it; the cluster has evicted them already.
    """
    if not preemptor.pool.peer_pools or victim.allocation.is_in(preemptor.pool):
        return ()
    short: dict[str, None] = {}
    hosts: dict[str, None] = {}
    for part in victim.gone:
        for node in [other for other in part.node.host_peers if other.pool is preemptor.pool]:
            gone = [v.allocation.need for v in victims for p in v.gone if p.node is node or p.node in node.host_peers]
            lacks = shortage_on(node, preemptor.need, gone)
            if lacks is not None and lacks.is_held_by(victim.allocation.need):
                hosts[node.node.host] = None
                held = victim.allocation.need
                short |= dict.fromkeys(["CPU"] if lacks.cpu and held.cpu else [])
                short |= dict.fromkeys(["memory"] if lacks.memory and held.memory else [])
                short |= dict.fromkeys(["pods"] if lacks.pods else [])
    if not hosts:
        return ()
    return (Fact("shares_host", {"pool": preemptor.pool.pool.name, "nodes": tuple(hosts), "what": tuple(short)}),)
