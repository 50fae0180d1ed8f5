"""Serve /healthz, /readyz and /metrics: whether the process lives, whether it may get requests, and its numbers."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from makeway_api.errors import MakewayError
from makeway_api.models import Health

from .dependencies import ServicesDep
from .login.auth import may, refusal
from .login.tickets import same
from .settings import WebSettings

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def router(settings: WebSettings) -> APIRouter:
    """Answer at the root of the port and below the prefix.

    Metrics name teams: below the prefix, which the Hub's proxy leaves open, they take a token with
    `read:metrics` or Makeway's admin scope; at the root, which only who reaches the port itself can read, the token
    of the settings, where they have one.
    """
    routes = APIRouter(include_in_schema=False)
    for base in dict.fromkeys(("/", settings.prefix)):
        routes.add_api_route(f"{base}healthz", healthz)
        routes.add_api_route(f"{base}readyz", readyz_at_root if base == "/" else readyz)
        routes.add_api_route(f"{base}metrics", numbers_at_root if base == "/" else guarded_numbers)
    return routes


async def healthz(services: ServicesDep) -> Response:
    """200 while the process answers."""
    return _health(await services.audit.health())


async def readyz(services: ServicesDep) -> Response:
    """200 while this replica may get requests, 503 otherwise; with the state of each part in both cases."""
    return _health(await services.audit.ready())


async def readyz_at_root(services: ServicesDep) -> Response:
    """As `readyz`, with the ids of what is quarantined: only who reaches the port itself can read them."""
    return _health(await services.audit.ready(named=True))


async def numbers(services: ServicesDep) -> Response:
    """Prometheus text."""
    return Response(await services.usage.metrics(), media_type=TEXT)


async def numbers_at_root(request: Request, services: ServicesDep) -> Response:
    """Return Prometheus text to who has the token of the settings, or to everybody where they have none."""
    token = request.app.state.settings.metrics_token
    if token and not same(f"Bearer {token}", request.headers.get("authorization", "")):
        raise MakewayError(
            "Metrics take the token of MAKEWAY_METRICS_TOKEN: `Authorization: Bearer …`.",
            code="unauthorized",
            status=401,
        )
    return await numbers(services)


async def guarded_numbers(request: Request, services: ServicesDep) -> Response:
    """Return Prometheus text to callers with the scope."""
    visitor = await request.app.state.authenticator.visitor(request)
    if visitor is None or not (may(visitor.caller, "admin") or "read:metrics" in visitor.caller.scopes):
        if visitor is None:
            raise MakewayError("Metrics take a token: `Authorization: token …`.", code="unauthorized", status=401)
        raise refusal(visitor.caller, ["admin"])
    return await numbers(services)


def _health(health: Health) -> Response:
    return Response(health.model_dump_json(), status_code=200 if health.ok else 503, media_type="application/json")
