"""Recognize the one case in which planning again acts (invariant I7).

Shared by both checkers. A start over quota that puts its policy above its reservation makes candidates of the policy's
other work. Where only start and other work together make room for a workload in quota, the next plan evicts them:
the start cannot wait instead, or its GPUs would idle for as long as the other work runs (invariant I6).
"""

from __future__ import annotations

from makeway_quota.engine import Plan


def starts_evicted_with_others(plan: Plan, again: Plan) -> set[str]:
    """Return the starts over quota of a plan that the next one evicts or shrinks, other work with them."""
    starts = {start.id for start in plan.start if not start.in_quota}
    found: set[str] = set()
    for victims in _victims(again).values():
        if not victims <= starts:
            found |= victims & starts
    return found


def only_for_such_starts(plan: Plan, again: Plan) -> bool:
    """Whether all that the next plan does is to evict such starts, and what leaves with them."""
    starts = starts_evicted_with_others(plan, again)
    return not again.start and all(victims & starts for victims in _victims(again).values())


def _victims(plan: Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in (*plan.evict, *(move for move in plan.move if move.rule == "shrink")):
        found.setdefault(each.preemptor, set()).add(each.id)
    for move in plan.move:
        if move.rule != "shrink":
            found.setdefault(move.preemptor, set())
    return found
