"""What is kept for whom: a person's own bytes; for administrators everybody's, with buttons that delete ended jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.models import StorageDelete
from makeway_api.quantities import size

from ..dependencies import ServicesDep
from ..login.auth import may, refusal
from ..settings import WebSettings
from .access import PageVisitor
from .figures.growth import forecasts, grown, growth_chart, in_words
from .render import page

router = APIRouter(include_in_schema=False)

KINDS = {
    "queue": "jobs that have not ended",
    "jobs": "jobs, commands, sources",
    "files": "submitted files",
    "results": "results",
    "logs": "logs",
    "attempts": "attempts, states of checkpoints",
    "folders": "folders on this disk: checkpoints, logs, results",
}
"""What the kinds of an account are called"""


@router.get("/storage")
async def storage_page(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    jobs: Annotated[int | None, Query(ge=0)] = None,
    freed: Annotated[int, Query(ge=0)] = 0,
    owner: Annotated[str, Query(max_length=255)] = "",
) -> Response:
    """Return the page; after a deletion it says what was deleted."""
    notice = None
    if jobs is not None:
        of = f" of {owner}" if owner else ""
        notice = (
            f"Deleted: {jobs:,} ended job{'' if jobs == 1 else 's'}{of} with {size(freed)}. Files go within a minute."
        )
    report = await services.storage.report(visitor.caller)
    growth = await services.growth.growth() if visitor.caller.admin else None
    names = {policy.name: policy.title or policy.name for policy in await services.inventory.policies(visitor.caller)}
    return await page(
        request,
        "storage.html",
        visitor,
        report=report,
        growth=growth,
        drawn=growth_chart(growth) if growth is not None else None,
        forecasts=forecasts(growth) if growth is not None else [],
        in_words=in_words,
        grown=grown,
        kinds=KINDS,
        titles=names,
        written=size,
        notice=notice,
    )


@router.post("/storage/delete")
async def delete(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    owner: Annotated[str, Form(min_length=1, max_length=255)],
    days: Annotated[int, Form(ge=0, le=36_500)] = 0,
) -> Response:
    """Delete the jobs of a person that ended more than so many days ago, then show the page again."""
    if not may(visitor.caller, "admin"):
        raise refusal(visitor.caller, ["admin"])
    before = None if days == 0 else datetime.now(UTC) - timedelta(days=days)
    done = await services.storage.delete_of_person(visitor.caller, StorageDelete(owner=owner, ended_before=before))
    settings: WebSettings = request.app.state.settings
    url = request.url.replace(path=f"{settings.prefix}storage", query="")
    there = url.include_query_params(jobs=done.jobs, freed=done.bytes, owner=owner)
    return RedirectResponse(f"{there.path}?{there.query}", status_code=303)
