"""Serve the agents of machines: the token of an agent is valid for its own machine only."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from makeway_api.models.agents import AgentJoin, AgentJoined, AgentReceipt, AgentReportIn, MachineOrders

from ...agent_program import agent_program
from ...services.cluster.agents import AgentService
from ..dependencies import StreamsDep, Wait
from ..server.connections import note_login
from ..server.problems import json_response, problems
from .attempts import Token

router = APIRouter(prefix="/agents", tags=["agents"], responses=problems(404, 409, 410))

MachineId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="a machine's id")]
KnownRevision = Annotated[str, Query(max_length=100, description="`revision` of the orders that the agent has")]


async def service_of(request: Request) -> AgentService:
    """Return the `AgentService` of this app."""
    service: AgentService = request.app.state.services.agents
    return service


async def sender_address(request: Request) -> str:
    """Return the address of the client; "" where it is not known."""
    return "" if request.client is None else request.client.host


AgentServiceDep = Annotated[AgentService, Depends(service_of)]
SenderAddress = Annotated[str, Depends(sender_address)]


@router.post("/join", operation_id="join_machine", response_model=AgentJoined)
async def join(agents: AgentServiceDep, token: Token, address: SenderAddress, body: AgentJoin) -> Response:
    """Register the agent of a machine by its join token; a repetition changes nothing."""
    return json_response(await agents.join(token, body, address))


@router.get("/agent.pyz", include_in_schema=False)
async def program() -> Response:
    """Return the agent program in one file; it is public, and the same on each replica."""
    content = await asyncio.to_thread(agent_program)
    return Response(content, media_type="application/zip", headers={"Cache-Control": "no-cache"})


@router.post("/{machine}/report", operation_id="report_machine", response_model=AgentReceipt)
async def report(
    machine: MachineId, agents: AgentServiceDep, token: Token, address: SenderAddress, body: AgentReportIn
) -> Response:
    """Report what a machine is and runs. An expired token is renewed."""
    return json_response(await agents.report(token, machine, body, address))


@router.get("/{machine}/orders", operation_id="machine_orders", response_model=MachineOrders)
async def orders(
    request: Request,
    machine: MachineId,
    agents: AgentServiceDep,
    streams: StreamsDep,
    token: Token,
    known: KnownRevision = "",
    wait: Wait = 0,
) -> Response:
    """Return the orders of a machine; with `wait`, as soon as their revision is not the `known` one."""
    agents.check_token(token, machine)
    note_login(request.scope)  # when there are too many connections, those without a login are closed first
    return json_response(await streams.poll(lambda seconds: agents.orders(token, machine, known, seconds), wait))
