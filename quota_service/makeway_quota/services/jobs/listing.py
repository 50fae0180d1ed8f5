"""Live workloads as lines of a table: filtered, counted and one page at a time.

The pages call this with the rows that the read model already holds, so that no line costs a query.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from makeway_api.models import JobProgress, Kind, Notice, Reason, State, WorkerPlacement

from ...engine.snapshot import ADMITTED
from ...store.records import Workload
from ...store.reports.progress import ProgressRow
from .. import views
from ..caller import Caller
from ..context import Context
from ..privacy import without_own_words
from ..times import to_datetime, to_optional_datetime

PAGE_LINES = 50
"""Lines of one page of a table."""

WAITING = ("pending",)
STATES: Mapping[str, Collection[str]] = {"waiting": WAITING, "running": ADMITTED}
"""The two tables of the pages: what waits for GPUs, and what holds them."""


@dataclass(frozen=True, slots=True)
class WorkloadLine:
    """A session or a job as one line of a table. `gpus` are devices, times are UTC."""

    id: str
    kind: Kind
    name: str
    owner: str
    team: str
    profile: str
    gpus: float
    state: State
    submitted_at: datetime
    started_at: datetime | None
    reason: Reason | None
    over_quota: bool = False
    preemptions: int = 0
    placement: Sequence[WorkerPlacement] = ()
    notice: Notice | None = None
    saved_at: datetime | None = None
    step: int | None = None
    borrowed_from: Sequence[str] = ()
    progress: JobProgress | None = None
    """the steps alone: teams share tables"""

    @property
    def is_job(self) -> bool:
        """Whether the workload has a page of its own."""
        return self.kind is Kind.JOB


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which workloads a table shows. Empty strings do not filter; `page` counts from 1."""

    state: str = "waiting"
    team: str = ""
    owner: str = ""
    profile: str = ""
    node: str = ""
    text: str = ""
    page: int = 1
    lines: int = PAGE_LINES
    own: bool = True
    """whether the caller's workloads are listed whatever their team"""


@dataclass(frozen=True, slots=True)
class Listing:
    """One page of a table, with the true number of workloads that match. Page 0 has no lines: nothing matches."""

    query: ListQuery
    lines: Sequence[WorkloadLine]
    total: int

    @property
    def pages(self) -> int:
        """The number of pages, at least 1."""
        return max(1, -(-self.total // self.query.lines))

    @property
    def first(self) -> int:
        """The position of the first line, counted from 1."""
        return (self.query.page - 1) * self.query.lines + 1


@dataclass(slots=True)
class QueueCount:
    """What waits and runs in the queue of a team for a profile; `names` are of the work that waits longest."""

    team: str
    profile: str
    waiting: int = 0
    running: int = 0
    gpus: float = 0.0
    """that the waiting work needs"""
    names: tuple[str, ...] = ()


MAX_NAMES = 20_000
"""Names of workloads in memory; beyond, all are read again"""


class ListingService:
    """Lists what waits and what runs, from the rows that the world holds in memory."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._names: dict[str, str] = {}
        """of workloads that were mentioned; a name never changes"""

    async def listing(self, caller: Caller, query: ListQuery) -> Listing:
        """Return one page of what waits or runs, as far as the caller may see it."""
        visible = self._context.visible_teams(caller)
        query = replace(query, owner=self._context.world.people.hub_name_of(query.owner))
        owner = caller.name if query.own else ""
        teams: Sequence[str] | None = visible
        if query.team:
            teams = [query.team] if visible is None or query.team in visible else []
        rows = await self._context.world.rows_of(teams, owner)
        model = await self._context.read_models.current()
        context = self._context

        def read() -> Listing:
            result = list_workloads(rows, visible, owner, query, model.present)
            known = context.store.progress.of([line.id for line in result.lines if line.is_job])
            lines = [_with_progress(line, known, context.clock()) for line in result.lines]
            return replace(result, lines=[_with_problem(line, context.world.problem) for line in lines])

        return await context.call(read)

    async def queues(self, caller: Caller, profiles: Collection[str], names: int = 3) -> list[QueueCount]:
        """Return the queues of some profiles in which work waits or runs, those with the most waiting work first."""
        visible = self._context.visible_teams(caller)
        rows = await self._context.world.rows_of(visible, caller.name)
        return await self._context.call(count_queues, rows, frozenset(profiles), names)

    async def names(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the names of workloads by id, ended ones too; those without a name are left out."""
        unknown = [id for id in dict.fromkeys(ids) if id not in self._names]
        if unknown:
            if len(self._names) > MAX_NAMES:
                self._names.clear()
            read = await self._context.call(self._context.store.names, unknown)
            self._names |= {id: read.get(id, "") for id in unknown}
        return {id: self._names[id] for id in ids if self._names.get(id)}


def count_queues(rows: Iterable[Workload], profiles: Collection[str], names: int) -> list[QueueCount]:
    """Return the queues of some profiles with work, and the names of the first work that waits in each."""
    result: dict[tuple[str, str], QueueCount] = {}
    for row in sorted((row for row in rows if row.profile in profiles), key=_submitted):
        key = (row.team or "", row.profile)
        queue = result.setdefault(key, QueueCount(*key))
        if row.state in ADMITTED:
            queue.running += 1
        elif row.state in WAITING:
            queue.waiting += 1
            queue.gpus += line(row).gpus
            if len(queue.names) < names:
                queue.names += (row.name or row.id,)
    some = [queue for queue in result.values() if queue.waiting or queue.running]
    return sorted(some, key=lambda queue: (-queue.waiting, queue.team, queue.profile))


def list_workloads(
    rows: Iterable[Workload],
    visible: Sequence[str] | None,
    owner: str,
    query: ListQuery,
    present: Callable[[Workload], Workload] = lambda row: row,
) -> Listing:
    """Return one page of the rows that match; `visible` are the teams to show (None: all), `owner` sees their own.

    `present` gives the rows that are shown the quota that they have now.

    Waiting work comes in order of submission, running work by team and start, sessions before jobs in both;
    ties end with the id. A page beyond the last one shows the last.
    """
    result = list(_matching(rows, visible, owner, query))
    last = max(1, -(-len(result) // query.lines))
    page = min(max(1, query.page), last)
    order = _submitted if query.state == "waiting" else _started
    start = (page - 1) * query.lines
    if start == 0:
        shown = heapq.nsmallest(query.lines, result, key=order)
    else:
        shown = sorted(result, key=order)[start : start + query.lines]
    return Listing(replace(query, page=page), [line(present(row)) for row in shown], len(result))


def _matching(
    rows: Iterable[Workload], visible: Sequence[str] | None, owner: str, query: ListQuery
) -> Iterator[Workload]:
    states, text = STATES.get(query.state, WAITING), query.text.casefold().strip()
    teams = None if visible is None else frozenset(visible)
    for row in rows:
        if row.state not in states or (
            teams is not None and row.team not in teams and (not owner or row.owner != owner)
        ):
            continue
        if (query.team and row.team != query.team) or (query.owner and row.owner != query.owner):
            continue
        if query.profile and row.profile != query.profile:
            continue
        if query.node and all(place.node != query.node for place in row.placement):
            continue
        if text and not any(text in part.casefold() for part in (row.name, row.owner, row.id)):
            continue
        yield row


def _submitted(row: Workload) -> tuple[bool, float, str]:
    return (row.kind == "job", row.submitted_at, row.id)


def _started(row: Workload) -> tuple[bool, str, float, str]:
    return (row.kind == "job", row.team or "", row.started_at or row.submitted_at, row.id)


def line(row: Workload) -> WorkloadLine:
    """Return a row as a line, without the words of its job: teams share tables."""
    job = row.kind == "job"
    return WorkloadLine(
        id=row.id,
        kind=Kind(row.kind),
        name=(row.name or row.id) if job else f"Notebook {row.server}".rstrip(),
        owner=row.owner,
        team=row.team or "",
        profile=row.profile,
        gpus=views.gpu(row.size),
        state=State(row.state),
        submitted_at=to_datetime(row.submitted_at),
        started_at=to_optional_datetime(row.started_at),
        reason=_reason(row),
        over_quota=row.over_quota,
        preemptions=row.preemptions,
        placement=views.worker_placements(row.placement),
        notice=views.notice(row.notice),
        saved_at=to_optional_datetime(row.checkpoint_at),
        step=row.checkpoint_step,
        borrowed_from=row.borrowed_from,
    )


def _with_progress(line: WorkloadLine, known: Mapping[str, ProgressRow], now: float) -> WorkloadLine:
    if line.id not in known:
        return line
    progress = views.progress_model(known[line.id], now, running=line.state.holds_gpus, whole=False)
    return replace(line, progress=progress and progress.model_copy(update={"stage": "", "metrics": {}}))


def _with_problem(line: WorkloadLine, problem: str | None) -> WorkloadLine:
    if problem is None or line.state is not State.PENDING:
        return line
    return replace(line, reason=views.unobserved(problem))


def _reason(row: Workload) -> Reason | None:
    reason = views.reason(row)
    return reason and reason.model_copy(update={"message": without_own_words(reason.message)})
