"""Deployments of machines in the browser: a list, one with its four panels, and the form; for administrators."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, File, Form, Query, Request, Response, UploadFile
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError
from makeway_api.models import Deployment, DeploymentRequest, PolicyCheck
from makeway_api.quantities import count

from ...autoscale.document import MAX_BYTES, read_deployment, schema
from ...autoscale.machine import FINISHED, STATES, MachineState
from ...policy import PolicyInvalid
from ...services import Services
from ..dependencies import ServicesDep
from ..login.auth import Authenticator, Visitor, may, refusal
from ..login.confirmations import confirmation, confirms
from ..settings import WebSettings
from .access import PageVisitor
from .forms.deployment_fields import NOT_OFFERED, Values, document_of, edited, form_of, is_at, typed_values, values_of
from .render import page, part

router = APIRouter(include_in_schema=False)

LOG_LINES = 50
LIVE: tuple[MachineState, ...] = tuple(state for state in STATES if state not in FINISHED)
MAX_MACHINES = 200
"""Machines that a page shows; the command lists all"""
COLOURS = {"ready": "success", "lost": "danger", "failed": "danger", "draining": "warning", "terminating": "warning"}
MACHINE: dict[str, Any] = {"colours": COLOURS, "over": FINISHED, "problem": ""}
"""What the page of each machine has"""
EXAMPLE = """\
name: cloud
provider: local
max_machines: 2
machine_types:
  - name: gpu-1
    pool: {pool}
    instance: small
    gpus: 1
    price: 1.00
"""
MAX_INTEGER = 2**31 - 1
PLACE = r"machine_types(\.\d{1,2}(\.schedule(\.\d{1,2})?)?)?"
ACTIONS = rf"^(validate|save|yaml|fields|(add|remove):{PLACE})$"
COMMENT = re.compile(r"(^|\s)#", re.MULTILINE)
NO_FIELDS = "The form has no fields for all of this document: correct it here, as YAML."


@router.get("/deployments")
@router.get("/live/deployments")
async def deployments_page(request: Request, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Show all deployments with their machines by state and their spend."""
    _only_administrators(visitor)
    result = await services.deployments.list_all(visitor.caller)
    return await page(request, part(request, "deployments"), visitor, deployments=result)


@router.get("/deployment-form")
async def form_page(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    name: Annotated[str, Query(max_length=63)] = "",
    copy: Annotated[str, Query(max_length=63)] = "",
) -> Response:
    """Return the form: of a new deployment, of one that is edited, or of a copy of one."""
    _only_administrators(visitor)
    if name:
        result = await services.deployments.read(visitor.caller, name)
        text = result.document or ""
        return await _form(request, visitor, _Typed(text, values_of(text)), version=result.version, name=name)
    pools = services.context.document.pools
    autoscaled = [pool.name for pool in pools if pool.kind == "autoscaled"]
    example = EXAMPLE.format(pool=[*autoscaled, *(pool.name for pool in pools), "cloud"][0])
    text = (await services.deployments.duplicate(visitor.caller, copy)).document if copy else example
    return await _form(request, visitor, _Typed(text, values_of(text)), version=0)


@router.post("/deployment-form")
async def save(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    document: Annotated[str, Form(max_length=500_000)] = "",
    version: Annotated[int, Form(ge=0, le=MAX_INTEGER)] = 0,
    name: Annotated[str, Form(max_length=63)] = "",
    mode: Annotated[str, Form(pattern="^(yaml|fields)$")] = "yaml",
    action: Annotated[str, Form(pattern=ACTIONS)] = "validate",
    confirmed: Annotated[str, Form(alias="confirmation", max_length=2000)] = "",
    marked: Annotated[bool, Form()] = False,
) -> Response:
    """Check a document or save it, as fields or as YAML; what was typed is never lost.

    It is saved by the second press of Save, on the page that shows what this document changes.
    """
    _only_administrators(visitor)
    text = document.replace("\r\n", "\n")
    typed = _Typed(text) if mode == "yaml" else _typed_fields(text, (await request.form()).multi_items())
    known: dict[str, Any] = {"version": version, "name": name}
    if action == "yaml":
        return await _form(request, visitor, _Typed(typed.text), **known)
    if action not in ("validate", "save", "fields"):
        values = edited(typed.values or {}, action)
        marks = await _marks(services, visitor, values, typed.values or {}) if marked else None
        return await _form(request, visitor, _Typed(text, values), check=marks, **known)
    check = await services.deployments.validate(visitor.caller, typed.text)
    if action == "fields":
        typed = _Typed(typed.text, values_of(typed.text))
        problem = None if typed.values else NO_FIELDS
        return await _form(request, visitor, typed, problem=problem, check=None if check.ok else check, **known)
    if not check.ok or action == "validate":
        return await _form(request, visitor, typed, status=200 if check.ok else 422, check=check, **known)
    authenticator: Authenticator = request.app.state.authenticator
    if not confirms(authenticator.signer, visitor, confirmed, typed.text, version):
        return await _question(request, visitor, typed, check=check, **known)
    try:
        saved = await services.deployments.save(visitor.caller, DeploymentRequest(document=typed.text, version=version))
    except MakewayError as error:
        known["stored"] = read_deployment(typed.text).name if error.status == 409 else ""
        return await _form(request, visitor, typed, status=error.status, problem=error.message, check=check, **known)
    return _to(request, saved.name)


@router.get("/deployment-import")
async def import_page(request: Request, visitor: PageVisitor) -> Response:
    """Show where the file of a deployment's document is chosen."""
    _only_administrators(visitor)
    return await page(request, "deployment_import.html", visitor, problem=None)


@router.post("/deployment-import")
async def import_document(
    request: Request,
    visitor: PageVisitor,
    services: ServicesDep,
    file: Annotated[UploadFile | None, File()] = None,
) -> Response:
    """Show the document of a file in the form with what it changes, or what is wrong; Save now there saves it."""
    _only_administrators(visitor)
    try:
        text = _text_of(await file.read(MAX_BYTES + 1) if file else b"")
    except ValueError as error:
        return await page(request, "deployment_import.html", visitor, status=422, problem=str(error))
    typed = _Typed(text, values_of(text))
    check = await services.deployments.validate(visitor.caller, text)
    name = read_deployment(text).name if check.ok else (typed.values or {}).get("name", "")
    here = {one.name: one.version for one in await services.deployments.list_all(visitor.caller)}
    known: dict[str, Any] = {"check": check, "version": here.get(name, 0), "name": name if name in here else ""}
    if not check.ok:
        return await _form(request, visitor, typed, status=422, **known)
    return await _question(request, visitor, typed, **known)


def _text_of(content: bytes) -> str:
    """Return the text of a file as the form has it; ValueError with a sentence where it is no document."""
    if not content:
        raise ValueError("no file was chosen, or it is empty. Choose the file of a document.")
    if len(content) > MAX_BYTES:
        raise ValueError(f"the file is larger than the {MAX_BYTES:,} bytes of a document.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError("the file is no text in UTF-8. Choose the file of a document, or save it as UTF-8.")
    return text.replace("\r\n", "\n")


@router.get("/deployments/{name}/document")
async def export(name: str, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Return the document of a deployment as a file, byte for byte as it was saved."""
    _only_administrators(visitor)
    result = await services.deployments.read(visitor.caller, name)
    headers = {"Content-Disposition": f'attachment; filename="{result.name}.yaml"'}
    return Response((result.document or "").encode(), media_type="application/yaml", headers=headers)


@router.get("/deployments/{name}")
@router.get("/live/deployments/{name}")
async def deployment_page(request: Request, name: str, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Show one deployment: idle machines, the tasks of its queues, running machines, their lines, and the log."""
    _only_administrators(visitor)
    return await _deployment(request, visitor, services, name)


async def _deployment(
    request: Request, visitor: Visitor, services: Services, name: str, asks: dict[str, str] | None = None
) -> Response:
    caller = visitor.caller
    result = await services.deployments.read(caller, name)
    machines = (await services.machines.page(caller, name, LIVE, MAX_MACHINES)).machines
    idle = [one for one in machines if one.state == "ready" and one.attempts == 0]
    return await page(
        request,
        part(request, "deployment"),
        visitor,
        deployment=result,
        asks=asks,
        idle=idle,
        running=[one for one in machines if one not in idle],
        queues=await services.listings.queues(caller, _profiles(services, result)),
        team_title=services.context.title,
        profile_titles={name: facts.title for name, facts in services.context.document.profile_facts.items()},
        timeline=await services.machines.timeline(caller, name),
        log=await services.machines.log(caller, name, LOG_LINES),
        colours=COLOURS,
    )


async def _currency(services: Services, visitor: Visitor, name: str) -> str:
    """Return the currency of a deployment's prices, "" where it is not there any more or cannot be read."""
    try:
        spend = (await services.deployments.read(visitor.caller, name)).spend
    except MakewayError:
        return ""
    return spend.currency if spend else ""


def _loss(deployment: Deployment) -> str:
    """Return what ends when a deployment is deleted."""
    live = sum(deployment.machines.values())
    if not live:
        return f"Delete the deployment {deployment.name}? It has no machines now."
    theirs = f"its {count(live, 'machine')} after a notice: the jobs there save and wait for other machines"
    return f"Delete the deployment {deployment.name}? That ends {theirs}."


def _profiles(services: Services, deployment: Deployment) -> set[str]:
    """Return the profiles whose work may run on machines of a deployment; all where its document cannot be read."""
    profiles = services.context.document.profiles
    if deployment.problem:
        return {one.name for one in profiles}
    pools = {one.pool for one in deployment.prices}
    return {one.name for one in profiles if pools.intersection(one.pools)}


@router.get("/deployments/{name}/machines/{id}")
@router.get("/live/deployments/{name}/machines/{id}")
async def machine_page(request: Request, name: str, id: str, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Show one machine with its history, and what its console and its init script wrote."""
    _only_administrators(visitor)
    result = await services.machines.machine(visitor.caller, name, id)
    known = MACHINE | {"machine": result, "currency": await _currency(services, visitor, name)}
    return await page(request, part(request, "machine"), visitor, **known)


@router.post("/deployments/{name}/machines/{id}")
async def read_console(request: Request, name: str, id: str, visitor: PageVisitor, services: ServicesDep) -> Response:
    """Read a machine's console from the provider, then show the machine again, with what is wrong if it failed."""
    _only_administrators(visitor)
    machine = await services.machines.machine(visitor.caller, name, id)
    try:
        await services.machines.console(visitor.caller, name, id)
    except MakewayError as error:
        currency = await _currency(services, visitor, name)
        told = MACHINE | {"machine": machine, "problem": error.message, "currency": currency}
        return await page(request, "machine.html", visitor, status=error.status, **told)
    return _to(request, f"{name}/machines/{id}")


@router.post("/deployments/{name}")
async def act(
    request: Request,
    name: str,
    visitor: PageVisitor,
    services: ServicesDep,
    action: Annotated[str, Form(pattern="^(pause|resume|delete)$")],
    confirmed: Annotated[str, Form(alias="confirmation", max_length=2000)] = "",
) -> Response:
    """Pause, resume or delete a deployment, then show it again; it is deleted by a second press, on a question."""
    _only_administrators(visitor)
    service = services.deployments
    if action == "delete" and not (stored := await service.read(visitor.caller, name)).deleting:
        signer = request.app.state.authenticator.signer
        subject = f"delete deployment {name}"
        if not confirms(signer, visitor, confirmed, subject, stored.version):
            token = confirmation(signer, visitor, subject, stored.version)
            return await _deployment(request, visitor, services, name, {"what": _loss(stored), "token": token})
    verb = {"pause": service.pause, "resume": service.resume, "delete": service.delete}[action]
    await verb(visitor.caller, name)
    return _to(request, name)


async def _marks(services: Services, visitor: Visitor, values: Values, before: Values) -> PolicyCheck | None:
    """Return what is wrong with fields that were there before a table was added or removed; None for nothing."""
    check = await services.deployments.validate(visitor.caller, document_of(values))
    new = {name: "" for name in values if name not in before}
    marks = [issue for issue in check.issues if not new or not is_at(issue, values, new)]
    return check.model_copy(update={"issues": marks}) if marks else None


class _Typed(NamedTuple):
    """What the form has: the document, and its fields; None where it is edited as YAML."""

    text: str
    values: Values | None = None


def _typed_fields(original: str, form: Iterable[tuple[str, Any]]) -> _Typed:
    """Return the document of the fields; the original one, with its comments, where they say the same."""
    values = typed_values(form)
    text = document_of(values)
    try:
        if read_deployment(original) == read_deployment(text):
            text = original
    except PolicyInvalid:
        pass
    return _Typed(text, values)


async def _form(request: Request, visitor: Visitor, typed: _Typed, status: int = 200, **values: Any) -> Response:
    known: dict[str, Any] = {"check": None, "problem": None, "confirmation": None, "name": "", "stored": ""} | values
    check: PolicyCheck | None = known["check"]
    issues = check.issues if check else []
    form, others = (None, issues) if typed.values is None else form_of(typed.values, issues)
    shown = {
        **known,
        "document": typed.text,
        "form": form,
        "issues": others,
        "asks": bool(known["confirmation"]),
        "commented": typed.values is not None and bool(COMMENT.search(typed.text)),
        "not_offered": NOT_OFFERED,
        "fields": {table: lines for table, lines in schema().items() if not form or table.startswith("settings")},
    }
    return await page(request, "deployment_form.html", visitor, status=status, **shown)


async def _question(request: Request, visitor: Visitor, typed: _Typed, version: int, **values: Any) -> Response:
    """Return the form with what its document changes: the next press of Save saves it."""
    token = confirmation(request.app.state.authenticator.signer, visitor, typed.text, version)
    return await _form(request, visitor, typed, version=version, confirmation=token, **values)


def _to(request: Request, name: str) -> Response:
    settings: WebSettings = request.app.state.settings
    return RedirectResponse(f"{settings.prefix}deployments/{name}", status_code=303)


def _only_administrators(visitor: Visitor) -> None:
    if not may(visitor.caller, "admin"):
        raise refusal(visitor.caller, ["admin"])
