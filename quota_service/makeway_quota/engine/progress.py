"""Count the decisions of a plan so far; the rounds of a cycle compare the counts (cycle/rounds.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Counts of a plan's decisions so far; a round that leaves them as they were changed nothing."""

    decisions: int = 0
    """Starts, withdrawals, evictions, moves, nominations and refusals."""
    releases: int = 0
    """Evictions, moves, withdrawn starts and lost nominations: each released GPUs that other workloads may use."""
    withdrawn_starts: int = 0
    """Starts of this plan that were withdrawn because another workload got their GPUs."""
    over_reservation: int = 0
    """Starts that put their team above its reservation, so that its workloads became candidates."""
