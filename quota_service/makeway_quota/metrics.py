"""Numbers for Prometheus: what runs, what waits, what was decided and how long deciding took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from makeway_api.models import Usage
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Counted

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


def render() -> bytes:
    """Write all metrics in the Prometheus text format."""
    return generate_latest(REGISTRY)
