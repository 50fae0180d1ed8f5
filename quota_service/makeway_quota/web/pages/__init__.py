"""The pages of the portal, all below the prefix: the panel, its lists, teams, nodes, jobs, policy and deployments."""

from __future__ import annotations

import logging

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError
from makeway_api.models import Problem

from ..login.auth import Visitor
from ..settings import WebSettings
from . import access, decisions, deployments, job, nodes, panel, policy, storage, team, workloads
from .figures.sharing import SharedParts
from .forms import credentials
from .parts import Histories
from .render import page

log = logging.getLogger(__name__)

PAGES = (panel, workloads, nodes, team, decisions, job, policy, storage, deployments, credentials)
ROUTERS = tuple(each.router for each in PAGES)


def install(app: FastAPI, settings: WebSettings) -> None:
    """Add every page to the app, and the way to the login for visitors who are not logged in."""
    app.state.parts = SharedParts()
    app.state.histories = Histories()
    app.include_router(router(settings))
    access.install(app)


def router(settings: WebSettings) -> APIRouter:
    """Return every page, below the prefix."""
    routes = APIRouter(prefix=settings.prefix.rstrip("/"), include_in_schema=False)
    for pages in ROUTERS:
        routes.include_router(pages)
    routes.add_api_route("/oauth_callback", oauth_callback, methods=["GET"])
    if settings.prefix != "/":
        routes.add_api_route("", to_panel, methods=["GET"])
    return routes


async def to_panel(request: Request) -> Response:
    """Return the address without its last slash."""
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(settings.prefix, status_code=302)


async def oauth_callback(request: Request) -> Response:
    """Return the address to which the Hub sends people back after the login."""
    authenticator = request.app.state.authenticator
    response: Response = await authenticator.directory.logged_in(request, authenticator)
    return response


async def error_page(request: Request, problem: Problem) -> Response:
    """Return a refusal as a page, without its visitor where the body of the request has been read."""
    authenticator = request.app.state.authenticator
    visitor: Visitor | None = None
    try:
        visitor = await authenticator.visitor(request)
    except (MakewayError, RuntimeError) as error:  # Starlette's for a body that was read
        log.debug("no visitor for an error page: %s", error)
    return await page(request, "error.html", visitor, status=problem.status, problem=problem)
