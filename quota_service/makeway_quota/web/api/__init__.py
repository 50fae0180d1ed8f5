"""The API, one module for each noun: inventory, sessions, jobs, policy."""

from __future__ import annotations

from fastapi import APIRouter, Security
from fastapi.security import APIKeyHeader

from . import inventory, jobs, policy, retention, sessions

_TOKEN = APIKeyHeader(
    name="Authorization",
    scheme_name="HubToken",
    auto_error=False,
    description="A token of JupyterHub, sent as `token …` or `Bearer …`.",
)


def router() -> APIRouter:
    """Gather every route below /api/v1."""
    whole = APIRouter(dependencies=[Security(_TOKEN)])
    # Routes are tried in this order: what is asked most often comes first.
    for part in (jobs.router, sessions.router, inventory.router, policy.router, retention.router):
        whole.include_router(part)
    whole.include_router(inventory.open_router)
    return whole
