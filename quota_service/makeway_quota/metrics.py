"""Numbers for Prometheus: what runs, what waits, what was decided and how long deciding took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from makeway_api.models import Usage
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Counted

from .autoscale.backoff import FailureClass, LaunchBackoff
from .autoscale.budget import MICROS_PER_UNIT, Money
from .autoscale.deployment import Deployment
from .autoscale.machine import Machine
from .store.records import NewDecision

REGISTRY = CollectorRegistry()

CYCLE_SECONDS = Histogram(
    "makeway_cycle_seconds",
    "Time of one cycle of the loop: observe, reconcile, plan, apply, actuate.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    registry=REGISTRY,
)
DECISIONS = Counted(
    "makeway_decisions_total",
    "Decisions by verb and team (start, evict, requeue …).",
    ["verb", "team"],
    registry=REGISTRY,
)
GPUS = Gauge("makeway_gpus", "GPUs by what they do: total, used, free.", ["state"], registry=REGISTRY)
TEAM_GPUS = Gauge(
    "makeway_team_gpus",
    "GPUs of a team: reserved, limit, guaranteed, in_quota, borrowed, lent, free.",
    ["team", "state"],
    registry=REGISTRY,
)
LEADER = Gauge("makeway_leader", "1 on the replica that decides and acts, 0 on those that follow.", registry=REGISTRY)
PARTS = Gauge(
    "makeway_part_works",
    "1 while a part of the replica works, 0 while it fails: backend, database, files, loop.",
    ["part"],
    registry=REGISTRY,
)
WORKLOADS = Gauge("makeway_workloads", "Live workloads by kind and state.", ["kind", "state"], registry=REGISTRY)
MACHINES = Gauge(
    "makeway_machines",
    "Machines of deployments that are not gone, by type and state.",
    ["deployment", "type", "state"],
    registry=REGISTRY,
)
MACHINES_OVERDUE = Gauge(
    "makeway_machines_overdue",
    "Machines that the provider was asked to end more than ten minutes ago, and still has.",
    ["deployment"],
    registry=REGISTRY,
)
MACHINE_TYPES_HELD = Gauge(
    "makeway_machine_types_held",
    "1 while failures of a class (stock_out, quota, boot_failed …) hold back launches of a type; type *: of all.",
    ["deployment", "type", "failure"],
    registry=REGISTRY,
)
MACHINE_SPEND = Gauge(
    "makeway_machine_spend",
    "Cost of the machines of a deployment: of an hour as they are, and of the calendar month so far.",
    ["deployment", "currency", "period"],
    registry=REGISTRY,
)
MACHINE_BUDGET = Gauge(
    "makeway_machine_budget",
    "Budget of a deployment for an hour and for a calendar month, where its document has one.",
    ["deployment", "currency", "period"],
    registry=REGISTRY,
)
MACHINE_BOOT_SECONDS = Histogram(
    "makeway_machine_boot_seconds",
    "Time from the request of a machine until it is ready.",
    ["deployment"],
    buckets=(15, 30, 60, 120, 180, 300, 450, 600, 900, 1200, 1800, 3600),
    registry=REGISTRY,
)
MACHINE_FAILURES = Counted(
    "makeway_machine_failures_total",
    "Failures of launches and machines by class (stock_out, quota, denied, boot_failed, spot_lost …).",
    ["deployment", "failure"],
    registry=REGISTRY,
)
MAX_DEPLOYMENTS = 200
"""Deployments that have series of their own until the process ends; all further ones are `other` together"""
_deployments: set[str] = set()


@dataclass(frozen=True, slots=True)
class DeploymentNumbers:
    """A deployment as it is measured. `deployment` and `money` are None where its document cannot be read."""

    name: str
    deployment: Deployment | None
    machines: Sequence[Machine] = ()
    backoffs: Sequence[LaunchBackoff] = ()
    money: Money | None = None


def count_decisions(decisions: Iterable[NewDecision]) -> None:
    """Count what was written into the decision log."""
    for (verb, team), count in Counter((decision.verb, decision.team or "") for decision in decisions).items():
        DECISIONS.labels(verb, team).inc(count)


def show(usage: Usage, workloads: Mapping[tuple[str, str], int], parts: Mapping[str, bool]) -> None:
    """Set the gauges: GPUs from `usage`, how many live workloads there are of each (kind, state), and what works."""
    for part, works in parts.items():
        PARTS.labels(part).set(works)
    for state in ("total", "used", "free"):
        GPUS.labels(state).set(getattr(usage, state))
    TEAM_GPUS.clear()
    for team in usage.teams:
        for state in ("reserved", "limit", "guaranteed", "in_quota", "borrowed", "lent", "free"):
            value = getattr(team, state)
            TEAM_GPUS.labels(team.team, state).set(float("inf") if value is None else value)
    WORKLOADS.clear()
    for (kind, state), count in workloads.items():
        WORKLOADS.labels(kind, state).set(count)


def show_deployments(deployments: Iterable[DeploymentNumbers], now: float) -> None:
    """Set the gauges of machines, of all deployments that there are."""
    for gauge in (MACHINES, MACHINES_OVERDUE, MACHINE_TYPES_HELD, MACHINE_SPEND, MACHINE_BUDGET):
        gauge.clear()
    for one in deployments:
        label, deployment = _label(one.name), one.deployment
        MACHINES_OVERDUE.labels(label)
        for machine in one.machines:
            MACHINES.labels(label, machine.type, machine.state).inc()
            if deployment is not None and machine.overdue(now, deployment.timeouts(machine.type)):
                MACHINES_OVERDUE.labels(label).inc()
        for back in one.backoffs:
            if back.active(now):
                MACHINE_TYPES_HELD.labels(label, back.type, back.failure).set(1)
        if deployment is None or one.money is None:
            continue
        limits = {
            "hour": (one.money.hourly_cost, deployment.hourly_budget),
            "month": (one.money.spent_in_month, deployment.monthly_budget),
        }
        for period, (spent, budget) in limits.items():
            MACHINE_SPEND.labels(label, deployment.currency, period).inc(spent / MICROS_PER_UNIT)
            if budget is not None:
                MACHINE_BUDGET.labels(label, deployment.currency, period).inc(budget / MICROS_PER_UNIT)


def count_boot(deployment: str, seconds: float) -> None:
    """Count a machine that became ready, so many seconds after its request."""
    MACHINE_BOOT_SECONDS.labels(_label(deployment)).observe(max(0.0, seconds))


def count_failure(deployment: str, failure: FailureClass) -> None:
    """Count a failure of a launch or a machine."""
    MACHINE_FAILURES.labels(_label(deployment), failure).inc()


def _label(deployment: str) -> str:
    if len(_deployments) < MAX_DEPLOYMENTS:
        _deployments.add(deployment)
    return deployment if deployment in _deployments else "other"


def render() -> bytes:
    """Write all metrics in the Prometheus text format."""
    return generate_latest(REGISTRY)
