"""One decision: a snapshot goes in, a plan comes out."""

from __future__ import annotations

from .plan import Plan
from .state import Snapshot


def schedule(snapshot: Snapshot) -> Plan:
    """Decide who starts, leaves, moves and waits. The same snapshot always gives the same plan."""
    return Plan(keep=tuple(sorted(w.id for w in snapshot.workloads)))
