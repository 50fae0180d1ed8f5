"""The policy document in the browser: show, edit, validate, preview, apply; for administrators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError
from makeway_api.models import PolicyRequest

from ...services import Services
from ..dependencies import ServicesDep
from ..login.auth import Authenticator, Visitor, may
from ..login.confirmations import confirmation, confirms
from ..settings import WebSettings
from .access import PageVisitor
from .render import page

router = APIRouter()

MAX_INTEGER = 2**31 - 1


@router.get("/policy")
async def show(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    version: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    applied: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
) -> Response:
    """Return the document in force, or an earlier version of it to start from."""
    _only_admins(visitor)
    current = await services.policies.current(visitor.caller)
    shown = current if version is None else await services.policies.version(visitor.caller, version)
    notice = f"Version {applied} is in force." if applied else None
    return await _page(
        request,
        visitor,
        services,
        document=shown.document or "",
        shown=shown.version,
        base=current.version,
        notice=notice,
    )


@router.post("/policy")
async def change(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    document: Annotated[str, Form(max_length=1_000_000)] = "",
    action: Annotated[str, Form(pattern="^(validate|preview|apply)$")] = "validate",
    comment: Annotated[str, Form(max_length=500)] = "",
    base: Annotated[int | None, Form(ge=0, le=MAX_INTEGER)] = None,
    confirmed: Annotated[str, Form(alias="confirmation", max_length=2000)] = "",
) -> Response:
    """One of the three buttons; what was typed is never lost.

    A document is applied by the second press of Apply, on the page that shows what this document does.
    """
    _only_admins(visitor)
    text = document.replace("\r\n", "\n")
    if base is None:
        base = (await services.policies.current(visitor.caller)).version
    authenticator: Authenticator = request.app.state.authenticator
    signer = authenticator.signer
    values: dict[str, Any] = {"document": text, "base": base, "shown": base, "comment": comment}
    check = await services.policies.validate(visitor.caller, text)
    if not check.ok or action == "validate":
        status = 200 if check.ok else 422
        return await _page(request, visitor, services, status=status, check=check, **values)
    try:
        if action == "preview" or not confirms(signer, visitor, confirmed, text, base):
            values["confirmation"] = confirmation(signer, visitor, text, base)
            values["asks"] = action == "apply"
            values["preview"] = await services.policies.preview(visitor.caller, text)
            return await _page(request, visitor, services, check=check, **values)
        made = await services.policies.apply(visitor.caller, PolicyRequest(document=text, comment=comment, base=base))
    except MakewayError as error:
        return await _page(request, visitor, services, status=error.status, problem=error.message, **values)
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(f"{settings.prefix}policy?applied={made.version}", status_code=303)


async def _page(request: Request, visitor: Visitor, services: Services, status: int = 200, **values: Any) -> Response:
    known = {
        **{"check": None, "preview": None, "problem": None, "notice": None, "comment": ""},
        **{"confirmation": None, "asks": False},
        **values,
    }
    caller = visitor.caller
    titles = {policy.name: policy.title or policy.name for policy in await services.inventory.policies(caller)}
    current, history = await services.policies.current(caller), await services.policies.history(caller)
    return await page(
        request, "policy.html", visitor, status=status, current=current, history=history[:200], titles=titles, **known
    )


def _only_admins(visitor: Visitor) -> None:
    if not may(visitor.caller, "admin"):
        raise MakewayError(
            "The policy is changed by administrators only. Your team's quota is on your team's page.",
            code="forbidden",
            status=403,
        )
