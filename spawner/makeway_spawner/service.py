"""Reach the quota service from the Hub: one connection pool per process, and what its newest offers named."""

from __future__ import annotations

import ssl

import httpx2
from makeway_api.client import AsyncClient
from makeway_api.errors import MakewayError
from makeway_api.models import OfferTable, Profile

_CLIENTS: dict[tuple[str, str], AsyncClient] = {}


def client_for(url: str, token: str) -> AsyncClient:
    """Return the client for this service, which never goes through a proxy of the Hub's environment.

    Each waiting start holds a connection, so their number is not bounded.
    """
    key = (url, token)
    if key not in _CLIENTS:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        # ssl's own context: it reads SSL_CERT_FILE, which httpx2 does not without the environment.
        verify = ssl.create_default_context() if url.startswith("https:") else True
        _CLIENTS[key] = AsyncClient(url, token, limits=limits, trust_env=False, verify=verify)
    return _CLIENTS[key]


def is_unavailable(error: MakewayError) -> bool:
    """Whether the service did not answer, as against refusing the request."""
    return error.status >= 500


class Catalogue:
    """The profiles and team titles of the newest offers, for pages and for starts while the service is unavailable."""

    def __init__(self) -> None:
        self._profiles: dict[str, Profile] = {}
        self._teams: dict[str, str] = {}

    def update(self, table: OfferTable) -> None:
        """Remember the profiles and titles of an offer table."""
        self._profiles |= {profile.name: profile for profile in table.profiles}
        self._teams |= {usage.team: usage.title for usage in table.usage if usage.title}

    def profile(self, name: str) -> Profile | None:
        """Return a profile as the service described it last, or None."""
        return self._profiles.get(name)

    def profile_title(self, name: str) -> str:
        """Return the title of a profile, or its name while the title is not known."""
        profile = self._profiles.get(name)
        return (profile.title if profile else "") or name

    def team_title(self, name: str) -> str:
        """Return the title of a team, or its name while the title is not known."""
        return self._teams.get(name) or name

    def needs_no_gpu(self, profile: str, configured: list[str]) -> bool:
        """Whether a profile is without GPUs, by the service's last answer or else by the Hub's settings."""
        known = self._profiles.get(profile)
        return known.gpus == 0 if known else profile in configured

    def without_gpus(self, configured: list[str]) -> list[str]:
        """Return the names of the profiles that may start while the service is unavailable."""
        known = sorted(name for name, profile in self._profiles.items() if profile.gpus == 0)
        return known or list(configured)


LAST_OFFERS = Catalogue()
