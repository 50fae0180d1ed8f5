"""Report simulations side by side: as text, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import mean
from typing import Any

from makeway_api.tables import Column, text_table

from ..engine.snapshot import GPU
from .meter import HOUR
from .replay import Outcome

WHOLE_NODE = 8 * GPU
"""From so many milli-GPUs on, a job needs a whole node or more."""


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that `part` of all values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, ceil(part * len(ordered)) - 1)] if ordered else 0.0


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return one simulation as plain values: hours, GPUs, GPU-hours, percent."""
    meter = outcome.meter
    delays = [done.delay / HOUR for done in meter.finished]
    big = [done.delay / HOUR for done in meter.finished if done.gpus >= WHOLE_NODE]
    capacity = outcome.gpus / GPU * (outcome.ended - outcome.began)
    used = [moment.used / GPU for moment in meter.moments]
    return {
        "name": outcome.name,
        "gpus": outcome.gpus / GPU,
        "jobs": len(delays),
        "days": round((outcome.ended - outcome.began) / 86_400, 2),
        "utilisation_percent": round(100 * outcome.work / capacity, 2) if capacity else 0.0,
        "mean_gpus_in_use": round(mean(used), 2) if used else 0.0,
        "delay_mean_h": round(mean(delays), 4) if delays else 0.0,
        "delay_p95_h": round(percentile(delays, 0.95), 4),
        "delay_max_h": round(max(delays, default=0.0), 4),
        "delay_big_mean_h": round(mean(big), 4) if big else 0.0,
        "unserved_guarantee_gpu_h": round(meter.unserved, 2),
        "preemptions": sum(meter.preemptions.values()),
        "waste_percent": round(100 * meter.lost / GPU / outcome.work, 4) if outcome.work else 0.0,
        "teams": [_team(outcome, name) for name in meter.teams],
        "borrowed_gpu_h": [
            {"borrower": a, "lender": b or None, "gpu_h": round(amount / GPU / HOUR, 2)}
            for (a, b), amount in sorted(meter.loans.items())
        ],
        "made_way": [
            {"team": a, "for": b, "times": times} for (a, b), times in sorted(meter.preemptions.items())
        ],
    }  # fmt: skip


def _team(outcome: Outcome, name: str) -> dict[str, Any]:
    team = outcome.meter.teams[name]
    delays = [done.delay / HOUR for done in outcome.meter.finished if done.team == name]
    return {
        "team": name,
        "reserved": team.reserved / GPU,
        "jobs": len(delays),
        "delay_mean_h": round(mean(delays), 4) if delays else 0.0,
        "delay_p95_h": round(percentile(delays, 0.95), 4),
        "unserved_guarantee_gpu_h": round(team.unserved / GPU / HOUR, 2),
        "preempted": team.preempted,
    }


Numbers = dict[str, Any]


def _column(key: str, name: str, *, right: bool = True) -> Column[Numbers, object]:
    return Column(name, lambda item: item[key], right=right)


COLUMNS = (
    _column("name", "what", right=False),
    _column("gpus", "GPUs"),
    _column("jobs", "jobs"),
    _column("utilisation_percent", "use %"),
    _column("delay_mean_h", "mean delay h"),
    _column("delay_p95_h", "p95 h"),
    _column("delay_big_mean_h", ">=8 GPUs h"),
    _column("unserved_guarantee_gpu_h", "unserved GPU-h"),
    _column("preemptions", "preempted"),
    _column("waste_percent", "waste %"),
)
"""Of the comparison of simulations"""
TEAM_COLUMNS = (
    _column("team", "team", right=False),
    _column("reserved", "reserved"),
    _column("jobs", "jobs"),
    _column("delay_mean_h", "mean delay h"),
    _column("delay_p95_h", "p95 h"),
    _column("unserved_guarantee_gpu_h", "unserved GPU-h"),
    _column("preempted", "preempted"),
)
"""Of the teams in one simulation"""


def text(numbers: Sequence[Numbers]) -> str:
    """Write the comparison, and the teams of each simulation, as tables for a terminal."""
    teams = (f"{one['name']}\n{text_table(TEAM_COLUMNS, one['teams'], _cell)}" for one in numbers)
    return "\n\n".join([text_table(COLUMNS, numbers, _cell), *teams])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
    return str(value)
