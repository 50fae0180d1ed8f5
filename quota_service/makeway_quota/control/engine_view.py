"""One row of the store as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..engine.state import ADMITTED, PRIORITIES, Placement
from ..engine.state import Workload as EngineWorkload
from ..store.records import Place, Workload


def as_workload(
    row: Workload, placed: Callable[[Sequence[Place]], Placement], expected: float | None
) -> EngineWorkload:
    """Show one row; `placed` says where its places are on the engine's nodes, `expected` how long the attempt takes."""
    return EngineWorkload(
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
        placement=placed(row.placement),
        attempt=max(1, row.attempt),
        last_checkpoint_at=row.checkpoint_at,
        evicted_for=row.evicted_for,
        deadline=row.notice.deadline if row.notice else None,
        nomination=placed(row.nomination),
        failed_node=row.failed_node,
        gpus=row.gpus,
        workers=row.workers,
        min_workers=row.min_workers,
        cpu=row.cpu,
        memory=row.memory,
        time_limit=row.time_limit,
        expected=expected,
        ran=row.ran,
    )
