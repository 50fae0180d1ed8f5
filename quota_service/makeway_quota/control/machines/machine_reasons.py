"""Replace the engine's reason of pending work that machines are for: which machine is coming for it, or why none is.

The engine knows that a new machine would help a workload, the steps of the deployments know what became of that. A
reason is what the newest step decided for that very workload; between a cycle and the step that follows, it says that
this is being decided.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ...autoscale.budget import MICROS_PER_UNIT
from ...autoscale.prospects import Cause, MachinesStarting, NoLaunch, Prospect
from ...engine.index.pending import Pending, PendingGroup, PendingReason
from ...engine.plan import Code, Fact, Facts, Number, Numbers, Plan, Waiting
from ...engine.snapshot import Workload

Deployments = Sequence[tuple[Collection[str], Mapping[str, Prospect]]]
"""For each deployment the pools of its machines, and what pending workloads can expect of it"""

COMES: Code = "waiting_for_node"
NONE_COMES: Code = "no_machine"
RULE = "scale_up"
OWN_END = frozenset({"patience", "protected"})
"""Reasons that end by themselves, as others make way then; a machine that is ready before that comes first"""
SAYS_NOTHING = frozenset({"too_large", "too_large_together", "node_failed"})
"""Reasons that the nodes of today give, where a machine would have room"""
ROUGH = 120.0
"""Seconds below which an estimate is in tens of seconds, above in minutes"""
NEW_GROUP = 1 << 40
"""Above the numbers of the engine's groups"""


class MachineReasons:
    """The reasons of one plan after the other."""

    def __init__(self) -> None:
        self._members: dict[int, tuple[Workload, ...]] = {}
        """The members of each group of the last plan: one that is the same as before is known by its object"""

    def refined(self, plan: Plan, deployments: Deployments | None) -> Plan:
        """Return a plan with the reasons of the work in its demand. Linear in that; nominated work keeps its own.

        `deployments` None: they are not known yet.
        """
        pending = plan.pending
        if not plan.demand or not isinstance(pending, Pending):
            return plan
        pools = {one.id: one.pools for one in plan.demand}
        expected, single = _Expected(deployments), dict(pending.single)
        for id in [id for id, waiting in single.items() if id in pools and not waiting.nomination]:
            single[id] = _with(single[id], expected.reason(id, pools[id]))
        groups: list[PendingGroup] = []
        members: dict[int, tuple[Workload, ...]] = {}
        for group in pending.groups:
            for one in _divided(group, pools, expected, single):
                known = self._members.get(one.number)
                members[one.number] = known if known == one.members else one.members
                groups.append(one._replace(members=members[one.number]))
        self._members = members
        return replace(plan, pending=Pending(single, groups))


class _Expected:
    """Finds the reasons of workloads, one object for each prospect."""

    def __init__(self, deployments: Deployments | None) -> None:
        self._unread = deployments is None
        self._deployments = deployments or ()
        self.only: Mapping[str, Prospect] = self._deployments[0][1] if len(self._deployments) == 1 else {}
        """the prospects, where there is a single deployment"""
        self._reasons: dict[int, PendingReason] = {}
        self._undecided: dict[tuple[str, ...], PendingReason] = {}

    def reason(self, id: str, pools: tuple[str, ...]) -> PendingReason:
        """Return the reason of one workload, which may run in these pools."""
        best: Prospect | None = None
        for _, prospects in self._deployments:
            prospect = prospects.get(id)
            if isinstance(prospect, MachinesStarting):
                return _starting(prospect)
            best = best or prospect
        return self._no_launch(best) if isinstance(best, NoLaunch) else self._without(pools)

    def _no_launch(self, prospect: NoLaunch) -> PendingReason:
        key = builtins.id(prospect)
        if key not in self._reasons:
            self._reasons[key] = _no_launch(prospect)
        return self._reasons[key]

    def _without(self, pools: tuple[str, ...]) -> PendingReason:
        """Return the reason of work that no step has decided about, or that no deployment is for."""
        if pools not in self._undecided:
            values: dict[str, Number] = {"pool": pools[0]}
            served = self._unread or any(name in known for known, _ in self._deployments for name in pools)
            facts = (Fact("machine_undecided" if served else "no_deployment", values),)
            self._undecided[pools] = PendingReason(COMES if served else NONE_COMES, RULE, facts, values)
        return self._undecided[pools]


def _divided(
    group: PendingGroup, pools: Mapping[str, tuple[str, ...]], expected: _Expected, single: dict[str, Waiting]
) -> list[PendingGroup]:
    """Return a group as one for each reason; work that a machine is coming for gets a reason of its own."""
    number, members, engine = group
    others: list[Workload] = []
    divided: dict[int, tuple[PendingReason, list[Workload]]] = {}
    last: Prospect | None = None
    alike = others
    for workload in members:  # thousands in a cycle, most of them with the prospect of the one before
        prospect = expected.only.get(workload.id)
        asked = pools.get(workload.id)
        if asked is None:
            others.append(workload)
        elif prospect is not None and prospect is last:
            alike.append(workload)
        else:
            reason = expected.reason(workload.id, asked)
            if "machines" in reason.numbers:
                single[workload.id] = _sooner(engine.to(workload), reason, workload)
            else:
                last, alike = prospect, divided.setdefault(id(reason), (reason, []))[1]
                alike.append(workload)
    if len(others) == len(members):
        return [group]
    result = [PendingGroup(number, tuple(others), engine)] if others else []
    for at, (reason, waiting) in enumerate(divided.values(), 1):
        result.append(PendingGroup(number + at * NEW_GROUP, tuple(waiting), _together(engine, reason)))
    return result


def _together(engine: PendingReason, reason: PendingReason) -> PendingReason:
    """Return the reason of a group where no machine is coming: what its pools lack now, and why no machine adds it."""
    if reason.code == COMES:
        return reason
    if engine.code in OWN_END:
        return replace(engine, more=(*engine.more, *reason.facts))
    return replace(reason, facts=(*kept(engine.facts), *reason.facts), more=engine.more)


def _sooner(waiting: Waiting, coming: PendingReason, workload: Workload) -> Waiting:
    """Return what comes first for a workload by the order of rights: its machine, or that others make way for it."""
    end = waiting.not_before if waiting.code in OWN_END else None
    if end is None:
        return coming.to(workload)
    return _first(waiting, end, coming)


def _first(waiting: Waiting, end: float, coming: PendingReason) -> Waiting:
    """Return what comes first for a workload for which others make way at `end`, or would."""
    [fact], values = coming.facts, coming.numbers
    if is_in_time(coming.not_before, end, values):
        at, facts = coming.not_before, (fact, Fact("machine_in_time"))
        return replace(waiting, code=coming.code, rule=coming.rule, facts=facts, numbers=values, not_before=at)
    if coming.not_before is not None:
        fact = Fact(fact.code, {**fact.values, "after": about(coming.not_before - end)})
    return replace(waiting, facts=(*waiting.facts, fact), numbers={**waiting.numbers, **values})


def is_in_time(ready_at: float | None, end: float, values: Numbers) -> bool:
    """Whether machines are ready before others make way for the work, at `end`; not where that is not known."""
    if ready_at is not None:
        return ready_at <= end
    return bool(values.get("ready")) and values["ready"] == values["machines"]


def about(seconds: float) -> int:
    """Return an estimate as people give it: in tens of seconds, or in minutes, rounded up."""
    step = 10 if seconds < ROUGH else 60
    return max(step, math.ceil(seconds / step) * step)


def _with(waiting: Waiting, reason: PendingReason) -> Waiting:
    """Return the reason of one workload, as `_together` does."""
    if reason.code != COMES and waiting.code in OWN_END:
        return replace(waiting, facts=(*waiting.facts, *reason.facts))
    if waiting.code in OWN_END and waiting.not_before is not None and "machines" in reason.numbers:
        return _first(waiting, waiting.not_before, reason)
    facts = reason.facts if reason.code == COMES else (*kept(waiting.facts), *reason.facts)
    return Waiting(waiting.id, reason.code, reason.rule, facts, reason.numbers, reason.not_before)


def kept(facts: Facts) -> Facts:
    """Return what is worth knowing of the nodes of today: nothing where there are none."""
    none = any(
        fact.code in SAYS_NOTHING or (fact.code == "no_free_gpus" and not fact.values["total"]) for fact in facts
    )
    return () if none else facts


def _starting(one: MachinesStarting) -> PendingReason:
    values: dict[str, Number] = {
        "deployment": one.count.deployment,
        "machines": one.machines,
        "booting": one.booting,
        "ready": one.ready,
        "all_machines": one.count.machines,
        "limit": one.count.limit,
        "late": one.overdue,
    }
    if one.price is not None:
        values |= {"price": one.price / MICROS_PER_UNIT, "currency": one.currency}
    return PendingReason(COMES, RULE, (Fact("machine_coming", values),), values, one.ready_at)


def _no_launch(one: NoLaunch) -> PendingReason:
    counts: dict[str, Number] = {
        "deployment": one.count.deployment,
        "all_machines": one.count.machines,
        "limit": one.count.limit,
    }
    facts = launch_facts(one.causes, counts)
    causes = tuple(dict.fromkeys(cause.code for cause in one.causes))
    return PendingReason(NONE_COMES, RULE, facts, counts | {"causes": causes}, one.retry_at)


def launch_facts(causes: Iterable[Cause], counts: Numbers, *, offered: bool = False) -> Facts:
    """Return why no machine is launched as facts, with amounts in units of the currency.

    The first one has the first cause, or the counts of machines where there is none; else these come last. `offered`:
    it speaks of what would be done.
    """
    facts: list[Fact] = []
    code = "no_machine_offered" if offered else "no_machine"
    for cause in causes:
        money = {"used", "price", "limit"} if "used" in cause.values else {"price"}
        amounts: dict[str, Number] = {
            name: value / MICROS_PER_UNIT if name in money else value
            for name, value in cause.values.items()
            if not isinstance(value, str)
        }
        texts = {name: value for name, value in cause.values.items() if isinstance(value, str)}
        facts.append(Fact(code, {"cause": cause.code, **texts, **amounts}))
        code = "no_launch"
    if facts:
        code = "machine_count"
    return (*facts, Fact(code, counts))
