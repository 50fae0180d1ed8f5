"""What there is and who uses it: me, pools, profiles, policies, offers, usage, decisions and the live stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse
from makeway_api.errors import MakewayError
from makeway_api.models import Decision, Kind, Me, OfferTable, Policy, Pool, Profile, Usage

from ..asks import BIG, Name, Reader, TheDesk, TheDoorman, TheStreams
from ..auth import SCOPE, may, refusal
from ..ports import Caller
from ..problems import declared

router = APIRouter(tags=["estate"], responses=declared())
open_router = APIRouter(tags=["estate"], responses=declared())
"""routes that need no login: they carry a signed ticket"""

TICKET = "offers"


@router.get("/me", operation_id="me", response_model=Me)
async def me(caller: Reader, desk: TheDesk) -> Me:
    """Who the caller is, and in which teams."""
    return Me(name=caller.name, admin=caller.admin, teams=list(desk.teams_of(caller)), scopes=sorted(caller.scopes))


@router.get("/pools", operation_id="pools", response_model=list[Pool])
async def pools(caller: Reader, desk: TheDesk) -> list[Pool]:
    """Every pool with its nodes, devices and who holds them."""
    return await desk.pools(caller)


@router.get("/profiles", operation_id="profiles", response_model=list[Profile])
async def profiles(caller: Reader, desk: TheDesk) -> list[Profile]:
    """The profiles that the caller may use."""
    return await desk.profiles(caller)


@router.get("/policies", operation_id="policies", response_model=list[Policy])
async def policies(caller: Reader, desk: TheDesk) -> list[Policy]:
    """The policies of the caller's teams; all of them for an administrator."""
    return await desk.policies(caller)


@router.get("/usage", operation_id="usage", response_model=Usage)
async def usage(caller: Reader, desk: TheDesk) -> Usage:
    """Who uses what now."""
    return await desk.usage(caller)


@router.get("/offers", operation_id="offers", response_model=OfferTable)
async def offers(
    caller: Reader,
    desk: TheDesk,
    doorman: TheDoorman,
    user: Annotated[str | None, Query(min_length=1, max_length=255, description="another user (scope reserve)")] = None,
    kind: Kind = Kind.SESSION,
) -> OfferTable:
    """What can I have now, from whom, and why not; with a ticket for live updates of the same table."""
    name = user or caller.name
    if name == caller.name:
        groups = sorted(caller.groups)
    elif may(caller, "reserve") or may(caller, "admin"):
        groups = sorted(await doorman.directory.groups_of(name))
    else:
        raise refusal(caller, ["reserve", "admin"])
    table = await desk.offers(caller, name, groups, kind.value)
    note = doorman.signer.sign(TICKET, [name, kind.value], doorman.settings.ticket_seconds)
    return table.model_copy(update={"ticket": note})


@open_router.get("/offers/live", operation_id="offers_live", response_model=OfferTable)
async def offers_live(
    desk: TheDesk, doorman: TheDoorman, ticket: Annotated[str, Query(min_length=1, max_length=2000)]
) -> OfferTable:
    """The same table anew, for the Hub's spawn page: the ticket says for whom, and works for 15 minutes."""
    signed = doorman.signer.read(TICKET, ticket)
    if not isinstance(signed, list):
        minutes = doorman.settings.ticket_seconds // 60
        raise MakewayError(
            f"This page was opened more than {minutes} minutes ago: reload it.", code="ticket", status=401
        )
    name, kind = signed
    groups = sorted(await doorman.directory.groups_of(name))
    caller = Caller(name=name, groups=frozenset(groups), scopes=frozenset({f"{SCOPE}read"}))
    table = await desk.offers(caller, name, groups, kind)
    return table.model_copy(update={"ticket": ticket})


@router.get("/decisions", operation_id="decisions", response_model=list[Decision])
async def decisions(
    caller: Reader,
    desk: TheDesk,
    workload: Name = None,
    team: Name = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=BIG, description="only decisions with a smaller id")] = None,
) -> list[Decision]:
    """The decision log, newest first."""
    return await desk.decisions(caller, workload, team, limit, before)


@router.get(
    "/events",
    operation_id="events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "A live stream"}},
)
async def events(
    caller: Reader,
    desk: TheDesk,
    streams: TheStreams,
    last_event_id: Annotated[int | None, Header(ge=0, le=BIG)] = None,
    after: Annotated[int | None, Query(ge=0, le=BIG, description="like the header Last-Event-ID")] = None,
) -> StreamingResponse:
    """What happens, as it happens. Each message has an id, its kind as event, and the whole Event as JSON in data."""
    start = last_event_id if last_event_id is not None else after
    return StreamingResponse(
        streams.follow(desk.events(caller, start)),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
