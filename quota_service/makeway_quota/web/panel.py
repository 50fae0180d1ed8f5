"""What the panel shows, gathered from the services in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from makeway_api.models import (
    Decision,
    Grant,
    Job,
    Kind,
    Notice,
    Pool,
    Reason,
    Session,
    State,
    TeamUsage,
    Usage,
)

from ..services import Caller, Services
from .charts import Look, bar_scale
from .palette import colours
from .settings import WebSettings

SHOWN = 200
"""Most lines of one table, and most nodes of one pool, on a page."""
LOGGED = 60
"""Lines of the decision log on the panel; a page of its own has the older ones."""


@dataclass(frozen=True, slots=True)
class Line:
    """A session or a job as one line of a table."""

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
    placement: Sequence[Grant] = ()
    notice: Notice | None = None
    saved_at: datetime | None = None
    step: int | None = None
    borrowed_from: Sequence[str] = ()

    @property
    def is_job(self) -> bool:
        """True for what has a page of its own."""
        return self.kind is Kind.JOB


@dataclass(frozen=True, slots=True)
class Board:
    """One moment of the cluster, as far as the caller may see it."""

    usage: Usage
    pools: Sequence[Pool]
    teams: Sequence[TeamUsage]
    waiting: Sequence[Line]
    running: Sequence[Line]
    decisions: Sequence[Decision]
    look: Look
    scale: float
    shown: frozenset[str] = frozenset()
    """teams that hold a GPU on the map"""
    more_waiting: bool = False
    more_running: bool = False
    team: str | None = None
    """the only team that the board is about, if it is about one"""

    def name_of(self, workload: str) -> str:
        """Name a workload that is on the page; others go by their id."""
        return next((line.name for line in (*self.running, *self.waiting) if line.id == workload), workload)

    @property
    def older(self) -> bool:
        """True where the log goes on."""
        return len(self.decisions) >= LOGGED

    @property
    def virtual(self) -> bool:
        """True where the GPUs are not real."""
        return self.usage.virtual or any(pool.virtual for pool in self.pools)


async def gather(services: Services, caller: Caller, settings: WebSettings, team: str | None = None) -> Board:
    """Ask the services for everything at once; `team` narrows it to one team."""
    usage, pools = await asyncio.gather(services.usage.usage(caller), services.inventory.pools(caller))
    sessions, pending, running, decisions = await asyncio.gather(
        services.sessions.sessions(caller, True),
        services.jobs.jobs(caller, team, State.PENDING.value, False, SHOWN, None),
        services.jobs.jobs(caller, team, "starting,running,checkpointing", False, SHOWN, None),
        services.audit.decisions(caller, None, team, LOGGED, None),
    )
    lines = [session_line(session) for session in sessions if team is None or session.team == team]
    waiting = [line for line in lines if line.state is State.PENDING] + [job_line(job) for job in pending.jobs]
    active = [line for line in lines if line.state.holds_gpus] + [job_line(job) for job in running.jobs]
    teams = [entry for entry in usage.teams if team is None or entry.team == team]
    return Board(
        usage=usage,
        pools=pools,
        teams=teams,
        waiting=sorted(waiting, key=lambda line: (line.is_job, line.submitted_at, line.id)),
        running=sorted(
            active, key=lambda line: (line.is_job, line.team, line.started_at or line.submitted_at, line.id)
        ),
        decisions=decisions,
        look=look_of(services, caller, usage, pools, settings),
        scale=bar_scale(list(usage.teams), usage.total),
        shown=holding(pools),
        more_waiting=pending.next is not None,
        more_running=running.next is not None,
        team=team,
    )


def look_of(services: Services, caller: Caller, usage: Usage, pools: Sequence[Pool], settings: WebSettings) -> Look:
    """Give every team on the page its colour and its title."""
    others = {lending.team for entry in usage.teams for lending in (*entry.borrowed_from, *entry.lent_to)}
    teams = {entry.team for entry in usage.teams} | holding(pools) | others
    return Look(
        classes=colours(teams - {""}),
        titles={team: services.context.title(team) for team in teams},
        jobs=f"{settings.prefix}jobs/",
        devices=sum(len(node.devices) for pool in pools for node in pool.nodes),
        linked=None if caller.admin else frozenset(entry.team for entry in usage.teams),
    )


def holding(pools: Sequence[Pool]) -> frozenset[str]:
    """Name the teams that hold a GPU now."""
    return frozenset(
        holder.team for pool in pools for node in pool.nodes for device in node.devices for holder in device.holders
    )


def job_line(job: Job) -> Line:
    """A job as a line."""
    return Line(
        id=job.id,
        kind=Kind.JOB,
        name=job.name or job.id,
        owner=job.owner,
        team=job.team,
        profile=job.profile,
        gpus=job.gpus,
        state=job.state,
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        reason=job.reason,
        over_quota=job.over_quota,
        preemptions=job.preemptions,
        placement=job.placement,
        notice=job.notice,
        saved_at=job.checkpoint.saved_at if job.checkpoint else None,
        step=job.checkpoint.step if job.checkpoint else None,
        borrowed_from=job.borrowed_from,
    )


def session_line(session: Session) -> Line:
    """A session as a line."""
    return Line(
        id=session.id,
        kind=Kind.SESSION,
        name=f"Notebook {session.server}".rstrip(),
        owner=session.user,
        team=session.team or "",
        profile=session.profile,
        gpus=session.gpus,
        state=session.state,
        submitted_at=session.submitted_at,
        started_at=session.started_at,
        reason=session.reason,
        placement=session.placement,
        notice=session.notice,
    )
