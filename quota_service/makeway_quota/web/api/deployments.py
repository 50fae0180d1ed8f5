"""Serve deployments of machines: read, validate, save, pause, duplicate, delete; their machines and their log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from makeway_api.models import (
    Deployment,
    DeploymentDraft,
    DeploymentRequest,
    MachineDetail,
    MachineLogEntry,
    MachinePage,
    PolicyCheck,
)

from ...autoscale.machine import MachineState
from ..dependencies import MAX_INTEGER, Admin, AdminByToken, ServicesDep
from ..server.problems import json_list_response, json_response, problems

router = APIRouter(prefix="/deployments", tags=["deployments"], responses=problems())

Name = Annotated[str, Path(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$", description="the name of a deployment")]
MachineId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="the id of a machine")]
Version = Annotated[
    int | None, Query(ge=1, le=2**31 - 1, description="the version that was read; 409 if the stored one differs")
]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.get("", operation_id="deployments", response_model=list[Deployment])
async def deployments(caller: Admin, services: ServicesDep) -> list[Deployment]:
    """Return all deployments by name, with counts of their machines by state and their spend, without documents."""
    return await services.deployments.list_all(caller)


@router.post("/validate", operation_id="deployment_validate", response_model=PolicyCheck, responses=problems(413, 415))
async def validate(caller: Admin, services: ServicesDep, request: DeploymentRequest) -> PolicyCheck:
    """Return what is wrong with a document, by line, or what it would change."""
    return await services.deployments.validate(caller, request.document)


@router.put("", operation_id="deployment_save", response_model=Deployment, responses=problems(409, 413, 415))
async def save(caller: AdminByToken, services: ServicesDep, request: DeploymentRequest) -> Deployment:
    """Create a deployment, or replace its document; its name is in the document.

    409 if the stored version is not `version`, the one that was edited: `numbers` have the stored version and document.
    """
    return await services.deployments.save(caller, request)


@router.get("/{name}", operation_id="deployment", response_model=Deployment, responses=problems(404))
async def deployment(caller: Admin, services: ServicesDep, name: Name) -> Deployment:
    """Return one deployment with its document."""
    return await services.deployments.read(caller, name)


@router.delete("/{name}", operation_id="deployment_delete", response_model=Deployment, responses=problems(404, 409))
async def delete(caller: AdminByToken, services: ServicesDep, name: Name, version: Version = None) -> Deployment:
    """Begin to delete a deployment: its machines end first, and it is gone after the last one."""
    return await services.deployments.delete(caller, name, version)


@router.post("/{name}/pause", operation_id="deployment_pause", response_model=Deployment, responses=problems(404, 409))
async def pause(caller: AdminByToken, services: ServicesDep, name: Name, version: Version = None) -> Deployment:
    """Set `paused: true` in the document: no machine is launched, and those that run end after a notice."""
    return await services.deployments.pause(caller, name, version)


@router.post(
    "/{name}/resume", operation_id="deployment_resume", response_model=Deployment, responses=problems(404, 409)
)
async def resume(caller: AdminByToken, services: ServicesDep, name: Name, version: Version = None) -> Deployment:
    """Set `paused: false` in the document: machines are launched again when work waits."""
    return await services.deployments.resume(caller, name, version)


@router.get(
    "/{name}/duplicate",
    operation_id="deployment_duplicate",
    response_model=DeploymentDraft,
    responses=problems(404),
)
async def duplicate(caller: Admin, services: ServicesDep, name: Name) -> DeploymentDraft:
    """Return a copy of the document under an unused name, to be edited; nothing is saved."""
    return await services.deployments.duplicate(caller, name)


@router.get("/{name}/machines", operation_id="deployment_machines", response_model=MachinePage, responses=problems(404))
async def machines(
    caller: Admin,
    services: ServicesDep,
    name: Name,
    state: Annotated[list[MachineState] | None, Query(description="only machines in these states")] = None,
    limit: Limit = 100,
    cursor: Annotated[str | None, Query(max_length=200, description="`next` of the previous page")] = None,
) -> Response:
    """Return one page of the machines of a deployment, also finished ones, newest first."""
    return json_response(await services.machines.page(caller, name, state, limit, cursor))


@router.get(
    "/{name}/machines/{id}",
    operation_id="deployment_machine",
    response_model=MachineDetail,
    responses=problems(404),
)
async def machine(caller: Admin, services: ServicesDep, name: Name, id: MachineId) -> Response:
    """Return one machine with its history and the output of its console and its init script."""
    return json_response(await services.machines.machine(caller, name, id))


@router.post(
    "/{name}/machines/{id}/console",
    operation_id="deployment_console",
    response_model=MachineDetail,
    responses=problems(404, 409, 503),
)
async def console(caller: AdminByToken, services: ServicesDep, name: Name, id: MachineId) -> Response:
    """Read the console output of a machine from its provider; its first and last 32 Ki characters are kept."""
    return json_response(await services.machines.console(caller, name, id))


@router.get("/{name}/log", operation_id="deployment_log", response_model=list[MachineLogEntry], responses=problems(404))
async def log(
    caller: Admin,
    services: ServicesDep,
    name: Name,
    limit: Limit = 100,
    before: Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="only events with a smaller id")] = None,
) -> Response:
    """Return the log of a deployment and its machines, newest first."""
    return json_list_response(await services.machines.log(caller, name, limit, before))
