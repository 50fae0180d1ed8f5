"""Who decides in a simulation: the engine, asked anew every time or kept standing between decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ..engine.plan import Plan
from ..engine.schedule import schedule
from ..engine.state import ADMITTED, PRIORITIES, Placed, Placement, Snapshot
from ..engine.state import Workload as Live
from ..store.records import Place, Workload
from .estate import Estate


class Planner(Protocol):
    """Turns the books into a plan. `changed` names the workloads that changed since the last call."""

    def plan(self, now: float, rows: Mapping[str, Workload], changed: Iterable[str]) -> Plan:
        """Decide once."""


class WholePasses:
    """Shows the engine the whole world every time, as the service's loop does."""

    def __init__(self, estate: Estate) -> None:
        self.estate = estate

    def plan(self, now: float, rows: Mapping[str, Workload], changed: Iterable[str]) -> Plan:
        """Build a snapshot and schedule it."""
        return schedule(
            Snapshot(
                now,
                self.estate.settings,
                self.estate.pools,
                self.estate.nodes,
                self.estate.profiles,
                self.estate.policies,
                tuple(engine_workload(row) for row in rows.values()),
            )
        )


def engine_workload(row: Workload) -> Live:
    """Show one row of the books to the engine; the nodes of a simulation are all there."""
    return Live(
        id=row.id,
        policy=row.team or "",
        profile=row.profile,
        owner=row.owner,
        kind=row.kind,
        priority=PRIORITIES[row.priority],
        preemptible=row.preemptible,
        submitted_at=row.submitted_at,
        state=row.state,
        started_at=row.started_at if row.state in ADMITTED else None,
        placement=_placement(row.placement),
        attempt=max(1, row.attempt),
        last_checkpoint_at=row.checkpoint_at,
        promised_to=row.promised_to,
        deadline=row.notice.deadline if row.notice else None,
        claim=_placement(row.claim),
        gpus=row.gpus,
        workers=row.workers,
        min_workers=row.min_workers,
        cpu=row.cpu,
        memory=row.memory,
        time_limit=row.time_limit,
    )


def _placement(places: Sequence[Place]) -> Placement:
    return tuple(Placed(at, p.node, p.devices, p.milli[0] if p.milli else 0) for at, p in enumerate(places))
