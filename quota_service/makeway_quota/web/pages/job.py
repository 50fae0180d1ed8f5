"""The page of one job: state and reason, attempts, decisions, its output, and its buttons."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError
from makeway_api.models import Job, LogChunk

from ...services import Caller, Services
from ..auth import may, may_for_some, refusal
from ..dependencies import Id, TheServices
from ..settings import WebSettings
from .access import PageVisitor
from .panel import look_of
from .render import page, part

TAIL = 64 * 2**10
"""Bytes of a job's output that its page begins with"""

ACTIONS = {
    "cancel": "The job is being cancelled.",
    "resume": "The job is back in the queue and resumes from its last checkpoint.",
    "delete": "The job was deleted.",
    "preempt-test": "The preemption test has started: the job saves a checkpoint, stops and is requeued.",
}

router = APIRouter(include_in_schema=False)


@router.get("/jobs/{id}")
@router.get("/live/jobs/{id}")
async def job_page(request: Request, id: Id, visitor: PageVisitor, services: TheServices) -> Response:
    """One job: state and reason, attempts, decisions, its output."""
    caller, settings = visitor.caller, request.app.state.settings
    job = await services.jobs.job(caller, id)
    template = part(request, "job")
    return await page(
        request,
        template,
        visitor,
        job=job,
        look=look_of(services, caller, await services.usage.usage(caller), [], settings),
        decisions=list(reversed(await services.jobs.events(caller, id)))[:100],
        failure=await services.outputs.error(caller, id) if job.state.value == "failed" and not job.private else None,
        may_touch=await _may_touch(services, caller, job),
        tail=await _tail(services, caller, job) if template == "job.html" else None,
        notice=ACTIONS.get(request.query_params.get("did", "")),
    )


@router.post("/jobs/{id}/{action}")
async def job_action(request: Request, id: Id, action: str, visitor: PageVisitor, services: TheServices) -> Response:
    """Run the action of a button, then show the page again."""
    if action not in ACTIONS:
        raise MakewayError(
            f"There is no action {action[:40]}; a job can be cancelled, resumed, deleted or preempted as a test.",
            code="not_found",
            status=404,
        )
    if not may(visitor.caller, "submit") and not may_for_some(visitor.caller, "manage"):
        raise refusal(visitor.caller, ["submit", "manage"])
    jobs = services.jobs
    settings: WebSettings = request.app.state.settings
    if action == "delete":
        done = await services.storage.delete_job(visitor.caller, id)
        return RedirectResponse(f"{settings.prefix}storage?jobs={done.jobs}&freed={done.bytes}", status_code=303)
    do = {"cancel": jobs.cancel, "resume": jobs.resume, "preempt-test": jobs.preempt_test}[action]
    await do(visitor.caller, id)
    return RedirectResponse(f"{settings.prefix}jobs/{id}?did={action}", status_code=303)


async def _may_touch(services: Services, caller: Caller, job: Job) -> bool:
    if caller.name == job.owner or caller.admin:
        return may(caller, "submit") or may_for_some(caller, "manage")
    groups = [policy.groups for policy in await services.inventory.policies(caller) if policy.name == job.team]
    return any(caller.manages(tuple(found)) for found in groups)


async def _tail(services: Services, caller: Caller, job: Job) -> LogChunk:
    if job.attempt < 1 or job.private:
        return LogChunk(attempt=1, offset=0, next_offset=0, text="")
    return await services.outputs.log(caller, job.id, None, -TAIL, TAIL, 0)
