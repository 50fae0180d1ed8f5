"""The Hub's line to the quota service: one connection pool for all spawners of this process."""

from __future__ import annotations

import httpx2
from makeway_api.client import AsyncClient
from makeway_api.errors import MakewayError
from makeway_api.models import OfferTable

_CLIENTS: dict[tuple[str, str], AsyncClient] = {}
_WITHOUT_GPUS: set[str] = set()


def quota(url: str, token: str) -> AsyncClient:
    """Give the client for this service; every waiting start holds one connection, so their number has no bound."""
    key = (url, token)
    if key not in _CLIENTS:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        _CLIENTS[key] = AsyncClient(url, token, limits=limits)
    return _CLIENTS[key]


def learn(table: OfferTable) -> None:
    """Remember which profiles need no GPU: they may start even while the service is away."""
    for profile in table.profiles:
        if profile.gpus == 0:
            _WITHOUT_GPUS.add(profile.name)
        else:
            _WITHOUT_GPUS.discard(profile.name)


def needs_no_gpu(profile: str, configured: list[str]) -> bool:
    """Tell whether a profile is known to need none, from the service's last answer or else from the settings."""
    return profile in _WITHOUT_GPUS or profile in configured


def without_gpus(configured: list[str]) -> list[str]:
    """Name the profiles that may start without the service."""
    return sorted(_WITHOUT_GPUS) or list(configured)


def away(error: MakewayError) -> bool:
    """Tell whether the service did not answer, as against answering no."""
    return error.status >= 500
