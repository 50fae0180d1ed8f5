"""Count what a plan did so far: the rounds of a cycle compare the counts (rules/rounds.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """What a plan did so far, counted: rounds compare it to tell whether they changed anything."""

    decisions: int = 0
    """Starts, withdrawals, evictions, moves, nominations and refusals."""
    eased: int = 0
    """How often a victim, a move, a withdrawn start or a lost nomination gave up GPUs that others may use."""
    raised: int = 0
    """Starts that put their policy above its reservation, so that its work may be evicted."""
