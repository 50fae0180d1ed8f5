"""List pending and running workloads, with filters, search and true counts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from ...services.listing import ListQuery
from ..dependencies import TheServices
from .access import PageVisitor
from .filters import Page, Text
from .panel import look_of
from .render import page

router = APIRouter(include_in_schema=False)


@router.get("/workloads")
async def workloads_page(
    request: Request,
    visitor: PageVisitor,
    services: TheServices,
    state: Annotated[str, Query(pattern="^(waiting|running)$")] = "waiting",
    team: Text = "",
    owner: Text = "",
    profile: Text = "",
    q: Text = "",
    number: Page = 1,
) -> Response:
    """Every workload that matches, fifty a page."""
    caller, settings = visitor.caller, request.app.state.settings
    query = ListQuery(state, team=team, owner=owner, profile=profile, text=q, page=number)
    usage = await services.usage.usage(caller)
    return await page(
        request,
        "workloads.html",
        visitor,
        listing=await services.listings.listing(caller, query),
        teams=[entry.team for entry in usage.teams],
        profiles=sorted(each.name for each in await services.inventory.profiles(caller)),
        chosen={"state": state, "team": team, "owner": owner, "profile": profile, "q": q},
        look=look_of(services, caller, usage, [], settings),
    )
