"""Replace the preemptor of each victim whose own preemptor does not start after all (invariant I4).

A workload that evicted others may start on GPUs that a spared victim leaves to it, and lose its start again to
in-team preemption, while a nomination has its victims' GPUs by then. Called once all decisions are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ..index.groups import age
from ..index.nodes import Allocation
from ..plan import Evict, Fact, Facts, Move, Number
from ..plan_builder import PlanBuilder, preemptor_values
from ..snapshot import from_milli

_OWN_TEAM = frozenset(
    {"reclaim_own_team", "reclaim_own_policy", "reclaim_own_limit", "preempt_in_team", "yield_in_team"}
)
"""Codes of evictions by a preemptor of the victim's own team"""

_Victim = TypeVar("_Victim", Evict, Move)


def replace_preemptors(builder: PlanBuilder) -> None:
    """Record the workload that got a victim's GPUs as its preemptor, where its own preemptor does not start."""
    if not builder.evicted and not builder.moved:
        return
    cluster = builder.cluster
    served = [cluster.nominations[name] for name in builder.nominated if name in cluster.nominations]
    served += [cluster.allocations[name] for name in builder.started]
    if served:
        _replace(builder, builder.evicted, served)
        _replace(builder, builder.moved, served)


def _replace(builder: PlanBuilder, victims: dict[str, _Victim], served: Sequence[Allocation]) -> None:
    """Replace the preemptors that are not among the served; an eviction takes the new one's rule, a move keeps its."""
    ids = {allocation.workload.id for allocation in served}
    for victim in [v for v in victims.values() if v.preemptor not in ids]:
        preemptor = _new_preemptor(builder.cluster.allocations[victim.id], served)
        facts, numbers = _facts(builder, victim, preemptor), _numbers(victim, preemptor)
        facts = tuple([f for f in facts if f.code != "shares_host" or f.values["pool"] == preemptor.pool.pool.name])
        rule = "reclaim" if isinstance(victim, Evict) and facts[0].code == "reclaim" else victim.rule
        name = preemptor.workload.id
        victims[victim.id] = replace(victim, preemptor=name, rule=rule, facts=facts, numbers=numbers)


def _new_preemptor(victim: Allocation, served: Sequence[Allocation]) -> Allocation:
    """Return what got a victim's GPUs: on its devices, else on its hosts, else in its pool; the oldest of these."""
    hosts = {node.node.name for part in victim.parts for node in part.node.host}

    def order(allocation: Allocation) -> tuple[object, ...]:
        shared = [(a, b) for a in victim.parts for b in allocation.parts if a.node is b.node]
        same = any(not set(a.devices).isdisjoint(b.devices) for a, b in shared)
        apart = hosts.isdisjoint([part.node.node.name for part in allocation.parts])
        return apart and allocation.pool not in victim.pools, not same, apart, *age(allocation.workload)

    return min(served, key=order)


def _facts(builder: PlanBuilder, victim: Evict | Move, preemptor: Allocation) -> Facts:
    first, *rest = victim.facts
    account = builder.cluster.account(preemptor.workload)
    values = {**first.values, **preemptor_values(preemptor.workload, account)}
    if "needs" in values:
        values["needs"] = from_milli(preemptor.need.total)
    code, own = first.code, values.get("victim_team") == account.team.name
    if code in _OWN_TEAM and not own:
        code = "reclaim"
    elif code == "reclaim" and own:
        code = "reclaim_own_team"
    return (Fact(code, values), *rest)


def _numbers(victim: Evict | Move, preemptor: Allocation) -> dict[str, Number]:
    changed: dict[str, Number] = {"needs": from_milli(preemptor.need.total), "for_team": preemptor.workload.team}
    return {**victim.numbers, **{key: value for key, value in changed.items() if key in victim.numbers}}
