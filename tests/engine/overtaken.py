"""Recognize the two cases in which planning again acts (invariant I7).

Shared by both checkers. A nominated workload starts though another one has a better right to its GPUs by now: no plan
withdraws a nomination that it can keep (rule 5.8), so the next one evicts it. And a start over quota that puts its
policy above its reservation makes candidates of the policy's other work. Where only start and other work together make
room for a workload in quota, the next plan evicts them: the start cannot wait instead, or its GPUs would idle for as
long as the other work runs (invariant I6).
"""

from __future__ import annotations

from makeway_quota.engine import Plan, Snapshot


def starts_evicted_with_others(before: Snapshot, plan: Plan, again: Plan) -> set[str]:
    """Return the starts of a plan that the next one may evict or shrink: nominated ones, and with other work."""
    nominated = {w.id for w in before.workloads if w.nomination}
    found = {start.id for start in plan.start if start.id in nominated}
    starts = {start.id for start in plan.start if not start.in_quota}
    for victims in _victims(again).values():
        if not victims <= starts:
            found |= victims & starts
    return found


def only_for_such_starts(before: Snapshot, plan: Plan, again: Plan) -> bool:
    """Whether all that the next plan does is to evict such starts, and what leaves with them."""
    starts = starts_evicted_with_others(before, plan, again)
    return not again.start and all(victims & starts for victims in _victims(again).values())


def _victims(plan: Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in (*plan.evict, *(move for move in plan.move if move.rule == "shrink")):
        found.setdefault(each.preemptor, set()).add(each.id)
    for move in plan.move:
        if move.rule != "shrink":
            found.setdefault(move.preemptor, set())
    return found
