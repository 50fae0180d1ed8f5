"""Report simulations side by side: as text, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import mean
from typing import Any

from makeway_api.quantities import count
from makeway_api.tables import Column, text_table

from ..autoscale.budget import MICROS_PER_UNIT
from ..engine.snapshot import GPU
from .machines import MachineUse
from .meter import HOUR
from .replay import Outcome

WHOLE_NODE = 8 * GPU
"""From so many milli-GPUs on, a job needs a whole node or more."""


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value that `part` of all values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, ceil(fraction * len(ordered)) - 1)] if ordered else 0.0


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return one simulation as plain values: hours, GPUs, GPU-hours, percent."""
    meter = outcome.meter
    delays = [job.delay / HOUR for job in meter.finished]
    large = [job.delay / HOUR for job in meter.finished if job.gpus >= WHOLE_NODE]
    waits = [job.started - job.submit for job in meter.finished]
    capacity = outcome.capacity
    hours = (outcome.ended - outcome.began) / HOUR
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
        "delay_big_mean_h": round(mean(large), 4) if large else 0.0,
        "wait_mean_s": round(mean(waits), 1) if waits else 0.0,
        "wait_p95_s": round(percentile(waits, 0.95), 1),
        "still_waiting": outcome.still_waiting,
        "machine_hours": round(sum(use.seconds for use in outcome.machines) / HOUR, 2),
        "spend": _spend(outcome.machines),
        "machines": [_use(use) for use in outcome.machines],
        "moves": meter.moves,
        "moves_per_hour": round(meter.moves / hours, 4) if hours else 0.0,
        "unserved_guarantee_gpu_h": round(meter.unserved_gpu_hours, 2),
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


def _spend(uses: Sequence[MachineUse]) -> dict[str, float | None]:
    """Return the cost of all machines by currency; None where the price of one is not known."""
    result: dict[str, float | None] = {}
    for currency in sorted({use.currency for use in uses}):
        costs = [use.cost for use in uses if use.currency == currency and use.machines]
        known = [cost for cost in costs if cost is not None]
        result[currency] = round(sum(known) / MICROS_PER_UNIT, 2) if len(known) == len(costs) else None
    return result


def _use(use: MachineUse) -> dict[str, Any]:
    return {
        "deployment": use.deployment,
        "type": use.type,
        "machines": use.machines,
        "at_once": use.peak_machines,
        "hours": round(use.seconds / HOUR, 2),
        "cost": None if use.cost is None else round(use.cost / MICROS_PER_UNIT, 2),
        "currency": use.currency,
    }


def _team(outcome: Outcome, name: str) -> dict[str, Any]:
    team = outcome.meter.teams[name]
    delays = [job.delay / HOUR for job in outcome.meter.finished if job.team == name]
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
MACHINE_COLUMNS: tuple[Column[Numbers, object], ...] = (
    _column("deployment", "deployment", right=False),
    _column("type", "type", right=False),
    _column("machines", "machines"),
    _column("at_once", "at once"),
    _column("hours", "hours"),
    Column("cost", lambda item: money(item["cost"], item["currency"])),
)
"""Of the machine types in one simulation"""


def money(amount: float | None, currency: str) -> str:
    """Return an amount of money for people."""
    return "price not known" if amount is None else f"{amount:,.2f} {currency}"


def machines_sentence(numbers: Numbers) -> str:
    """Return what all machines of a simulation cost, and how long its jobs waited."""
    spend = " and ".join(money(amount, currency) for currency, amount in numbers["spend"].items())
    waits = f"jobs waited {_seconds(numbers['wait_mean_s'])} on average, 95 % of them {_seconds(numbers['wait_p95_s'])}"
    left = f"; {numbers['still_waiting']:,} still waited at the end" if numbers["still_waiting"] else ""
    return f"In all {numbers['machine_hours']:,.2f} machine-hours, {spend}; {waits} at most{left}.{_moves(numbers)}"


def _moves(numbers: Numbers) -> str:
    """Return how often jobs were moved; "" where none was."""
    if not numbers["moves"]:
        return ""
    moved = count(numbers["moves"], "job was", "jobs were")
    return f" To give machines back, {moved} moved ({numbers['moves_per_hour']:.2g} an hour)."


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 or value == int(value) else f"{value:.1f} s"


def comparison_tables(numbers: Sequence[Numbers]) -> str:
    """Write the comparison, and the teams of each simulation, as tables for a terminal."""
    teams = (f"{one['name']}\n{text_table(TEAM_COLUMNS, one['teams'], _cell)}" for one in numbers)
    machines = (
        f"{one['name']}\n{text_table(MACHINE_COLUMNS, one['machines'], _cell)}\n{machines_sentence(one)}"
        for one in numbers
        if one["machines"]
    )
    return "\n\n".join([text_table(COLUMNS, numbers, _cell), *teams, *machines])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
    return str(value)
