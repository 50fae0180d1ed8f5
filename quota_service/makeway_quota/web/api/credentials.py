"""Serve credentials of jobs: list, set and delete them; no answer has their values."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from makeway_api.models import CREDENTIAL_NAME, Credential, CredentialRequest, Resealed

from ..dependencies import Admin, AdminByToken, TheServices
from ..server.problems import declared

router = APIRouter(prefix="/credentials", tags=["credentials"], responses=declared())

Name = Annotated[str, Path(pattern=CREDENTIAL_NAME, description="its name; of a file, its name in jobs")]


@router.get("", operation_id="credentials", response_model=list[Credential])
async def credentials(caller: Admin, services: TheServices) -> list[Credential]:
    """Return all credentials by name, without their values."""
    return await services.credentials.every(caller)


@router.put(
    "/{name}", operation_id="credential_save", response_model=Credential, responses=declared(409, 413, 415, 422)
)
async def save(caller: AdminByToken, services: TheServices, name: Name, request: CredentialRequest) -> Credential:
    """Keep a credential in place of the one with its name. Jobs get it as a file from their next attempt on."""
    return await services.credentials.save(caller, name, request)


@router.delete("/{name}", operation_id="credential_delete", status_code=204, responses=declared(404))
async def delete(caller: AdminByToken, services: TheServices, name: Name) -> Response:
    """Remove a credential; attempts that run keep theirs until they end."""
    await services.credentials.delete(caller, name)
    return Response(status_code=204)


@router.post("/reseal", operation_id="credentials_reseal", response_model=Resealed, responses=declared(409))
async def reseal(caller: AdminByToken, services: TheServices) -> Resealed:
    """Seal all credentials with the first key of the file, so that its other keys can be removed."""
    return await services.credentials.reseal(caller)
