"""Serve training jobs: submit, show, follow the log, cancel, resume, clone, test preemption."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from makeway_api.errors import MakewayError
from makeway_api.models import (
    CloneRequest,
    Decision,
    DryRun,
    Job,
    JobPage,
    JobRequest,
    LogChunk,
    MoveRequest,
)
from pydantic import BaseModel

from ..dependencies import (
    MAX_INTEGER,
    Id,
    JobEditor,
    Key,
    Name,
    Reader,
    ServicesDep,
    StreamsDep,
    Submitter,
    Version,
    Wait,
)
from ..server.problems import json_list_response, json_response, problems

router = APIRouter(prefix="/jobs", tags=["jobs"], responses=problems(404, 410))

Attempt = Annotated[int | None, Query(ge=1, le=1_000_000, description="default: the newest")]


class Failure(BaseModel):
    """The exception that ended a job."""

    type: str = ""
    message: str = ""
    traceback: str | list[str] = ""


@router.post(
    "",
    operation_id="submit",
    status_code=201,
    response_model=Job,
    responses={
        **problems(404, 409, 413, 415),
        200: {"model": DryRun, "description": "What submitting would do now"},
    },
)
async def submit(caller: Submitter, services: ServicesDep, request: JobRequest, key: Key = None) -> Response:
    """Submit a job; with `dry_run`, only return what would happen."""
    answer = await services.submissions.submit(caller, request, key)
    return json_response(answer, 200 if isinstance(answer, DryRun) else 201)


@router.get("", operation_id="jobs", response_model=JobPage)
async def jobs(
    caller: Reader,
    services: ServicesDep,
    team: Name = None,
    state: Annotated[
        str | None,
        Query(max_length=100, pattern=r"^[a-z]+(,[a-z]+)*$", description="a state, several by comma, or `live`"),
    ] = None,
    mine: bool = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=200, description="`next` of the page before")] = None,
) -> Response:
    """Return the jobs that the caller may see, newest first."""
    page = await services.jobs.jobs(caller, team, state, mine, limit, cursor)
    return await services.context.call(json_response, page)


@router.get("/{id}", operation_id="job", response_model=Job)
async def job(
    id: Id, caller: Reader, services: ServicesDep, streams: StreamsDep, wait: Wait = 0, version: Version = None
) -> Response:
    """Return one job; with `wait`, as soon as it is newer than `version`."""
    return json_response(await streams.poll(lambda seconds: services.jobs.job(caller, id, seconds, version), wait))


@router.post("/{id}/cancel", operation_id="cancel_job", response_model=Job, responses=problems(409))
async def cancel(id: Id, caller: JobEditor, services: ServicesDep) -> Job:
    """Stop a job for good; a repetition changes nothing."""
    return await services.jobs.cancel(caller, id)


@router.post("/{id}/resume", operation_id="resume_job", response_model=Job, responses=problems(409))
async def resume(id: Id, caller: JobEditor, services: ServicesDep) -> Job:
    """Requeue an ended job: the same id, the next attempt, from its checkpoint."""
    return await services.jobs.resume(caller, id)


@router.post("/{id}/move", operation_id="move_job", response_model=Job, responses=problems(409))
async def move(id: Id, caller: JobEditor, services: ServicesDep, request: MoveRequest) -> Job:
    """Move a pending job to the queue of another team, another profile, or both; it keeps its submission time."""
    return await services.moves.move(caller, id, request)


@router.post(
    "/{id}/clone",
    operation_id="clone_job",
    status_code=201,
    response_model=list[Job],
    responses=problems(409, 413, 415),
)
async def clone(id: Id, caller: Submitter, services: ServicesDep, request: CloneRequest, key: Key = None) -> list[Job]:
    """Submit copies of a job. Its files are shared; its environment is copied for its owner only."""
    overrides = request.overrides.model_dump(exclude_unset=True, exclude_none=True)
    return await services.submissions.clone(caller, id, request.n, overrides, key)


@router.post("/{id}/preempt-test", operation_id="preempt_test", response_model=Job, responses=problems(409))
async def preempt_test(id: Id, caller: JobEditor, services: ServicesDep) -> Job:
    """Test the preemption of a job: it gets the notice, saves, ends and is requeued."""
    return await services.jobs.preempt_test(caller, id)


@router.get("/{id}/events", operation_id="job_events", response_model=list[Decision])
async def job_events(id: Id, caller: Reader, services: ServicesDep) -> Response:
    """Return everything that was decided about a job, oldest first."""
    return await services.context.call(json_list_response, await services.jobs.events(caller, id))


@router.get("/{id}/logs", operation_id="job_logs", response_model=LogChunk)
async def logs(
    id: Id,
    caller: Reader,
    services: ServicesDep,
    streams: StreamsDep,
    attempt: Attempt = None,
    offset: Annotated[
        int, Query(ge=-MAX_INTEGER, le=MAX_INTEGER, description="in bytes; a negative one counts from the end")
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=4 * 2**20, description="bytes")] = 64 * 2**10,
    wait: Wait = 0,
) -> Response:
    """Return part of a job's log; with `wait`, as soon as there is something at `offset`."""
    outputs = services.outputs
    return json_response(
        await streams.poll(lambda seconds: outputs.log(caller, id, attempt, offset, limit, seconds), wait)
    )


@router.get(
    "/{id}/result",
    operation_id="job_result",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The bytes that the job left"}},
)
async def result(id: Id, caller: Reader, services: ServicesDep) -> Response:
    """Return the result that the job left, in parts."""
    result = await services.outputs.result(caller, id)
    if result is None:
        raise MakewayError(
            f"Job {id} has left no result (yet): only a finished %%train cell with a last value has one.",
            code="no_result",
            status=404,
        )
    headers = {"Content-Length": str(result.size)}
    return StreamingResponse(result.chunks(), media_type="application/octet-stream", headers=headers)


@router.get("/{id}/error", operation_id="job_error", response_model=Failure)
async def error(id: Id, caller: Reader, services: ServicesDep) -> dict[str, Any]:
    """Return the exception that ended the job."""
    result = await services.outputs.error(caller, id)
    if result is None:
        raise MakewayError(f"Job {id} has left no exception.", code="no_error", status=404)
    return result
