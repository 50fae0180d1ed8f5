"""Gather what the panel and a team's page show from the services."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from makeway_api.models import Decision, Node, Pool, TeamUsage, Usage

from ...services import Caller, Services
from ...services.cluster.stuck_workloads import StuckWorkload
from ...services.jobs.listing import Listing, ListQuery
from ..dependencies import ServicesDep
from ..settings import WebSettings
from .access import PageVisitor
from .figures.bars import MANY_TEAMS, bar_scale
from .figures.display import Display, colours, is_large
from .figures.node_facts import facts_of
from .figures.sharing import view_of
from .parts import PartSource, shared_page

router = APIRouter(include_in_schema=False)

TABLE_LINES = 25
"""Lines of a table on the panel; a page of its own has all of them, with filters."""
LOG_LINES = 40
"""Lines of the decision log on the panel; a page of its own has the older ones."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One moment of the cluster, as far as the caller may see it."""

    usage: Usage
    pools: Sequence[Pool]
    teams: Sequence[TeamUsage]
    waiting: Listing
    running: Listing
    decisions: Sequence[Decision]
    display: Display
    scale: float
    shown: frozenset[str] = frozenset()
    """teams that hold a GPU on the map"""
    team: str | None = None
    """the only team that the page is about, if it is about one"""
    names: Mapping[str, str] = field(default_factory=dict)
    """names of the workloads that the page mentions, by id"""
    stuck: Sequence[StuckWorkload] = ()
    """what should have ended and does not; for administrators"""
    unassigned: Sequence[str] = ()
    """the GPUs that no pool takes; for administrators"""

    @property
    def many_teams(self) -> bool:
        """Whether each team gets one line only, because there are many."""
        return len(self.teams) > MANY_TEAMS

    @property
    def older(self) -> bool:
        """Whether there may be older decisions than those shown."""
        return len(self.decisions) >= LOG_LINES

    @property
    def virtual(self) -> bool:
        """Whether the GPUs are virtual."""
        return self.usage.virtual or any(pool.virtual for pool in self.pools)


@router.get("/")
@router.get("/live/panel")
async def panel_page(request: Request, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Return the panel, whole or (below live/) only its changing part."""
    return await shared_page(request, visitor, panel_part(services, visitor.caller, request.app.state.settings))


def panel_part(services: Services, caller: Caller, settings: WebSettings) -> PartSource:
    """Return the changing part of the panel for a caller."""

    async def collect() -> dict[str, Any]:
        panel = await gather(services, caller, settings)
        return {"panel": panel, "virtual": panel.virtual}

    return PartSource("panel", partial(view_of, services, caller), collect, ("virtual",))


async def gather(services: Services, caller: Caller, settings: WebSettings, team: str | None = None) -> Panel:
    """Return the panel; `team` narrows it to one team."""
    sees_no_team = services.context.visible_teams(caller) == ()  # else the part is shared by all who see these teams
    usage, pools, waiting, running, decisions, stuck = await asyncio.gather(
        services.usage.usage(caller),
        services.inventory.pools(caller),
        services.listings.listing(caller, ListQuery("waiting", team=team or "", lines=TABLE_LINES, own=sees_no_team)),
        services.listings.listing(caller, ListQuery("running", team=team or "", lines=TABLE_LINES, own=sees_no_team)),
        services.audit.decisions(caller, None, team, LOG_LINES, None, own=sees_no_team),
        services.stuck_workloads.list_stuck(caller),
    )
    shown = await services.context.call(holding, [node for pool in pools for node in pool.nodes])
    return Panel(
        usage=usage,
        pools=pools,
        teams=[entry for entry in usage.teams if team is None or entry.team == team],
        waiting=waiting,
        running=running,
        decisions=decisions,
        display=display_of(services, caller, usage, pools, settings, shown=shown),
        scale=bar_scale(list(usage.teams), usage.total),
        shown=shown,
        team=team,
        names=await services.listings.names(
            [decision.workload for decision in decisions if decision.workload] + [start.workload for start in stuck]
        ),
        stuck=[start for start in stuck if team is None or start.team == team],
        unassigned=services.inventory.unassigned(caller),
    )


def display_of(
    services: Services,
    caller: Caller,
    usage: Usage,
    pools: Sequence[Pool],
    settings: WebSettings,
    nodes: Sequence[Node] | None = None,
    shown: Set[str] | None = None,
) -> Display:
    """Return a colour and a title for every team on the page.

    `nodes` are those with a cell for each GPU, and `shown` the teams that hold a GPU of the pools, if that is known.
    """
    if shown is None:
        shown = holding([node for pool in pools for node in pool.nodes])
    others = {lending.team for entry in usage.teams for lending in (*entry.borrowed_from, *entry.lent_to)}
    teams = {entry.team for entry in usage.teams} | shown | others
    cells = [node for pool in pools if not is_large(pool) for node in pool.nodes] if nodes is None else nodes
    return Display(
        classes=colours(teams - {""}),
        titles={team: services.context.title(team) for team in teams},
        jobs=f"{settings.prefix}jobs/",
        devices=sum(len(node.devices) for node in cells),
        profiles={name: facts.title for name, facts in services.context.document.profile_facts.items()},
        linked=None if caller.admin else frozenset(entry.team for entry in usage.teams),
    )


def holding(nodes: Sequence[Node]) -> frozenset[str]:
    """Return the teams that hold a GPU on these nodes now."""
    return frozenset().union(*(facts_of(node).teams for node in nodes))
