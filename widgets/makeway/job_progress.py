"""Show how far a job is: a bar, the rate, the time that remains, and the newest metric as a small curve."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from makeway_api.durations import duration
from makeway_api.models import Job, JobProgress, State
from makeway_api.models.progress import ProgressCurve
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


def progress_blocks(job: Job, known_at: datetime) -> list[Block]:
    """Return bar, numbers and curve of a job as they were at `known_at`; nothing without a report."""
    progress = job.progress
    if progress is None:
        return []
    curve = progress.curve or ProgressCurve()
    sentence = progress_sentence(job, progress, known_at)
    blocks: list[Block] = []
    if progress.percent is not None:
        colour = "var(--jp-error-color1,#d64545)" if job.state is State.FAILED else "var(--jp-brand-color1,#1976d2)"
        filled = progress.percent * _TEXT_WIDTH // 100
        text = "█" * filled + "░" * (_TEXT_WIDTH - filled)
        blocks.append(Drawing(_BAR.format(label=progress.steps, percent=progress.percent, colour=colour), text))
    if sentence:
        blocks.append(line(sentence))
    drawn = sparkline(curve.points)
    shown = dict(list(progress.metrics.items())[:_SHOWN_METRICS])
    if drawn and curve.name not in shown:
        shown = {curve.name: curve.points[-1][1], **shown}
    values = [f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in shown.items()]
    if drawn:
        first, last = curve.points[0][1], curve.points[-1][1]
        label = f"{curve.name} from {first:.4g} to {last:.4g}"
        blocks.append(line(", ".join(values), Drawing(_CURVE.format(label=label, curve=drawn), drawn)))
    elif values:
        blocks.append(line(", ".join(values)))
    return blocks


def progress_sentence(job: Job, progress: JobProgress, known_at: datetime) -> str:
    """Return step, rate and the time that remains; for a job that does not run, or is silent, the step alone."""
    if not progress.steps:
        return progress.stage
    text = progress.steps[0].upper() + progress.steps[1:]
    if progress.percent is not None:
        text += f", {progress.percent} %"
    if job.state is not State.RUNNING:
        return text
    rate = progress.rate if progress.rate and progress.rate > 0 else None
    if since(progress.updated_at, known_at) > _SILENT + (10 / rate if rate else 0):
        return f"{text}, reported last at {clock(progress.updated_at)}"
    if rate:
        text += f", {rate:.3g} steps/s" if rate >= 1 else f", a step in {duration(1 / rate)}"
    if progress.remaining_seconds is not None:
        text += f", {duration(progress.remaining_seconds)} remaining"
    return text


def progress_cell(job: Job) -> str:
    """Return how far a job is in a few characters, for a table: `42 %, 5 min remaining`; empty without a report."""
    progress = job.progress
    if progress is None:
        return ""
    text = progress.steps if progress.percent is None else f"{progress.percent} %"
    running = job.state is State.RUNNING and progress.remaining_seconds is not None
    return f"{text}, {duration(progress.remaining_seconds or 0)} remaining" if running else text


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
