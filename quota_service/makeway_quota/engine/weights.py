"""Weigh over-quota use and its history (rule 3)."""

from __future__ import annotations

from .snapshot import WEIGHTS, Weight

_SCALE = 6
"""Divisible by every weight, so that shares are exact integers."""
LAST = 1 << 60


def over_per_weight(amount: int, weight: Weight) -> int:
    """Return over-quota use divided by a weight. A team without a weight ranks after all others."""
    number = WEIGHTS[weight]
    return amount * (_SCALE // number) if number else LAST + amount


def decayed(amount: float, seconds: float, half_life: float) -> float:
    """Return the present weight of past use: it halves every `half_life` seconds; 0 switches history off."""
    return amount * 0.5 ** (seconds / half_life) if half_life > 0 else 0.0
