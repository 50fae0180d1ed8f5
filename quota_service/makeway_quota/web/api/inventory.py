"""Serve the inventory: me, pools, profiles, policies, offers, usage, decisions and the event stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from makeway_api.errors import MakewayError
from makeway_api.models import Decision, Kind, Me, OfferTable, Policy, Pool, Profile, Usage

from ...services import Caller, Services
from ...services.log.topics import read_topics
from ..dependencies import MAX_INTEGER, AuthenticatorDep, Name, Reader, ServicesDep, StreamsDep
from ..login.auth import SCOPE, may, refusal, still_reads
from ..pages.live import PageStream, read_parts
from ..server.problems import json_list_response, json_response, problems
from ..stream import Streams, message

router = APIRouter(tags=["inventory"], responses=problems())
open_router = APIRouter(tags=["inventory"], responses=problems())
"""routes that need no login: they carry a signed ticket"""

TICKET = "offers"


@router.get("/me", operation_id="me", response_model=Me)
async def me(caller: Reader, services: ServicesDep) -> Me:
    """Return the caller with its teams and scopes."""
    return Me(
        name=caller.name,
        admin=caller.admin,
        teams=list(services.context.teams_of(caller)),
        scopes=sorted(caller.scopes),
    )


@router.get("/pools", operation_id="pools", response_model=list[Pool])
async def pools(caller: Reader, services: ServicesDep) -> Response:
    """Return every pool with its nodes, devices and the workloads that hold them."""
    return Response(await services.inventory.pools_json(caller), media_type="application/json")


@router.get("/profiles", operation_id="profiles", response_model=list[Profile])
async def profiles(caller: Reader, services: ServicesDep) -> list[Profile]:
    """Return the profiles that the caller may use."""
    return await services.inventory.profiles(caller)


@router.get("/policies", operation_id="policies", response_model=list[Policy])
async def policies(caller: Reader, services: ServicesDep) -> list[Policy]:
    """Return the policies of the caller's teams; all of them for an administrator."""
    return await services.inventory.policies(caller)


@router.get("/usage", operation_id="usage", response_model=Usage)
async def usage(caller: Reader, services: ServicesDep) -> Response:
    """Return the usage of the caller's teams and of the cluster now."""
    return json_response(await services.usage.usage(caller))


@router.get("/offers", operation_id="offers", response_model=OfferTable)
async def offers(
    caller: Reader,
    services: ServicesDep,
    authenticator: AuthenticatorDep,
    user: Annotated[str | None, Query(min_length=1, max_length=255, description="another user (scope reserve)")] = None,
    kind: Kind = Kind.SESSION,
) -> Response:
    """Return what a user can have now, from which teams, and why not; with a ticket for live updates of the table."""
    name = user or caller.name
    if name == caller.name:
        groups = sorted(caller.groups)
    elif may(caller, "reserve") or may(caller, "admin"):
        groups = sorted(await authenticator.directory.groups_of(name))
    else:
        raise refusal(caller, ["reserve", "admin"])
    table = await services.offers.offers(caller, name, groups, kind.value)
    ticket = authenticator.signer.sign(TICKET, [name, kind.value], authenticator.settings.ticket_seconds)
    return json_response(table.model_copy(update={"ticket": ticket}))


@open_router.get("/offers/live", operation_id="offers_live", response_model=OfferTable)
async def offers_live(
    services: ServicesDep, authenticator: AuthenticatorDep, ticket: Annotated[str, Query(min_length=1, max_length=2000)]
) -> Response:
    """Return the same table again for the Hub's spawn page: the ticket names the user and lasts 15 minutes."""
    signed = authenticator.signer.read(TICKET, ticket)
    if not isinstance(signed, list):
        minutes = authenticator.settings.ticket_seconds // 60
        raise MakewayError(
            f"This page was opened more than {minutes} minutes ago: reload it.", code="ticket", status=401
        )
    name, kind = signed
    groups = sorted(await authenticator.directory.groups_of(name))
    caller = Caller(name=name, groups=frozenset(groups), scopes=frozenset({f"{SCOPE}read"}))
    table = await services.offers.offers(caller, name, groups, kind)
    return json_response(table.model_copy(update={"ticket": ticket}))


@router.get("/decisions", operation_id="decisions", response_model=list[Decision])
async def decisions(
    caller: Reader,
    services: ServicesDep,
    workload: Name = None,
    team: Name = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="only decisions with a smaller id")] = None,
) -> Response:
    """Return the decision log, newest first."""
    newest = await services.audit.decisions(caller, workload, team, limit, before)
    return await services.context.call(json_list_response, newest)


@router.get(
    "/events",
    operation_id="events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "A live stream"}},
)
async def events(
    request: Request,
    caller: Reader,
    services: ServicesDep,
    streams: StreamsDep,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INTEGER)] = None,
    after: Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="like the header Last-Event-ID")] = None,
    topics: Annotated[str | None, Query(max_length=8000, description="only which of these topics changed")] = None,
    parts: Annotated[str, Query(max_length=2000, description="parts of the portal's own pages")] = "",
) -> StreamingResponse:
    """Stream what happens. Each message has an id, its kind as event, and the whole Event as JSON in data.

    A reader whose last event is not kept any more, or is more than 2000 events back, gets a `reset`: it reads
    everything again. A message with an id alone says that nothing up to there is for this reader.

    With `topics` (cluster, machines, policy, team:NAME, job:ID, node:NAME, with commas between them) the messages are
    of the kind `changed` and name the topics that changed, at most four times a second; `beat` says that the stream
    is alive.
    """
    start = last_event_id if last_event_id is not None else after
    streams.check_room(caller.name)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if topics is None and not parts:
        chunks = streams.follow(_event_chunks(request, caller, start), caller.name)
    else:
        page = PageStream(request, caller, read_topics(topics or ""), read_parts(parts), start)
        chunks = streams.follow(page.chunks(), caller.name, page.beat, streams.settings.page_heartbeat, page.welcome)
        headers |= page.headers
    return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)


async def _event_chunks(request: Request, caller: Caller, start: int | None) -> AsyncIterator[bytes]:
    """Yield what happens as the text of a stream, while the caller may read; the text is shared by all streams."""
    state = request.app.state
    services: Services = state.services
    streams: Streams = state.streams

    async def renew() -> Caller | None:
        return await still_reads(state.authenticator, request)

    async for batch in services.audit.batches(caller, start, renew):
        chunk = streams.messages.of(batch.rows)
        if batch.notice is not None:
            chunk += message(batch.notice)
        if chunk:
            yield chunk
