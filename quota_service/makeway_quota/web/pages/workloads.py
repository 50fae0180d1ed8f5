"""List pending and running workloads, with filters, search and true counts."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from ...services.jobs.listing import ListQuery
from ..dependencies import ServicesDep
from ..login.auth import may, refusal
from ..settings import WebSettings
from .access import PageVisitor
from .filters import Page, Text
from .panel import display_of
from .render import page

router = APIRouter(include_in_schema=False)


@router.get("/workloads")
async def workloads_page(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
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
        profiles=sorted(known.name for known in await services.inventory.profiles(caller)),
        chosen={"state": state, "team": team, "owner": owner, "profile": profile, "q": q},
        display=display_of(services, caller, usage, [], settings),
        cancels_all=bool(owner) and may(caller, "admin"),
    )


@router.post("/workloads/cancel-all")
async def cancel_all(request: Request, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Cancel every job of the owner in the form, for administrators."""
    if not may(visitor.caller, "admin"):
        raise refusal(visitor.caller, ["admin"])
    owner = str((await request.form()).get("owner", ""))
    await services.people.cancel_all(visitor.caller, owner)
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(f"{settings.prefix}workloads?{urlencode({'owner': owner})}", status_code=303)
