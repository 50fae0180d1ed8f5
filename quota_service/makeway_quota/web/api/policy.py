"""Serve the policy document: read, validate, preview, apply."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from makeway_api.models import PolicyCheck, PolicyRequest, PolicyVersion, Preview

from ..dependencies import AdminByToken, Manager, ServicesDep
from ..server.problems import problems

router = APIRouter(prefix="/policy", tags=["policy"], responses=problems())


@router.get("", operation_id="policy", response_model=PolicyVersion)
async def current(caller: Manager, services: ServicesDep) -> PolicyVersion:
    """Return the document in force; a lead gets the policies of its own teams."""
    return await services.policies.current(caller)


@router.get("/history", operation_id="policy_history", response_model=list[PolicyVersion])
async def history(caller: Manager, services: ServicesDep) -> list[PolicyVersion]:
    """Return every version, newest first, without the documents."""
    return await services.policies.history(caller)


@router.get("/versions/{n}", operation_id="policy_version", response_model=PolicyVersion, responses=problems(404))
async def version(caller: Manager, services: ServicesDep, n: Annotated[int, Path(ge=1, le=2**31 - 1)]) -> PolicyVersion:
    """Return one version with its document; a lead gets the policies of its own teams."""
    return await services.policies.version(caller, n)


@router.post("/validate", operation_id="policy_validate", response_model=PolicyCheck, responses=problems(413, 415))
async def validate(caller: Manager, services: ServicesDep, request: PolicyRequest) -> PolicyCheck:
    """Return what is wrong with a document, by line, or what it would change."""
    return await services.policies.validate(caller, request.document)


@router.post("/preview", operation_id="policy_preview", response_model=Preview, responses=problems(413, 415))
async def preview(caller: Manager, services: ServicesDep, request: PolicyRequest) -> Preview:
    """Return which workloads would start, be evicted, wait or be refused."""
    return await services.policies.preview(caller, request.document)


@router.put("", operation_id="policy_apply", response_model=PolicyVersion, responses=problems(409, 413, 415))
async def apply(caller: AdminByToken, services: ServicesDep, request: PolicyRequest) -> PolicyVersion:
    """Apply a document; 409 if `base`, the version that it was edited from, is not in force any more.

    A token of the Hub is needed: with the cookie of a login a document is applied on the policy page, which shows first
    what it does.
    """
    return await services.policies.apply(caller, request)
