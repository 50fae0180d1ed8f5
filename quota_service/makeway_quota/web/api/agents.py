"""Serve the agents of machines: each reaches its own machine, by a token of its own."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from makeway_api.models.agents import AgentJoin, AgentJoined, AgentReceipt, AgentReportIn, MachineOrders

from ...agent_program import agent_program
from ...services.cluster.agents import AgentService
from ..dependencies import TheStreams, Wait
from ..server.connections import note_login
from ..server.problems import declared, json_of
from .attempts import Token

router = APIRouter(prefix="/agents", tags=["agents"], responses=declared(404, 409, 410))

Machine = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="a machine's id")]
Known = Annotated[str, Query(max_length=100, description="`revision` of the orders that the agent has")]


async def service_of(request: Request) -> AgentService:
    """Return the service for agents that this app was made with."""
    service: AgentService = request.app.state.services.agents
    return service


async def address_of(request: Request) -> str:
    """Return the address of the sender; "" where it is not known."""
    return "" if request.client is None else request.client.host


TheAgents = Annotated[AgentService, Depends(service_of)]
Address = Annotated[str, Depends(address_of)]


@router.post("/join", operation_id="join_machine", response_model=AgentJoined)
async def join(agents: TheAgents, token: Token, address: Address, body: AgentJoin) -> Response:
    """Become the agent of a machine, by its join token; a repetition changes nothing."""
    return json_of(await agents.join(token, body, address))


@router.get("/agent.pyz", include_in_schema=False)
async def program() -> Response:
    """Return the agent in one file; it is public, and the same on each replica."""
    content = await asyncio.to_thread(agent_program)
    return Response(content, media_type="application/zip", headers={"Cache-Control": "no-cache"})


@router.post("/{machine}/report", operation_id="report_machine", response_model=AgentReceipt)
async def report(machine: Machine, agents: TheAgents, token: Token, address: Address, body: AgentReportIn) -> Response:
    """Report what a machine is and runs. An expired token is renewed."""
    return json_of(await agents.report(token, machine, body, address))


@router.get("/{machine}/orders", operation_id="machine_orders", response_model=MachineOrders)
async def orders(
    request: Request,
    machine: Machine,
    agents: TheAgents,
    streams: TheStreams,
    token: Token,
    known: Known = "",
    wait: Wait = 0,
) -> Response:
    """Return everything that a machine has to do; with `wait`, as soon as it differs from what its agent knows."""
    agents.check_token(token, machine)
    note_login(request.scope)
    return json_of(await streams.poll(lambda seconds: agents.orders(token, machine, known, seconds), wait))
