"""The API, one module for each noun, such as jobs, policy and agents; each of them has its routes."""

from __future__ import annotations

from fastapi import APIRouter, Security
from fastapi.security import APIKeyHeader

from . import agents, attempts, credentials, deployments, inventory, jobs, people, policy, retention, sessions, storage

_TOKEN = APIKeyHeader(
    name="Authorization",
    scheme_name="HubToken",
    auto_error=False,
    description="A token of JupyterHub, sent as `token …` or `Bearer …`.",
)


ROUTERS = (
    jobs.router,
    sessions.router,
    inventory.router,
    policy.router,
    deployments.router,
    credentials.router,
    people.router,
    retention.router,
    storage.router,
    inventory.open_router,
    attempts.router,
    agents.router,
)


def router() -> APIRouter:
    """Gather every route below /api/v1; the token is declared for the document, and read by `auth.needs`."""
    whole = APIRouter(dependencies=[Security(_TOKEN)])
    for part in ROUTERS:
        whole.include_router(part)
    return whole
