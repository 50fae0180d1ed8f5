"""Serve credentials of jobs: list, set and delete them; no answer has their values, or names of other teams."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from makeway_api.models import CREDENTIAL_NAME, Credential, CredentialRequest, Resealed

from ..dependencies import AdminByToken, ManagerByToken, Reader, ServicesDep
from ..server.problems import problems

router = APIRouter(prefix="/credentials", tags=["credentials"], responses=problems())

Name = Annotated[str, Path(pattern=CREDENTIAL_NAME, description="its name; a file has this name in jobs")]
Team = Annotated[
    str | None,
    Query(
        max_length=200,
        description="its team; empty: it is of all teams; may be omitted where the name is unique",
    ),
]


@router.get("", operation_id="credentials", response_model=list[Credential])
async def credentials(caller: Reader, services: ServicesDep) -> list[Credential]:
    """Return the credentials of the caller's teams, for administrators all, without their values."""
    return await services.credentials.list_all(caller)


@router.put(
    "/{name}", operation_id="credential_save", response_model=Credential, responses=problems(409, 413, 415, 422)
)
async def save(caller: ManagerByToken, services: ServicesDep, name: Name, request: CredentialRequest) -> Credential:
    """Create or replace the credential of a team and name. Jobs get it as a file from their next attempt on."""
    return await services.credentials.save(caller, name, request)


@router.delete("/{name}", operation_id="credential_delete", status_code=204, responses=problems(404, 409))
async def delete(caller: ManagerByToken, services: ServicesDep, name: Name, team: Team = None) -> Response:
    """Delete a credential; running attempts keep it until they end."""
    await services.credentials.delete(caller, name, team)
    return Response(status_code=204)


@router.post(
    "/{name}/enable", operation_id="credential_enable", response_model=Credential, responses=problems(404, 409)
)
async def enable(
    caller: AdminByToken,
    services: ServicesDep,
    name: Name,
    team: Annotated[str, Query(max_length=200, description="its team, which is in the policy again")],
) -> Credential:
    """Enable a credential that was disabled when its team left the policy. Jobs get it from their next attempt on."""
    return await services.credentials.enable(caller, name, team)


@router.post("/reseal", operation_id="credentials_reseal", response_model=Resealed, responses=problems(409))
async def reseal(caller: AdminByToken, services: ServicesDep) -> Resealed:
    """Encrypt all credentials anew with the first key of the key file, so that its other keys can be removed."""
    return await services.credentials.reseal(caller)
