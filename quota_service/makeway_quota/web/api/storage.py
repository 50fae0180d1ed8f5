"""What is kept for whom, and its deletion: of one ended job, or of the ended jobs of a person."""

from __future__ import annotations

from fastapi import APIRouter
from makeway_api.models import StorageDelete, StorageDeleted, StorageReport

from ..dependencies import Admin, Id, Reader, TheServices, Toucher
from ..problems import declared

router = APIRouter(tags=["storage"], responses=declared())


@router.get("/storage", operation_id="storage", response_model=StorageReport)
async def storage(caller: Reader, services: TheServices) -> StorageReport:
    """Return what is kept for the caller, for an administrator of everybody, and the limits."""
    return await services.storage.report(caller)


@router.post(
    "/jobs/{id}/delete", operation_id="delete_job", response_model=StorageDeleted, responses=declared(404, 409, 410)
)
async def delete_job(id: Id, caller: Toucher, services: TheServices) -> StorageDeleted:
    """Delete an ended job for good, with its files, log, result and checkpoints."""
    return await services.storage.delete_job(caller, id)


@router.post("/storage/delete", operation_id="delete_storage", response_model=StorageDeleted)
async def delete_storage(caller: Admin, services: TheServices, request: StorageDelete) -> StorageDeleted:
    """Delete the ended jobs of a person for good, with their files, logs, results and checkpoints."""
    return await services.storage.delete_of_person(caller, request)
