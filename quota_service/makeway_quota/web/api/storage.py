"""What is kept for whom, and its deletion: of one ended job, or of the ended jobs of a person."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from makeway_api.models import JobStorage, StorageDelete, StorageDeleted, StorageGrowth, StorageReport

from ..dependencies import Admin, Id, JobEditor, Reader, ServicesDep
from ..server.problems import problems

Attempt = Annotated[int, Path(ge=1, le=1_000_000)]

router = APIRouter(tags=["storage"], responses=problems())


@router.get("/storage", operation_id="storage", response_model=StorageReport)
async def storage(caller: Reader, services: ServicesDep) -> StorageReport:
    """Return what is kept for the caller, for an administrator of everybody, and the limits."""
    return await services.storage.report(caller)


@router.post(
    "/jobs/{id}/delete",
    operation_id="delete_job",
    response_model=StorageDeleted,
    responses=problems(404, 409, 410),
)
async def delete_job(id: Id, caller: JobEditor, services: ServicesDep) -> StorageDeleted:
    """Delete an ended job for good, with its files, log, result and checkpoints."""
    return await services.storage.delete_job(caller, id)


@router.get("/storage/growth", operation_id="storage_growth", response_model=StorageGrowth)
async def storage_growth(_: Admin, services: ServicesDep) -> StorageGrowth:
    """Return what was kept each day, what grows, and in how many days it is full at this rate."""
    return await services.growth.growth()


@router.get(
    "/jobs/{id}/storage",
    operation_id="job_storage",
    response_model=JobStorage,
    responses=problems(403, 404, 410),
)
async def job_storage(id: Id, caller: Reader, services: ServicesDep) -> JobStorage:
    """Return what is kept of a job: its bytes by kind, and what each attempt wrote."""
    return await services.storage.job(caller, id)


@router.post(
    "/jobs/{id}/attempts/{attempt}/delete",
    operation_id="delete_output",
    response_model=StorageDeleted,
    responses=problems(404, 409, 410),
)
async def delete_output(id: Id, attempt: Attempt, caller: JobEditor, services: ServicesDep) -> StorageDeleted:
    """Delete the log, the result and the exception of an attempt that has ended; its job and checkpoints stay."""
    return await services.storage.delete_output(caller, id, attempt)


@router.post("/storage/delete", operation_id="delete_storage", response_model=StorageDeleted)
async def delete_storage(caller: Admin, services: ServicesDep, request: StorageDelete) -> StorageDeleted:
    """Delete the ended jobs of a person for good, with their files, logs, results and checkpoints."""
    return await services.storage.delete_of_person(caller, request)
