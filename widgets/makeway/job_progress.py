"""Show how far a job is: a bar, the rate, the time that remains, and the newest metric as a small curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from typing import Any

from makeway_api.durations import duration
from makeway_api.models import Job, State
from makeway_api.quantities import number
from markupsafe import Markup

from .blocks import Block, Drawing, line
from .words import clock, since

CURVE_WIDTH = 32
"""Characters of a curve"""
_LEVELS = "▁▂▃▄▅▆▇█"
_TEXT_WIDTH = 20
_SILENT = 60.0
"""Seconds without a report, beyond ten steps, after which the rate is no longer that of the present"""
_SHOWN_METRICS = 4
_BAR = Markup(
    '<div role="progressbar" aria-label="{label}" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}" '
    'style="height:8px;max-width:320px;margin:4px 0;border-radius:4px;background-color:rgba(128,128,128,.3)">'
    '<div style="height:8px;width:{percent}%;border-radius:4px;background-color:{colour}"></div></div>'
)
_CURVE = Markup(
    '<span role="img" aria-label="{label}" style="font-family:var(--jp-code-font-family,monospace);'
    'letter-spacing:0;white-space:nowrap;color:var(--jp-brand-color1,#1976d2)">{curve}</span>'
)


@dataclass(frozen=True, slots=True)
class Report:
    """What a job reported last. `rate` is in steps per second, `points` are pairs of step and value, oldest first."""

    step: int | None
    total: int | None = None
    rate: float | None = None
    remaining: float | None = None
    updated_at: datetime | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    curve: str = ""
    stage: str = ""
    points: Sequence[tuple[float, float]] = ()

    @property
    def percent(self) -> int | None:
        """Return how much is done, from 0 to 100 and 100 only at the end; None where the total is not known."""
        if self.step is None or not self.total or self.total <= 0:
            return None
        return min(max(self.step * 100 // self.total, 0), 100)

    @property
    def steps(self) -> str:
        """Return `step 420 of 1,000 (42 %)`; empty where no step was reported."""
        if self.step is None:
            return ""
        if self.percent is None:
            return f"step {number(self.step)}"
        return f"step {number(self.step)} of {number(self.total or 0)} ({self.percent} %)"


def progress_of(job: Job) -> Report | None:
    """Return what a job reported, or None: without a report, or from a service that does not know progress."""
    known = _fields(getattr(job, "progress", None))
    step = _finite(known.get("step"))
    total, curve = _finite(known.get("total")), _fields(known.get("curve"))
    metrics = {str(name): _finite(each) for name, each in _fields(known.get("metrics")).items()}
    if step is None and not metrics:
        return None
    pairs = ((_finite(x), _finite(y)) for x, y in curve.get("points") or ())
    at = known.get("updated_at")
    return Report(
        step=None if step is None else int(step),
        stage=str(known.get("stage") or ""),
        total=None if total is None else int(total),
        rate=_finite(known.get("rate")),
        remaining=_finite(known.get("remaining_seconds")),
        updated_at=datetime.fromisoformat(at) if isinstance(at, str) else at,
        metrics=metrics,
        curve=str(curve.get("name") or ""),
        points=[(x, y) for x, y in pairs if x is not None and y is not None],
    )


def progress_blocks(job: Job, known_at: datetime) -> list[Block]:
    """Return bar, numbers and curve of a job as they were at `known_at`; nothing without a report."""
    progress = progress_of(job)
    if progress is None:
        return []
    sentence = progress_sentence(job, progress, known_at)
    blocks: list[Block] = []
    if progress.percent is not None:
        colour = "var(--jp-error-color1,#d64545)" if job.state is State.FAILED else "var(--jp-brand-color1,#1976d2)"
        filled = progress.percent * _TEXT_WIDTH // 100
        text = "█" * filled + "░" * (_TEXT_WIDTH - filled)
        blocks.append(Drawing(_BAR.format(label=progress.steps, percent=progress.percent, colour=colour), text))
    if sentence:
        blocks.append(line(sentence))
    drawn = sparkline(progress.points)
    shown = dict(list(progress.metrics.items())[:_SHOWN_METRICS])
    if drawn and progress.curve not in shown:
        shown = {progress.curve: progress.points[-1][1], **shown}
    values = [f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in shown.items()]
    if drawn:
        first, last = progress.points[0][1], progress.points[-1][1]
        label = f"{progress.curve} from {first:.4g} to {last:.4g}"
        blocks.append(line(", ".join(values), Drawing(_CURVE.format(label=label, curve=drawn), drawn)))
    elif values:
        blocks.append(line(", ".join(values)))
    return blocks


def progress_sentence(job: Job, progress: Report, known_at: datetime) -> str:
    """Return step, rate and the time that remains; for a job that does not run, or is silent, the step alone."""
    text = f"{progress.stage}: {progress.steps}" if progress.stage and progress.steps else progress.steps
    text = text[:1].upper() + text[1:]
    if not progress.steps:
        return progress.stage
    if job.state is not State.RUNNING:
        return text
    rate = progress.rate if progress.rate and progress.rate > 0 else None
    silent = since(progress.updated_at, known_at) if progress.updated_at else 0.0
    if silent > _SILENT + (10 / rate if rate else 0):
        return f"{text}, reported last at {clock(progress.updated_at or known_at)}"
    if rate:
        text += f", {rate:.3g} steps/s" if rate >= 1 else f", a step in {duration(1 / rate)}"
    if progress.remaining is not None and progress.remaining >= 0:
        text += f", {duration(progress.remaining)} remaining"
    return text


def progress_cell(job: Job) -> str:
    """Return how far a job is in a few characters, for a table: `42 %, 5 min remaining`; empty without a report."""
    progress = progress_of(job)
    if progress is None:
        return ""
    text = progress.steps if progress.percent is None else f"{progress.percent} %"
    running = job.state is State.RUNNING and progress.remaining is not None and progress.remaining >= 0
    return f"{text}, {duration(progress.remaining or 0)} remaining" if running else text


def sparkline(points: Sequence[tuple[float, float]], width: int = CURVE_WIDTH) -> str:
    """Return values over steps as a row of at most `width` blocks; empty for less than two points."""
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    groups: list[list[float]] = [[] for _ in range(min(width, len(points)))]
    for n, (step, value) in enumerate(points):
        place = (step - first) / (last - first) if last > first else n / (len(points) - 1)
        groups[min(max(int(place * len(groups)), 0), len(groups) - 1)].append(value)
    values = [sum(group) / len(group) for group in groups if group]
    low, high = min(values), max(values)
    if not high > low:
        return _LEVELS[3] * len(values)
    return "".join(_LEVELS[round((value - low) / (high - low) * (len(_LEVELS) - 1))] for value in values)


def _fields(value: Any) -> Mapping[str, Any]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    return dict(value)  # a model of the API yields its fields


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) else None
