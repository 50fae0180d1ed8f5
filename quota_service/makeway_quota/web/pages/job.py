"""The page of one job: state and reason, attempts, decisions, its output, its buttons, and the form of copies."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError
from makeway_api.models import Job, LogChunk, MoveRequest
from makeway_api.quantities import size

from ...services import Caller, Services
from ..dependencies import Id, ServicesDep
from ..login.auth import Visitor, may, may_for_some, refusal
from ..settings import WebSettings
from .access import PageVisitor
from .forms import clone_fields
from .panel import display_of
from .render import page, part
from .storage import KINDS

TAIL_BYTES = 64 * 2**10
"""Bytes of a job's output that its page begins with"""

ACTIONS = {
    "cancel": "The job is being cancelled.",
    "resume": "The job is back in the queue and resumes from its last checkpoint.",
    "delete": "The job was deleted.",
    "move": "The job waits in its new queue, and keeps its submission time.",
    "clone": "This copy was submitted.",
    "preempt-test": "The preemption test has started: the job saves a checkpoint, stops and is requeued.",
}

Attempt = Annotated[int, Path(ge=1, le=1_000_000)]

router = APIRouter(include_in_schema=False)


@router.get("/jobs/{id}")
@router.get("/live/jobs/{id}")
async def job_page(request: Request, id: Id, visitor: PageVisitor, services: ServicesDep) -> Response:
    """One job: state and reason, attempts, decisions, its output."""
    return await _page(request, id, visitor, services)


async def _page(
    request: Request,
    id: str,
    visitor: Visitor,
    services: Services,
    copies: Mapping[str, str] | None = None,
    problem: str | None = None,
    status: int = 200,
) -> Response:
    """Return the page of a job. `copies` is what was typed into the form of copies, which is open then."""
    caller, settings = visitor.caller, request.app.state.settings
    job = await services.jobs.job(caller, id)
    template = part(request, "job")
    return await page(
        request,
        template,
        visitor,
        status=status,
        job=job,
        display=display_of(services, caller, await services.usage.usage(caller), [], settings),
        decisions=list(reversed(await services.jobs.events(caller, id)))[:100],
        failure=await services.outputs.error(caller, id) if job.state.value == "failed" and not job.private else None,
        may_touch=await _may_change(services, caller, job),
        tail=await _tail(services, caller, job) if template == "job.html" else None,
        kept=None if job.private else await services.storage.measured(caller, id),
        queues=await services.moves.queues(caller, job) if template == "job.html" else (),
        clone_queues=await services.submissions.queues(caller) if _may_clone(visitor, job, template) else None,
        clone_words=clone_fields.WORDS,
        clone_key=secrets.token_urlsafe(16),
        clone_problem=problem,
        copies=copies,
        copied=_submitted_copies(request),
        kinds=KINDS,
        written=size,
        notice=_notice(request),
    )


@router.post("/jobs/{id}/attempts/{attempt}/delete")
async def delete_output(
    request: Request, id: Id, attempt: Attempt, visitor: PageVisitor, services: ServicesDep
) -> Response:
    """Delete what an attempt wrote, then show the page again."""
    _require_action_right(visitor)
    deleted = await services.storage.delete_output(visitor.caller, id, attempt)
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(f"{settings.prefix}jobs/{id}?attempt={attempt}&freed={deleted.bytes}", status_code=303)


@router.post("/jobs/{id}/move")
async def move(request: Request, id: Id, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Move the job to the queue in the form, written team/profile, then show the page again."""
    _require_action_right(visitor)
    team, _, profile = str((await request.form()).get("queue", "")).partition("/")
    await services.moves.move(visitor.caller, id, MoveRequest(team=team[:63] or None, profile=profile[:63] or None))
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(f"{settings.prefix}jobs/{id}?did=move", status_code=303)


@router.post("/jobs/{id}/clone")
async def clone(request: Request, id: Id, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Submit the copies of the form, then show it, or where they are listed; a second press submits nothing."""
    if not may(visitor.caller, "submit"):
        raise refusal(visitor.caller, ["submit"])
    form = await request.form()
    values = clone_fields.typed(form)
    key = clone_fields.key_of(form.get("key"), values)
    try:
        clone_request = clone_fields.request_of(values)
        overrides = clone_request.overrides.model_dump(exclude_unset=True, exclude_none=True)
        copies_made = await services.submissions.clone(visitor.caller, id, clone_request.n, overrides, key)
    except MakewayError as refused:
        if refused.status in (403, 404):
            raise
        return await _page(request, id, visitor, services, values, refused.message, refused.status)
    settings: WebSettings = request.app.state.settings
    if len(copies_made) == 1:
        return RedirectResponse(f"{settings.prefix}jobs/{copies_made[0].id}?did=clone", status_code=303)
    copies_query = urlencode({"copies": len(copies_made), "named": copies_made[0].name})
    return RedirectResponse(f"{settings.prefix}jobs/{id}?{copies_query}", status_code=303)


@router.post("/jobs/{id}/{action}")
async def job_action(request: Request, id: Id, action: str, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Run the action of a button, then show the page again."""
    if action not in ACTIONS:
        raise MakewayError(
            f"There is no action {action[:40]}; a job can be cancelled, resumed, deleted or preempted as a test.",
            code="not_found",
            status=404,
        )
    _require_action_right(visitor)
    jobs = services.jobs
    settings: WebSettings = request.app.state.settings
    if action == "delete":
        deleted = await services.storage.delete_job(visitor.caller, id)
        return RedirectResponse(f"{settings.prefix}storage?jobs={deleted.jobs}&freed={deleted.bytes}", status_code=303)
    run = {"cancel": jobs.cancel, "resume": jobs.resume, "preempt-test": jobs.preempt_test}[action]
    await run(visitor.caller, id)
    return RedirectResponse(f"{settings.prefix}jobs/{id}?did={action}", status_code=303)


def _may_clone(visitor: Visitor, job: Job, template: str) -> bool:
    """Whether the page has the form of copies: its changing part has not, which would lose what is typed."""
    return template == "job.html" and not job.private and may(visitor.caller, "submit")


def _require_action_right(visitor: Visitor) -> None:
    if not may(visitor.caller, "submit") and not may_for_some(visitor.caller, "manage"):
        raise refusal(visitor.caller, ["submit", "manage"])


def _notice(request: Request) -> str | None:
    """Return what the button did that led to the page."""
    query = request.query_params
    if (attempt := query.get("attempt", "")).isdecimal() and (freed := query.get("freed", "")).isdecimal():
        return f"Deleted: the log and the result of attempt {int(attempt[:7])}, {size(int(freed[:18]))}."
    return ACTIONS.get(query.get("did", ""))


def _submitted_copies(request: Request) -> tuple[int, str] | None:
    """Return how many copies were submitted before the page was shown, and their name."""
    count = request.query_params.get("copies", "")[:7]
    return (int(count), request.query_params.get("named", "")[:200]) if count.isdecimal() else None


async def _may_change(services: Services, caller: Caller, job: Job) -> bool:
    if caller.name == job.owner or caller.admin:
        return may(caller, "submit") or may_for_some(caller, "manage")
    groups = [policy.groups for policy in await services.inventory.policies(caller) if policy.name == job.team]
    return any(caller.manages(tuple(groups_of_policy)) for groups_of_policy in groups)


async def _tail(services: Services, caller: Caller, job: Job) -> LogChunk:
    if job.attempt < 1 or job.private:
        return LogChunk(attempt=1, offset=0, next_offset=0, text="")
    return await services.outputs.log(caller, job.id, None, -TAIL_BYTES, TAIL_BYTES, 0)
