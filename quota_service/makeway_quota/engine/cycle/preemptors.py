"""Replace the preemptor of each victim whose own preemptor does not start after all (invariant I4).

A workload that evicted others may start on GPUs that a spared victim leaves to it, and lose its start again to
in-team preemption, while a nomination has its victims' GPUs by then. Called once all decisions are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..index.nodes import Allocation
from ..plan import Evict, Fact, Facts, Move, Number
from ..plan_builder import PlanBuilder, preemptor_values
from ..snapshot import from_milli

_OWN_TEAM = frozenset({"reclaim_own_team", "reclaim_own_limit", "preempt_in_team", "yield_in_team"})
"""Codes of evictions by a preemptor of the victim's own team"""


def replace_preemptors(builder: PlanBuilder) -> None:
    """Record the workload that got a victim's GPUs as its preemptor, where its own preemptor does not start."""
    if not builder.evicted and not builder.moved:
        return
    cluster = builder.cluster
    heirs = [cluster.nominations[name] for name in builder.nominated if name in cluster.nominations]
    heirs += [cluster.allocations[name] for name in builder.started]
    if not heirs:
        return
    served = {heir.workload.id for heir in heirs}
    for evict in [each for each in builder.evicted.values() if each.preemptor not in served]:
        heir = _heir(cluster.allocations[evict.id], heirs)
        facts, numbers = _facts(builder, evict, heir), _numbers(evict, heir)
        rule = "reclaim" if facts[0].code == "reclaim" else evict.rule
        builder.evicted[evict.id] = replace(evict, preemptor=heir.workload.id, rule=rule, facts=facts, numbers=numbers)
    for move in [each for each in builder.moved.values() if each.preemptor not in served]:
        heir = _heir(cluster.allocations[move.id], heirs)
        facts, numbers = _facts(builder, move, heir), _numbers(move, heir)
        builder.moved[move.id] = replace(move, preemptor=heir.workload.id, facts=facts, numbers=numbers)


def _heir(victim: Allocation, heirs: Sequence[Allocation]) -> Allocation:
    """Return what got a victim's GPUs: on its devices, else on its nodes, else in its pool; the oldest of these."""

    def order(heir: Allocation) -> tuple[object, ...]:
        shared = [(a, b) for a in victim.parts for b in heir.parts if a.node is b.node]
        same = any(not set(a.devices).isdisjoint(b.devices) for a, b in shared)
        return heir.pool is not victim.pool, not same, not shared, heir.workload.submitted_at, heir.workload.id

    return min(heirs, key=order)


def _facts(builder: PlanBuilder, victim: Evict | Move, heir: Allocation) -> Facts:
    first, *rest = victim.facts
    account = builder.cluster.account(heir.workload)
    values = {**first.values, **preemptor_values(heir.workload, account)}
    if "needs" in values:
        values["needs"] = from_milli(heir.need.total)
    code, own = first.code, values.get("victim_team") == account.policy.name
    if code in _OWN_TEAM and not own:
        code = "reclaim"
    elif code == "reclaim" and own:
        code = "reclaim_own_team"
    return (Fact(code, values), *rest)


def _numbers(victim: Evict | Move, heir: Allocation) -> dict[str, Number]:
    changed: dict[str, Number] = {"needs": from_milli(heir.need.total), "for_team": heir.workload.policy}
    return {**victim.numbers, **{key: value for key, value in changed.items() if key in victim.numbers}}
