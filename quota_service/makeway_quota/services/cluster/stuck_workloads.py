"""List what should have ended and does not: where it hangs, since when, what was tried, and what can be done.

What counts is `stuck_after` beyond the deadline, as in the engine. Only the leader knows what was tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from ...backends.base import TerminationProgress
from ...control.hub.servers import HubServers
from ...store.records import Workload
from ...wording.remedies import WorkerKind, remedy
from ..caller import Caller
from ..context import Context
from ..times import to_datetime
from ..views import gpu


@dataclass(frozen=True, slots=True)
class StuckWorkload:
    """What is left of one workload, `since` when it should have ended (None: longer than this process knows)."""

    workload: str
    name: str
    kind: str
    team: str
    owner: str
    nodes: tuple[str, ...]
    gpus: float
    since: datetime | None
    targets: tuple[str, ...]
    tries: int
    next_at: datetime | None
    problem: str
    remedy: str


@dataclass(slots=True)
class _Leftover:
    """What hangs of a workload: milli-GPUs by node, and the earliest deadline in Unix seconds.

    `since` is the same deadline by the present clock, which may have been set since it was written.
    """

    held: dict[str, int]
    deadline: float
    since: float

    def merged(self, other: _Leftover) -> _Leftover:
        """Return what hangs of both: of a victim, and of an earlier attempt of the same workload."""
        held = {node: self.held.get(node, 0) + other.held.get(node, 0) for node in (*self.held, *other.held)}
        deadline = min(self.deadline, other.deadline) if other.deadline else other.deadline
        return _Leftover(held, deadline, min(self.since, other.since))


class StuckWorkloadService:
    """Answers for administrators, from what the cycle knows."""

    def __init__(self, context: Context, servers: HubServers | None) -> None:
        self._context = context
        self._servers = servers

    async def list_stuck(self, caller: Caller) -> list[StuckWorkload]:
        """Return what hangs, the longest first; nothing to others than administrators."""
        if not caller.admin:
            return []
        context = self._context
        rows = await context.world.holding()
        leftovers = self._evicted(rows)
        for id, outliving in self._outliving().items():
            leftovers[id] = leftovers[id].merged(outliving) if id in leftovers else outliving
        order = sorted(leftovers, key=lambda id: (leftovers[id].since, id))
        known = {id: row for id in order if (row := rows.get(id) or await context.world.row(id)) is not None}
        return [self._entry(id, leftovers[id], known.get(id)) for id in order]

    def _stuck_cutoff(self) -> float:
        """Return the time of deadlines that have passed for long enough."""
        return self._context.clock() - self._context.document.settings.stuck_after

    def _evicted(self, rows: Mapping[str, Workload]) -> dict[str, _Leftover]:
        """Return the victims that hold their GPUs still."""
        result: dict[str, _Leftover] = {}
        for id, row in rows.items():
            notice = self._context.world.times.of(row).notice if row.state == "checkpointing" else None
            if notice is not None and row.notice is not None and notice.deadline <= self._stuck_cutoff():
                held: dict[str, int] = {}
                for place in row.placement:
                    held[place.node] = held.get(place.node, 0) + sum(place.milli)
                result[id] = _Leftover(held, row.notice.deadline, notice.deadline)
        return result

    def _outliving(self) -> dict[str, _Leftover]:
        """Return what outlives its attempt."""
        result: dict[str, _Leftover] = {}
        for node in self._context.world.observation.nodes:
            for item in node.terminating:
                if item.deadline <= self._stuck_cutoff():
                    one = _Leftover(
                        {node.name: item.milli_per_device * len(item.devices)}, item.deadline, item.deadline
                    )
                    there = result.get(item.workload)
                    result[item.workload] = one if there is None else there.merged(one)
        return result

    def _entry(self, id: str, leftover: _Leftover, row: Workload | None) -> StuckWorkload:
        progress = self._progress(id, row) or TerminationProgress()
        nodes = tuple(sorted(leftover.held))
        statuses = self._context.world.observed.nodes
        down = [name for name in nodes if name in statuses and not statuses[name].ready]
        is_session = row is not None and row.kind == "session"
        worker_kind: WorkerKind = "session" if is_session else self._context.backend.worker_kind
        return StuckWorkload(
            workload=id,
            name=row.name if row is not None else "",
            kind=row.kind if row is not None else "job",
            team=(row.team or "") if row is not None else "",
            owner=row.owner if row is not None else "",
            nodes=nodes,
            gpus=gpu(sum(leftover.held.values())),
            since=to_datetime(leftover.deadline) if leftover.deadline else None,
            targets=progress.targets,
            tries=progress.tries,
            next_at=to_datetime(progress.next_at) if progress.next_at is not None else None,
            problem=progress.problem,
            remedy=remedy(worker_kind, progress.targets, down, progress.namespace),
        )

    def _progress(self, id: str, row: Workload | None) -> TerminationProgress | None:
        if row is not None and row.kind == "session" and self._servers is not None:
            return self._servers.termination_progress(id, self._context.clock())
        return self._context.backend.termination_progress(id)
