"""What you can have now, from whom, and why not."""

from __future__ import annotations

from .plan import Offer, TeamUsage
from .state import Kind, Snapshot


def offer(
    snapshot: Snapshot, policy: str, profile: str, kind: Kind = "session", owner: str = "", preemptible: bool = False
) -> Offer:
    """Answer what a request would get right now, by asking the engine about it."""
    return Offer(policy, profile, "wait", "no_free_gpus", f"{snapshot.now}{kind}{owner}{preemptible}")


def usage_by_team(snapshot: Snapshot) -> tuple[TeamUsage, ...]:
    """Count reserved, used, borrowed, lent and free GPUs of every policy, in the snapshot's order of names."""
    return tuple(TeamUsage(p.name, 0, None, 0, 0, 0, 0, 0, 0) for p in snapshot.policies)
