"""Lay out the curve of a metric as points of a small drawing, and describe it in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from .models.progress import ProgressCurve
from .quantities import count

WIDTH, HEIGHT, PAD = 160, 36, 3
"""Of the drawing, in pixels"""


def metric(value: float | None) -> str:
    """Return the value of a metric with at most four digits; None is not a finite number."""
    return "not a number" if value is None else f"{value:.4g}"


def polyline(curve: ProgressCurve) -> str:
    """Return the points of a curve within WIDTH and HEIGHT, as an SVG polyline has them; the newest is at the right."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in _placed(curve.points))


def newest(curve: ProgressCurve) -> tuple[float, float]:
    """Return where the newest point is."""
    return _placed(curve.points)[-1]


def sentence(curve: ProgressCurve) -> str:
    """Return what a curve shows, for those who do not see it."""
    (first, began), (last, now) = curve.points[0], curve.points[-1]
    values = [value for _, value in curve.points]
    return (
        f"{curve.name}: {metric(began)} at step {first:,}, {metric(now)} at step {last:,}, "
        f"between {metric(min(values))} and {metric(max(values))} at {count(len(values), 'point')}"
    )


def _placed(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    span, height = max(1, steps[-1] - steps[0]), high - low
    return [
        (
            PAD + (WIDTH - 2 * PAD) * (step - steps[0]) / span,
            HEIGHT - PAD - (HEIGHT - 2 * PAD) * ((value - low) / height if height > 0 else 0.5),
        )
        for step, value in points
    ]
