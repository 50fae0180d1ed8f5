"""The page of one job: state and reason, attempts, decisions, its output, and its buttons."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError
from makeway_api.models import Job, LogChunk

from ..auth import may, refusal
from ..dependencies import Id, TheServices
from ..ports import Caller, Services
from ..settings import WebSettings
from .access import PageVisitor
from .panel import look_of
from .render import page, part

TAIL = 64 * 2**10
"""Bytes of a job's output that its page begins with"""

ACTIONS = {
    "cancel": "The job is being cancelled.",
    "resume": "The job is back in the queue and resumes from its last checkpoint.",
    "preempt-test": "The preemption test has started: the job saves a checkpoint, stops and is requeued.",
}

router = APIRouter(include_in_schema=False)


@router.get("/jobs/{id}")
@router.get("/live/jobs/{id}")
async def job_page(request: Request, id: Id, visitor: PageVisitor, services: TheServices) -> Response:
    """One job: state and reason, attempts, decisions, its output."""
    caller, settings = visitor.caller, request.app.state.settings
    job = await services.job(caller, id)
    template = part(request, "job")
    return await page(
        request,
        template,
        visitor,
        job=job,
        look=look_of(services, caller, await services.usage(caller), [], settings),
        decisions=list(reversed(await services.job_events(caller, id)))[:100],
        failure=await services.error(caller, id) if job.state.value == "failed" and not job.private else None,
        may_touch=await _may_touch(services, caller, job),
        tail=await _tail(services, caller, job) if template == "job.html" else None,
        notice=ACTIONS.get(request.query_params.get("did", "")),
    )


@router.post("/jobs/{id}/{action}")
async def job_action(request: Request, id: Id, action: str, visitor: PageVisitor, services: TheServices) -> Response:
    """Run the action of a button, then show the page again."""
    if action not in ACTIONS:
        raise MakewayError("There is no such button.", code="not_found", status=404)
    if not may(visitor.caller, "submit", "manage"):
        raise refusal(visitor.caller, ["submit", "manage"])
    do = {"cancel": services.cancel, "resume": services.resume, "preempt-test": services.preempt_test}[action]
    await do(visitor.caller, id)
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(f"{settings.prefix}jobs/{id}?did={action}", status_code=303)


async def _may_touch(services: Services, caller: Caller, job: Job) -> bool:
    if caller.name == job.owner or caller.admin:
        return may(caller, "submit", "manage")
    groups = [policy.groups for policy in await services.policies(caller) if policy.name == job.team]
    return any(caller.manages(tuple(found)) for found in groups)


async def _tail(services: Services, caller: Caller, job: Job) -> LogChunk:
    if job.attempt < 1 or job.private:
        return LogChunk(attempt=1, offset=0, next_offset=0, text="")
    return await services.log(caller, job.id, None, -TAIL, TAIL, 0)
