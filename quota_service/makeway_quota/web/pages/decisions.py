"""The decision log, a hundred lines a page."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from ..dependencies import MAX_INTEGER, Name, ServicesDep
from .access import PageVisitor
from .panel import display_of
from .render import page

LINES = 100

router = APIRouter(include_in_schema=False)


@router.get("/decisions")
async def decisions_page(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    team: Name = None,
    before: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
) -> Response:
    """Return the decisions before one of them, newest first."""
    caller = visitor.caller
    decisions = await services.audit.decisions(caller, None, team, LINES, before)
    names = await services.listings.names([decision.workload for decision in decisions if decision.workload])
    return await page(
        request,
        "decisions.html",
        visitor,
        decisions=decisions,
        names=names,
        display=display_of(services, caller, await services.usage.usage(caller), [], request.app.state.settings),
        team=team,
        lines=LINES,
    )
