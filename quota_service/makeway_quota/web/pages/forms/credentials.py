"""Credentials in the browser: their names, kinds and uses, and a form that adds, rotates and deletes; write-only.

No answer has a value, not even that with what is wrong with it: it has to be typed again. Administrators see all;
others see those of their teams, and change those of the teams that they lead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError
from makeway_api.models import CREDENTIAL_NAME, Credential, CredentialRequest
from makeway_api.models.credentials import CredentialKind, parse_cloud_values
from pydantic import SecretStr

from ....policy.quantities import SLUG_RULE
from ....services import Services
from ....services.refusals import refuse
from ...dependencies import ServicesDep
from ...login.auth import Authenticator, Visitor
from ...login.confirmations import confirmation, confirms
from ...settings import WebSettings
from ..access import PageVisitor
from ..render import page

router = APIRouter(include_in_schema=False)

KINDS: Mapping[CredentialKind, str] = {
    "git": "of a Git server, for jobs",
    "file": "a file for jobs, such as the keys of a storage",
    "cloud": "the login of the deployment of this name",
}
MAX_VALUE = 65_536
"""Characters of a value, as in the API"""
NOTHING = SecretStr("")
NAME = re.compile(CREDENTIAL_NAME)
BAD_NAME = f"A name has {SLUG_RULE}."
AGAIN = "The value was not kept: enter it again."


@dataclass(frozen=True, slots=True)
class CredentialForm:
    """What is typed, without the value. `replaces`: the name of the credential that is rotated, "" for a new one.

    One that is rotated keeps its team.
    """

    name: str = ""
    kind: CredentialKind = "git"
    team: str = ""
    host: str = ""
    user: str = ""
    replaces: str = ""


@router.get("/credentials")
async def credentials_page(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    rotate: Annotated[str, Query(max_length=63)] = "",
    team: Annotated[str, Query(max_length=200)] = "",
    done: Annotated[str, Query(max_length=63)] = "",
    deleted: Annotated[str, Query(max_length=63)] = "",
    enabled: Annotated[str, Query(max_length=63)] = "",
) -> Response:
    """Show the visitor's credentials without their values; with `rotate`, the form that replaces the value of one."""
    found = await _stored(services, visitor, team, rotate)
    form = CredentialForm()
    if found is not None:
        form = CredentialForm(found.name, _kind(found.kind), found.team, replaces=found.name)
    whose = f" of {services.context.title(team)}" if team else ""
    told = {f"{done}{whose} is set.": done, f"{deleted}{whose} is deleted.": deleted}
    told[f"{enabled}{whose} is enabled."] = enabled
    notice = next((sentence for sentence, name in told.items() if name), None)
    notice = notice if services.credentials.may_change(visitor.caller, team) else None
    return await _page(request, visitor, services, form, notice=notice)


@router.post("/credentials")
async def save(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    name: Annotated[str, Form()] = "",
    kind: Annotated[CredentialKind, Form()] = "git",
    team: Annotated[str, Form(max_length=200)] = "",
    host: Annotated[str, Form(max_length=300)] = "",
    user: Annotated[str, Form(max_length=300)] = "",
    value: Annotated[SecretStr, Form()] = NOTHING,
    replaces: Annotated[str, Form(max_length=63)] = "",
) -> Response:
    """Add a credential, or replace the value of the one that was opened to be rotated."""
    form = CredentialForm(name.strip()[:200], kind, team, host.strip(), user.strip(), replaces)
    text = value.get_secret_value().replace("\r\n", "\n")
    try:
        await _check(services, visitor, form, text)
        wanted = CredentialRequest(kind=kind, team=team, values=_values(form, text))
        await services.credentials.save(visitor.caller, form.name, wanted)
    except MakewayError as error:
        problem = f"{error.message} {AGAIN}" if text.strip() else error.message
        return await _page(request, visitor, services, form, status=error.status, problem=problem)
    return _redirect(request, team, done=form.name)


@router.post("/credentials/{name}/delete")
async def delete(
    request: Request,
    name: str,
    visitor: PageVisitor,
    services: ServicesDep,
    team: Annotated[str, Form(max_length=200)] = "",
    confirmed: Annotated[str, Form(alias="confirmation", max_length=2000)] = "",
) -> Response:
    """Delete a credential; one that is in use by the second press, on the page that says what uses it."""
    found = await _stored(services, visitor, team, name)
    if (
        found is not None
        and services.credentials.may_change(visitor.caller, team)
        and (use := await _use(services, visitor, found))
    ):
        signer = _signer(request)
        subject = f"delete credential {name} of {team or 'all teams'} of {found.updated_at.isoformat()}"
        if not confirms(signer, visitor, confirmed, subject, 0):
            token = confirmation(signer, visitor, subject, 0)
            asks = {"name": name, "team": team, "use": use, "token": token, "cloud": found.kind == "cloud"}
            return await _page(request, visitor, services, CredentialForm(), asks=asks)
    try:
        await services.credentials.delete(visitor.caller, name, team)
    except MakewayError as error:
        if error.status != 409:
            raise
        return await _page(request, visitor, services, CredentialForm(), status=error.status, problem=error.message)
    return _redirect(request, team, deleted=name)


@router.post("/credentials/{name}/enable")
async def enable(
    request: Request,
    name: str,
    visitor: PageVisitor,
    services: ServicesDep,
    team: Annotated[str, Form(max_length=200)] = "",
) -> Response:
    """Enable a credential that was disabled when its team left the policy."""
    await services.credentials.enable(visitor.caller, name, team)
    return _redirect(request, team, enabled=name)


async def _stored(services: Services, visitor: Visitor, team: str, name: str) -> Credential | None:
    credentials = await services.credentials.list_all(visitor.caller)
    return next((one for one in credentials if (one.team, one.name) == (team, name)), None)


async def _check(services: Services, visitor: Visitor, form: CredentialForm, text: str) -> None:
    """Refuse what the command and the API refuse, and a name that would replace another credential unseen."""
    services.credentials.check_rights(visitor.caller, form.team)
    if not NAME.fullmatch(form.name):
        raise _invalid(BAD_NAME)
    if not text.strip():
        raise _invalid("There is no value.")
    if len(text) > MAX_VALUE:
        raise _invalid(f"The value has more than {MAX_VALUE:,} characters.")
    there = await _stored(services, visitor, form.team, form.name)
    whose = f" of {services.context.title(form.team)}" if form.team else ""
    if form.replaces and there is None:
        raise refuse(f"There is no credential {form.name}{whose} any more: add it anew.", "other_credential", 409)
    if there is not None and form.name != form.replaces:
        message = f"There is a credential {form.name}{whose} already: rotate it in the list, or use another name."
        raise refuse(message, "other_credential", 409)


def _values(form: CredentialForm, text: str) -> dict[str, SecretStr]:
    if form.kind == "file":
        return {"content": SecretStr(text)}
    if form.kind == "git":
        if not form.host or not form.user:
            raise _invalid("A credential of the kind git needs its server and its user.")
        return {"host": SecretStr(form.host), "user": SecretStr(form.user), "token": SecretStr(text.strip())}
    try:
        result = {name: SecretStr(value) for name, value in parse_cloud_values(text).items()}
    except ValueError as error:
        raise _invalid(str(error)) from None
    if len(result) > 16 or any(len(key) > 64 for key in result):
        raise _invalid(
            "A credential of the kind cloud has at most 16 values, each with a name of at most 64 characters."
        )
    return result


async def _use(services: Services, visitor: Visitor, one: Credential) -> str:
    """Return what uses a credential, "" for a disabled one and one of the kind cloud without a deployment."""
    if one.disabled_at is not None:
        return ""
    if one.kind == "cloud":
        names = {deployment.name for deployment in await services.deployments.list_all(visitor.caller)}
        return f"the deployment {one.name}" if one.name in names else ""
    return f"jobs of {services.context.title(one.team)}" if one.team else "jobs of all teams"


async def _page(
    request: Request, visitor: Visitor, services: Services, form: CredentialForm, status: int = 200, **values: Any
) -> Response:
    caller, credentials = visitor.caller, services.credentials
    whole = credentials.may_change(caller, "")
    deployments = {one.name for one in await services.deployments.list_all(caller)} if whole else set()
    teams = {policy.name: policy.label for policy in services.context.document.policies}
    known: dict[str, Any] = {"problem": None, "notice": None, "asks": None} | values
    shown = {
        "credentials": await credentials.list_all(caller),
        "deployments": deployments,
        "teams": teams,
        "own_teams": {name: title for name, title in teams.items() if credentials.may_change(caller, name)},
        "whole": whole,
        "kinds": {kind: words for kind, words in KINDS.items() if whole or kind != "cloud"},
        "form": form,
    }
    return await page(request, "credentials.html", visitor, status=status, **shown, **known)


def _redirect(request: Request, team: str, **notice: str) -> Response:
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(
        f"{settings.prefix}credentials?{urlencode({'team': team} | notice if team else notice)}", status_code=303
    )


def _signer(request: Request) -> Any:
    authenticator: Authenticator = request.app.state.authenticator
    return authenticator.signer


def _kind(kind: str) -> CredentialKind:
    return next((known for known in KINDS if known == kind), "git")


def _invalid(message: str) -> MakewayError:
    return refuse(message, "invalid_credential", 422)
