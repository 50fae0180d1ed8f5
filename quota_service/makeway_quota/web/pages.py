"""The pages: the panel, a team, a job, and how a refusal looks to a person."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError
from makeway_api.models import Job, LogChunk, Problem

from ..services import Caller, Services
from . import policy_page
from .auth import Visitor, may, may_for_some, refusal
from .dependencies import BIG, Id, Name, TheServices
from .page_access import PageVisitor
from .panel import gather, look_of
from .render import page
from .settings import WebSettings

log = logging.getLogger(__name__)

TAIL = 64 * 2**10
"""Bytes of a job's output that its page begins with"""

ACTIONS = {
    "cancel": "It is being cancelled.",
    "resume": "It is back in the queue and goes on from its last checkpoint.",
    "preempt-test": "The rehearsal began: the job saves, leaves and comes back.",
}


def router(settings: WebSettings) -> APIRouter:
    """Every page, below the prefix."""
    routes = APIRouter(prefix=settings.prefix.rstrip("/"), include_in_schema=False)
    for path in ("/", "/live/board"):
        routes.add_api_route(path, board, methods=["GET"])
    for path in ("/teams/{team}", "/live/teams/{team}"):
        routes.add_api_route(path, team_page, methods=["GET"])
    for path in ("/jobs/{id}", "/live/jobs/{id}"):
        routes.add_api_route(path, job_page, methods=["GET"])
    routes.add_api_route("/decisions", decisions_page, methods=["GET"])
    routes.add_api_route("/jobs/{id}/{action}", job_action, methods=["POST"])
    routes.add_api_route("/oauth_callback", oauth_callback, methods=["GET"])
    routes.include_router(policy_page.router)
    if settings.prefix != "/":
        routes.add_api_route("", to_board, methods=["GET"])
    return routes


async def to_board(request: Request) -> Response:
    """The address without its last slash."""
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(settings.prefix, status_code=302)


async def oauth_callback(request: Request) -> Response:
    """Where the Hub sends people back to."""
    authenticator = request.app.state.authenticator
    response: Response = await authenticator.directory.logged_in(request, authenticator)
    return response


async def board(request: Request, visitor: PageVisitor, services: TheServices) -> Response:
    """The panel, whole or (below live/) only its changing part."""
    found = await gather(services, visitor.caller, request.app.state.settings)
    return page(request, _part(request, "board"), visitor, board=found)


async def team_page(request: Request, team: str, visitor: PageVisitor, services: TheServices) -> Response:
    """One team: usage, queue, what runs, what was decided."""
    policies = await services.inventory.policies(visitor.caller)
    policy = next((policy for policy in policies if policy.name == team), None)
    if policy is None:
        raise _no_team(visitor.caller, team)
    found = await gather(services, visitor.caller, request.app.state.settings, team)
    return page(request, _part(request, "team"), visitor, board=found, team=team, policy=policy)


async def decisions_page(
    request: Request,
    visitor: PageVisitor,
    services: TheServices,
    team: Name = None,
    before: Annotated[int | None, Query(ge=0, le=BIG)] = None,
) -> Response:
    """The decision log, a hundred lines a page."""
    caller = visitor.caller
    return page(
        request,
        "decisions.html",
        visitor,
        decisions=await services.audit.decisions(caller, None, team, 100, before),
        look=look_of(services, caller, await services.usage.usage(caller), [], request.app.state.settings),
        team=team,
    )


async def job_page(request: Request, id: Id, visitor: PageVisitor, services: TheServices) -> Response:
    """One job: state and reason, attempts, decisions, its output."""
    caller, settings = visitor.caller, request.app.state.settings
    job = await services.jobs.job(caller, id)
    part = _part(request, "job")
    return page(
        request,
        part,
        visitor,
        job=job,
        look=look_of(services, caller, await services.usage.usage(caller), [], settings),
        decisions=list(reversed(await services.jobs.events(caller, id)))[:100],
        failure=await services.outputs.error(caller, id) if job.state.value == "failed" and not job.private else None,
        may_touch=await _may_touch(services, caller, job),
        tail=await _tail(services, caller, job) if part == "job.html" else None,
        notice=ACTIONS.get(request.query_params.get("did", "")),
    )


async def job_action(request: Request, id: Id, action: str, visitor: PageVisitor, services: TheServices) -> Response:
    """A button of the job page: do it, then show the page again."""
    if action not in ACTIONS:
        raise MakewayError("There is no such button.", code="not_found", status=404)
    if not may(visitor.caller, "submit") and not may_for_some(visitor.caller, "manage"):
        raise refusal(visitor.caller, ["submit", "manage"])
    jobs = services.jobs
    do = {"cancel": jobs.cancel, "resume": jobs.resume, "preempt-test": jobs.preempt_test}[action]
    await do(visitor.caller, id)
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(f"{settings.prefix}jobs/{id}?did={action}", status_code=303)


async def error_page(request: Request, problem: Problem) -> Response:
    """Say it friendly; who is not logged in goes to log in."""
    authenticator = request.app.state.authenticator
    visitor: Visitor | None = None
    try:
        visitor = await authenticator.visitor(request)
    except MakewayError as error:
        log.debug("no visitor for an error page: %s", error)
    return page(request, "error.html", visitor, status=problem.status, problem=problem)


def _part(request: Request, name: str) -> str:
    settings: WebSettings = request.app.state.settings
    return f"_{name}.html" if request.url.path.startswith(f"{settings.prefix}live/") else f"{name}.html"


def _no_team(caller: Caller, team: str) -> MakewayError:
    if caller.admin:
        return MakewayError(f"There is no team {team[:80]}.", code="not_found", status=404)
    return MakewayError(
        f"You are not in the team {team[:80]}, so its page is not for you. "
        "An administrator of the Hub can add you to its group.",
        code="foreign_team",
        status=403,
    )


async def _may_touch(services: Services, caller: Caller, job: Job) -> bool:
    if caller.name == job.owner or caller.admin:
        return may(caller, "submit") or may_for_some(caller, "manage")
    groups = [policy.groups for policy in await services.inventory.policies(caller) if policy.name == job.team]
    return any(caller.manages(tuple(found)) for found in groups)


async def _tail(services: Services, caller: Caller, job: Job) -> LogChunk:
    if job.attempt < 1 or job.private:
        return LogChunk(attempt=1, offset=0, next_offset=0, text="")
    return await services.outputs.log(caller, job.id, None, -TAIL, TAIL, 0)
