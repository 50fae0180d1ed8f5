"""Compare the decisions of the fast engine and the reference engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from makeway_quota.engine import Plan, Snapshot, reference, schedule

Engine = Callable[[Snapshot], Plan]
ENGINES: Mapping[str, Engine] = {"fast": schedule, "reference": reference.schedule}


def decided(plan: Plan) -> dict[str, dict[str, object]]:
    """Return what a plan decides, by kind and id: everything but messages, numbers, forecasts and `waits_for`."""
    return {
        "start": {s.id: (s.pool, s.placement, s.in_quota, s.rule) for s in plan.start},
        "evict": {e.id: (e.preemptor, e.deadline) for e in plan.evict},
        "move": {m.id: (m.preemptor, m.source, m.to, m.rule, m.deadline) for m in plan.move},
        "pending": {w.id: (w.code, w.rule, w.nomination, w.awaits) for w in plan.pending},
        "refused": {r.id: r.code for r in plan.refused},
        "scale": {s.pool: (s.nodes, s.workloads) for s in plan.scale},
        "demand": dict(enumerate(plan.demand)),
        "keep": dict.fromkeys(plan.keep),
        "terminating": dict.fromkeys(plan.terminating),
        "usage": {str((u.team, u.pools)): u for u in plan.usage},
    }


def differences(fast: Plan, slow: Plan) -> dict[str, tuple[object, object]]:
    """Return where two plans differ: kind and id to what each decides."""
    one, other = decided(fast), decided(slow)
    return {
        f"{kind} {name}": (one[kind].get(name), other[kind].get(name))
        for kind in one
        for name in sorted(one[kind].keys() | other[kind].keys())
        if name not in one[kind] or name not in other[kind] or one[kind][name] != other[kind][name]
    }
