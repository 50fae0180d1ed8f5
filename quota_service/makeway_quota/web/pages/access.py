"""Access to pages: a visitor who is logged in and may read; others are sent to the Hub's login."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response

from ...services import Services
from ..login.auth import Authenticator, Visitor, may, refusal


class NeedsLogin(Exception):
    """The visitor is not logged in; the answer is a redirect to the Hub's login."""


async def page_visitor(request: Request) -> Visitor:
    """Return the visitor of a page; NeedsLogin without one, a refusal without the scope `read`.

    The newest event is noted before anything is read for the page: its stream begins there (`render.page`).
    """
    authenticator: Authenticator = request.app.state.authenticator
    visitor = await authenticator.visitor(request)
    if visitor is None:
        raise NeedsLogin
    if not may(visitor.caller, "read"):
        raise refusal(visitor.caller, ["read"])
    services: Services = request.app.state.services
    request.state.after = await services.feed.newest()
    return visitor


PageVisitor = Annotated[Visitor, Depends(page_visitor)]


def install(app: FastAPI) -> None:
    """Answer NeedsLogin with a redirect; a part of a page that is refreshed gets the order to reload the whole page."""

    async def to_login(request: Request, error: Exception) -> Response:
        authenticator: Authenticator = request.app.state.authenticator
        if "hx-request" in request.headers:
            return Response(status_code=204, headers={"HX-Refresh": "true"})
        return await authenticator.directory.login(request, authenticator)

    app.add_exception_handler(NeedsLogin, to_login)
