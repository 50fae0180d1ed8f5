"""The plan while it is being written: what was decided, with its reason and its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .index.cluster import Cluster
from .index.nodes import Allocation, Part, PoolState, placement_of
from .index.pending import Alike, Pending
from .index.queues import Queue
from .phrases import count, gpus, listed, number, seconds, this, who
from .plan import Evict, Move, Number, Plan, Refusal, Scale, Start, Waiting
from .rules.consolidation import Moving
from .rules.hold import Hold
from .rules.quota import Account
from .rules.usage import line_usage
from .rules.victim_sets import SHRINK, Victim
from .rules.victims import Preemptor, Right
from .state import GPU, Workload

_BECAUSE: dict[Right, str] = {
    "reservation": "reclaim",
    "own_policy": "reclaim_own_policy",
    "own_team": "preempt_in_team",
    "fair_share": "reclaim_fair_share",
}


_GOES_ON = " It saves and goes on with "


def _goes_on(many: int, of: int) -> str:
    return f"{_GOES_ON}{many} of its {of} workers."


@dataclass(slots=True)
class Progress:
    """What a plan did so far, counted: rounds compare it to tell whether they changed anything."""

    decisions: int = 0
    """Starts, withdrawals, evictions, moves, nominations and refusals."""
    eased: int = 0
    """How often a victim, a move, a withdrawn start or a lost nomination gave up GPUs that others may use."""
    raised: int = 0
    """Starts that put their policy above its reservation, so that its work may be evicted."""


class PlanBuilder:
    """Collects decisions in the order in which they are made."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.started: dict[str, Start] = {}
        self.evicted: dict[str, Evict] = {}
        self.moved: dict[str, Move] = {}
        self.scaled: list[Scale] = []
        self.waiting: dict[str, Waiting] = {}
        self.refused: dict[str, Refusal] = {}
        self.nominated: dict[str, tuple[Workload, Queue]] = {}
        self.came_from: dict[str, Queue] = {}
        """Started in this plan, and the queue it came from."""
        self.returned: list[tuple[Queue, str]] = []
        """The queue and owner of each start that was withdrawn since the queues were last looked at."""
        self.groups: list[Alike] = []
        """What those are told who wait for the same reason."""
        self._instead: dict[str, Waiting] = {}
        self.progress = Progress()
        self.ahead: dict[str, list[str]] = {}
        """Pool to those that got its GPUs in this plan."""
        self.holds: dict[str, Hold] = {}
        """Pool to what is kept there for the one that waited too long."""

    def lift_holds(self) -> None:
        """Give back the GPUs that are held; the holds stay known."""
        for held in self.holds.values():
            held.lift()

    def drop_holds(self) -> None:
        """Give back the GPUs that are held, for good."""
        self.lift_holds()
        self.holds = {}

    def start(self, workload: Workload, allocation: Allocation, in_quota: bool) -> None:
        """Note a start."""
        pool = allocation.pool.pool.name
        account = self.cluster.account(workload)
        self.progress.raised += any(
            0 < ln.future - ln.quota.reserved <= allocation.amount for ln in account.reserving(pool)
        )
        reserved, used = quota_numbers(account, pool, workload.non_preemptible and in_quota)
        nodes = sorted({p.node.node.name for p in allocation.parts})
        where = f"Starts on {listed(nodes)}"
        team = account.policy.label
        uses = f"{team}'s sessions use" if workload.non_preemptible else f"{team} uses"
        if in_quota and used > reserved:  # its reservation was cut, or others use it, since it was promised this place
            message = (
                f"{where}, as it was promised: {uses} {gpus(used)}, more than the {number(reserved)} reserved now."
            )
        elif not allocation.amount:
            message = f"{where}: it requests no GPUs."
        elif in_quota:
            message = f"{where}: {uses} {number(used)} of its {gpus(reserved)} reserved."
        else:
            message = (
                f"{where} over quota: {team} uses {gpus(used)} and has {number(reserved)} reserved; "
                f"it makes way when an owner needs them."
            )
        rule = ("session_in_quota" if workload.non_preemptible else "job_in_quota") if in_quota else "over_quota"
        self.started[workload.id] = Start(
            workload.id,
            pool,
            placement_of(allocation.parts),
            in_quota,
            rule,
            message,
            {"gpus": number(allocation.amount), "team_uses": number(used), "reserved": number(reserved), "pool": pool},
        )
        self.ahead.setdefault(pool, []).append(workload.id)
        self.progress.decisions += 1

    def widen(self, allocation: Allocation) -> None:
        """Note that a gang starts with more workers than it needs."""
        start = self.started[allocation.workload.id]
        numbers = {**start.numbers, "gpus": number(allocation.amount), "workers": len(allocation.parts)}
        message = f"{start.message} It starts with {len(allocation.parts)} of {allocation.need.workers} workers."
        placement = placement_of(allocation.parts)
        self.started[start.id] = replace(start, placement=placement, message=message, numbers=numbers)

    def withdraw(self, workload: Workload) -> None:
        """Strike a start out: somebody with a better right turned out to need these GPUs."""
        start = self.started.pop(workload.id)
        self.ahead[start.pool].remove(workload.id)
        self.progress.decisions += 1
        self.progress.eased += 1

    def evict(self, asking: Preemptor, victims: Sequence[Victim]) -> None:
        """Record the victims of a workload, in this order; they were evicted in the cluster already."""
        cluster, later = self.cluster, {v.allocation.workload.policy: 0 for v in victims}
        frees = [v.allocation.amount - v.allocation.need.gpus * len(v.kept) for v in victims]
        for each, amount in zip(victims, frees, strict=True):
            later[each.allocation.workload.policy] += amount
        for each, amount in zip(victims, frees, strict=True):
            allocation = each.allocation
            victim, account = allocation.workload, cluster.account(allocation.workload)
            rule = self._rule(asking, account)
            pool = allocation.pool.pool.name
            reserved, used = quota_numbers(account, pool, False)
            used += later[victim.policy]
            later[victim.policy] -= amount
            deadline = cluster.now + cluster.grace(victim)
            why = self._why(asking, rule, used, reserved, allocation)
            numbers: dict[str, Number] = {
                "needs": number(asking.amount),
                "frees": number(amount),
                "victim_team": account.policy.name,
                "victim_uses": number(used),
                "victim_reserved": number(reserved),
                "for_team": asking.account.policy.name,
                "pool": pool,
            }
            if each.kind != SHRINK:
                self.evicted[victim.id] = Evict(victim.id, asking.workload.id, deadline, rule, why, numbers)
                continue
            source, to = placement_of(allocation.parts), placement_of(each.kept)
            why += _goes_on(len(to), len(source))
            numbers |= {"workers": len(source), "keeps": len(to)}
            self.moved[victim.id] = Move(victim.id, asking.workload.id, source, to, deadline, "shrink", why, numbers)
        self.progress.decisions += 1
        self.progress.eased += 1

    def _rule(self, asking: Preemptor, account: Account) -> str:
        """Return the code of the rule by which work of an account is evicted."""
        own_limit = asking.blocked is not None and asking.blocked.account in account.chain
        if own_limit and asking.right in ("reservation", "own_policy"):
            return "reclaim_own_limit"
        own = account is asking.account
        return "reclaim" if asking.right == "own_policy" and not own else _BECAUSE[asking.right]

    def _why(self, asking: Preemptor, rule: str, used: int, reserved: int, allocation: Allocation) -> str:
        preemptor, account = asking.account, self.cluster.account(allocation.workload)
        team, other = account.policy.label, preemptor.policy.label
        asks = f"{who(asking.workload, other)} needs {gpus(asking.amount)}"
        newest = self.cluster.settings.victim_order == "newest"
        order = f"lowest priority, most over its share, {'last started' if newest else 'least work lost'}"
        last = f"{allocation.workload.id} leaves first ({order})"
        if rule == "preempt_in_team" and allocation.workload.priority >= asking.workload.priority:
            long = seconds(self.cluster.settings.yields_after)
            return (
                f"{asks}; this {allocation.workload.kind} of the same team ran for more than {long} and yields to it."
            )
        if rule == "preempt_in_team":
            return f"{asks} and has a higher priority than this {allocation.workload.kind} of the same team."
        if not allocation.amount:
            return f"{asks} within its reservation, and the CPU or memory that this {allocation.workload.kind} holds."
        if rule == "reclaim_own_limit":
            return f"{asks} within the reservation, and {team} is at its limit; {last}."
        if rule == "reclaim_own_policy":
            return f"{asks} within the reservation and cannot be preempted; {team}'s own jobs make way for it; {last}."
        if account is preemptor:
            return f"{asks} within the reservation; {team}'s own jobs make way for it; {last}."
        beyond = f"{team} uses {gpus(used)}, {number(used - reserved)} more than its {number(reserved)} reserved"
        if rule == "reclaim_fair_share":
            return f"{asks} within its fair share; {beyond}; {last}."
        return f"{asks} within its reservation; {beyond}; {last}."

    def move(self, workload: Workload, moves: Sequence[Moving]) -> None:
        """Note who moves over for a workload."""
        team = self.cluster.account(workload).policy.label
        for moving in moves:
            victim = moving.allocation.workload
            source, to = placement_of(moving.allocation.parts), placement_of(moving.to)
            old, new = moving.changes
            nodes = tuple(listed(sorted({part.node.node.name for part in parts})) for parts in (old, new))
            verb = "moves" if len(old) == 1 else "move"
            whom = f"{len(old)} of its {count(len(to), 'worker')} {verb}" if len(old) < len(to) else "Moves"
            self.moved[victim.id] = Move(
                victim.id,
                workload.id,
                source,
                to,
                self.cluster.now + self.cluster.grace(victim),
                "consolidate",
                f"{whom} from {nodes[0]} to {nodes[1]}, so that {who(workload, team)} fits; nobody is stopped.",
                {"gpus": number(moving.allocation.amount), "from": nodes[0], "to": nodes[1]},
            )
        self.progress.decisions += 1
        self.progress.eased += 1

    def nominate(self, workload: Workload, queue: Queue, pool: PoolState) -> None:
        """Record that a workload starts at its nomination as soon as what terminates there has left."""
        self.nominated[workload.id] = workload, queue
        self.ahead.setdefault(pool.pool.name, []).append(workload.id)
        self.progress.decisions += 1

    def _write_nominations(self) -> None:
        """Write where the nominated workloads start, when, and for which workloads they wait."""
        victims: dict[str, list[Allocation]] = {}
        leaves: list[Evict | Move] = [*self.evicted.values(), *self.moved.values()]
        for each in leaves:
            victims.setdefault(each.beneficiary, []).append(self.cluster.allocations[each.id])
        for workload, _ in self.nominated.values():
            nomination = self.cluster.nominations.get(workload.id)
            if nomination is not None:
                self.waiting[workload.id] = self._reclaiming(workload, nomination, victims.get(workload.id, ()))

    def _reclaiming(self, workload: Workload, nomination: Allocation, victims: Sequence[Allocation]) -> Waiting:
        pool, parts = nomination.pool, nomination.parts
        ids, deadline = self._in_the_way(workload, parts, victims)
        names = [self._leaver(i) for i in ids]
        verb = "makes way" if len(ids) == 1 else "make way"
        amount = self.cluster.need(workload).total
        need, verbs = gpus(amount), "is" if 0 < amount <= GPU else "are"
        if ids:
            wait = seconds(max(0.0, deadline - self.cluster.now))
            message = f"Your {need} {verbs} being reclaimed, ready within {wait}: {listed(names)} {verb}."
        else:
            message = f"{need} {verbs} promised to {this(workload)} and about to be free."
        return Waiting(
            workload.id,
            "reclaiming",
            "promise",
            message,
            {"gpus": number(self.cluster.need(workload).total), "terminating": tuple(ids), "pool": pool.pool.name},
            deadline,
            placement_of(parts),
            tuple(ids),
        )

    def spare(self, workload: Workload) -> None:
        """Strike out that a workload is evicted or moves."""
        self.evicted.pop(workload.id, None)
        self.moved.pop(workload.id, None)
        self.progress.decisions += 1

    def keep_workers(self, allocation: Allocation, parts: tuple[Part, ...]) -> None:
        """Record that a gang that shrinks goes on with these parts."""
        move = self.moved[allocation.workload.id]
        message = f"{move.message.partition(_GOES_ON)[0]}{_goes_on(len(parts), len(move.source))}"
        frees = number(allocation.amount - allocation.need.gpus * len(parts))
        numbers = {**move.numbers, "keeps": len(parts), "frees": frees}
        self.moved[move.id] = replace(move, to=placement_of(parts), message=message, numbers=numbers)
        self.progress.decisions += 1

    def _in_the_way(
        self, workload: Workload, parts: Sequence[Part], victims: Sequence[Allocation]
    ) -> tuple[list[str], float]:
        """List those who have to leave first, and the time by which they are gone."""
        found = {t.workload.id: t for t in victims}
        for allocation in self.cluster.promised_by.get(workload.id, ()):
            found[allocation.workload.id] = allocation
        for part in parts:
            for allocation in part.node.allocations.values():
                if allocation.terminating and _touches(allocation, part):
                    found[allocation.workload.id] = allocation
        ends = [self._gone_by(allocation.workload) for allocation in found.values()]
        return sorted(found), max(ends, default=self.cluster.now)

    def _gone_by(self, victim: Workload) -> float:
        if victim.state == "checkpointing" and victim.deadline is not None:
            return victim.deadline
        return self.cluster.now + self.cluster.grace(victim)

    def _leaver(self, name: str) -> str:
        allocation = self.cluster.allocations[name]
        team = self.cluster.account(allocation.workload).policy.label
        return f"{who(allocation.workload, team)} ({gpus(allocation.amount)})"

    def wait(self, waiting: Waiting) -> None:
        """Note that a workload waits, and why."""
        self.waiting[waiting.id] = waiting

    def wait_instead(self, waiting: Waiting) -> None:
        """Tell one of a queue something better than the others."""
        self._instead[waiting.id] = waiting

    def _pending(self) -> Pending:
        groups = self.groups
        if self._instead:
            groups = [
                Alike(number, tuple(w for w in members if w.id not in self._instead), told)
                for number, members, told in groups
            ]
        return Pending(self.waiting | self._instead, groups)

    def plan(self) -> Plan:
        """Write the plan."""
        self._write_nominations()
        left = self.evicted.keys() | self.moved.keys()
        staying = self.cluster.staying
        return Plan(
            start=tuple(self.started.values()),
            evict=tuple(self.evicted.values()),
            move=tuple(self.moved.values()),
            scale=tuple(self.scaled),
            pending=self._pending(),
            refused=tuple(self.refused[i] for i in sorted(self.refused)),
            keep=tuple(i for i in staying if i not in left) if left else tuple(staying),
            terminating=tuple(self.cluster.terminating),
            usage=line_usage(self.cluster),
        )


def _touches(allocation: Allocation, part: Part) -> bool:
    for other in allocation.parts:
        if other.node is part.node and (not part.devices or set(other.devices) & set(part.devices)):
            return True
    return False


def quota_numbers(account: Account, pool: str, non_preemptible: bool) -> tuple[int, int]:
    """Give (reserved, used) of the line that decides in this pool: the tightest of those that reserve."""
    guarantor = account.guarantor(pool)
    if guarantor is None:
        return 0, account.in_pool.get(pool, 0)
    lines = guarantor.reserving(pool)
    line = min(
        lines,
        key=lambda ln: (ln.quota.reserved - (ln.non_preemptible if non_preemptible else ln.future), ln.quota.pools),
    )
    return line.quota.reserved, line.non_preemptible if non_preemptible else line.future


__all__ = ["PlanBuilder", "count", "quota_numbers"]
