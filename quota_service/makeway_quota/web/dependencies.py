"""Define the dependencies of routes: services, callers by scope, and common parameters."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path, Query, Request

from ..services import Caller, Services
from .login.auth import Authenticator, needs
from .stream import Streams

MAX_WAIT = 60.0
MAX_INTEGER = 2**53 - 1
"""the largest integer that every JSON reader and database keeps exactly"""


# Coroutines, because FastAPI would run plain functions in threads of their own: three hops for each request.


async def services_of(request: Request) -> Services:
    """Return the services that this app was made with."""
    services: Services = request.app.state.services
    return services


async def streams_of(request: Request) -> Streams:
    """Return the open streams of this process."""
    streams: Streams = request.app.state.streams
    return streams


async def authenticator_of(request: Request) -> Authenticator:
    """Return the authenticator of this app."""
    authenticator: Authenticator = request.app.state.authenticator
    return authenticator


ServicesDep = Annotated[Services, Depends(services_of)]
StreamsDep = Annotated[Streams, Depends(streams_of)]
AuthenticatorDep = Annotated[Authenticator, Depends(authenticator_of)]

Reader = Annotated[Caller, Depends(needs("read"))]
Submitter = Annotated[Caller, Depends(needs("submit"))]
JobEditor = Annotated[Caller, Depends(needs("submit", some=("manage",)))]
"""Callers who may change some jobs: the service checks which"""
Manager = Annotated[Caller, Depends(needs(some=("manage",)))]
"""Callers who manage some teams: the service shows no others"""
Admin = Annotated[Caller, Depends(needs("admin"))]
AdminByToken = Annotated[Caller, Depends(needs("admin", by_token=True))]
"""Administrators who sent a token, and not a cookie alone"""
ManagerByToken = Annotated[Caller, Depends(needs("admin", some=("manage",), by_token=True))]
"""Callers who manage some teams and sent a token: the service checks which"""
Reserver = Annotated[Caller, Depends(needs("reserve"))]

Id = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="a workload's id")]
Name = Annotated[str | None, Query(max_length=63)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT, allow_inf_nan=False, description="seconds to wait for a change")]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="a random text for each submission: a request that is repeated with it submits nothing anew",
    ),
]
Version = Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="the version that the caller already has")]
