"""Serve the leases of interactive sessions: the Hub's spawner requests, renews and releases them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from makeway_api.errors import MakewayError
from makeway_api.models import Session, SessionRequest
from makeway_api.routes import MAX_WHY

from ...services import Caller
from ..dependencies import AuthenticatorDep, Id, Key, Reserver, ServicesDep, StreamsDep, Version, Wait
from ..login.auth import may, needs
from ..server.problems import json_list_response, json_response, problems

router = APIRouter(prefix="/sessions", tags=["sessions"], responses=problems(404, 410))

Watcher = Annotated[Caller, Depends(needs("read", "reserve"))]
Releaser = Annotated[Caller, Depends(needs("reserve", "admin"))]
Why = Annotated[str, Query(max_length=MAX_WHY, description="how the notebook ended, in a sentence")]


@router.post(
    "",
    operation_id="request_session",
    status_code=201,
    response_model=Session,
    responses=problems(409, 413, 415),
)
async def request_session(
    caller: Reserver,
    services: ServicesDep,
    authenticator: AuthenticatorDep,
    request: SessionRequest,
    key: Key = None,
) -> Response:
    """Request a lease on behalf of a user; wait for it with GET sessions/{id}."""
    groups = sorted(await authenticator.directory.groups_of(request.user))
    return json_response(await services.sessions.request(caller, request, groups, key), 201)


@router.get("", operation_id="sessions", response_model=list[Session])
async def sessions(caller: Watcher, services: ServicesDep, all: bool = False) -> Response:
    """Return the caller's live sessions; with `all` those of their teams too (administrators: of all teams)."""
    return await services.context.call(json_list_response, await services.sessions.sessions(caller, all))


@router.get("/{id}", operation_id="session", response_model=Session)
async def session(
    id: Id, caller: Watcher, services: ServicesDep, streams: StreamsDep, wait: Wait = 0, version: Version = None
) -> Response:
    """Return one session; with `wait`, as soon as it is newer than `version`."""
    if wait > 0 and not sees_all_sessions(caller):
        visible_to(caller, await services.sessions.session(id, 0, None))
    current = await streams.poll(lambda seconds: services.sessions.session(id, seconds, version), wait)
    return json_response(visible_to(caller, current))


@router.post("/{id}/started", operation_id="session_started", response_model=Session, responses=problems(409, 410))
async def started(id: Id, caller: Reserver, services: ServicesDep) -> Response:
    """Record that the notebook server of this lease is up."""
    return json_response(await services.sessions.started(id))


@router.post("/{id}/renew", operation_id="renew_session", response_model=Session, responses=problems(409, 410))
async def renew(id: Id, caller: Reserver, services: ServicesDep) -> Response:
    """Renew the lease; 410 when it has ended."""
    return json_response(await services.sessions.renew(id))


@router.delete("/{id}", operation_id="release_session", status_code=204, response_class=Response)
async def release(id: Id, caller: Releaser, services: ServicesDep, why: Why = "") -> Response:
    """Release the lease; a repetition changes nothing."""
    await services.sessions.release(id, why.strip() or f"released by {caller.name}")
    return Response(status_code=204)


def sees_all_sessions(caller: Caller) -> bool:
    """Whether the caller may see the sessions of all users."""
    return may(caller, "reserve") or may(caller, "admin")


def visible_to(caller: Caller, session: Session) -> Session:
    """Return the session if the caller may see it; for others it does not exist."""
    if sees_all_sessions(caller) or session.user == caller.name:
        return session
    raise MakewayError(f"There is no session {session.id} of yours.", code="not_found", status=404)
