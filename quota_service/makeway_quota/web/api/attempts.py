"""Serve workers that are no processes of the service: each reaches its own attempt, by a token of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from makeway_api.models.attempts import Claim, OutputReceipt, ReportReceipt, WorkerOrders, WorkerReportIn, WorkerStart

from ...services.jobs.attempts import AttemptService
from ..dependencies import MAX_INTEGER, Id, StreamsDep, Wait
from ..requests.limits import BODY
from ..server.problems import json_response, problems

router = APIRouter(prefix="/attempts/{id}/{attempt}/{worker}", tags=["attempts"], responses=problems(404, 409, 410))

Attempt = Annotated[int, Path(ge=1, le=1_000_000)]
Worker = Annotated[int, Path(ge=0, le=1_000_000)]
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of a file of the job")]
Known = Annotated[str, Query(max_length=100, description="`known` of the orders that the worker has")]
BYTES = {"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}


async def service_of(request: Request) -> AttemptService:
    """Return the service for workers that this app was made with."""
    service: AttemptService = request.app.state.services.attempts
    return service


async def token_of(request: Request) -> str:
    """Return the token of a request, or an empty string."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


AttemptServiceDep = Annotated[AttemptService, Depends(service_of)]
Token = Annotated[str, Depends(token_of)]


@router.post("/claim", operation_id="claim_worker", response_model=WorkerStart)
async def claim(
    id: Id, attempt: Attempt, worker: Worker, attempts: AttemptServiceDep, token: Token, body: Claim
) -> Response:
    """Become the launcher of a worker, and get what to start; a repetition changes nothing."""
    return json_response(await attempts.claim(token, (id, attempt, worker), body.instance))


@router.get(
    "/files/{digest}",
    operation_id="worker_file",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The content of the file"}},
)
async def file(
    id: Id, attempt: Attempt, worker: Worker, digest: Digest, attempts: AttemptServiceDep, token: Token
) -> Response:
    """Return the content of one of the job's files; a part of it is never taken for the whole."""
    chunks = await attempts.file(token, (id, attempt, worker), digest)
    return StreamingResponse(chunks, media_type="application/octet-stream")


@router.get("/orders", operation_id="worker_orders", response_model=WorkerOrders)
async def orders(
    id: Id,
    attempt: Attempt,
    worker: Worker,
    attempts: AttemptServiceDep,
    streams: StreamsDep,
    token: Token,
    known: Known = "",
    wait: Wait = 0,
) -> Response:
    """Return the orders for a worker; with `wait`, as soon as they differ from those that it knows."""
    key = (id, attempt, worker)
    return json_response(await streams.poll(lambda seconds: attempts.orders(token, key, known, seconds), wait))


@router.post("/report", operation_id="report_worker", response_model=ReportReceipt)
async def report(
    id: Id, attempt: Attempt, worker: Worker, attempts: AttemptServiceDep, token: Token, body: WorkerReportIn
) -> Response:
    """Report that a worker lives, how far it is, and how it ended. An expired token is renewed."""
    return json_response(await attempts.report(token, (id, attempt, worker), body))


@router.post(
    "/outputs/{kind}",
    operation_id="append_output",
    response_model=OutputReceipt,
    responses=problems(413, 415),
    openapi_extra=BYTES,
)
async def append(
    request: Request,
    id: Id,
    attempt: Attempt,
    worker: Worker,
    kind: Literal["log", "result", "error"],
    attempts: AttemptServiceDep,
    token: Token,
    offset: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="where these bytes begin in what the worker sends")],
    dropped: Annotated[bool, Query(description="bytes that are missing before these are lost")] = False,
) -> Response:
    """Add bytes to the log, the result or the exception of a worker; those that are known already are left out."""
    data: bytes = request.scope.get(BODY, b"")
    return json_response(await attempts.output(token, (id, attempt, worker), kind, offset, data, dropped=dropped))
