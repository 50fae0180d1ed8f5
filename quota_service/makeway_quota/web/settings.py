"""Hold the settings of the web part: paths, secrets, limits and timeouts."""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass, field

from ..settings import ServiceSettings

JSON_OVERHEAD = 12 * 2**20
"""Bytes of a submission besides its files: the source, the command, names"""


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Plain values."""

    prefix: str = "/services/makeway/"
    hub_base: str = "/"
    """the Hub's base_url: the panel links to {hub_base}hub/home"""
    hub_origin: str = ""
    """the Hub's origin where it is not the service's own (https://gpus.example.com); empty: one origin for both"""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """signs cookies, tickets and anti-forgery tokens; one for all replicas, else logins end with a restart"""
    metrics_token: str = field(default="", repr=False)
    """what reads /metrics at the root of the port; "": every caller that reaches it"""
    job_bytes: int = 80 * 2**20
    """largest body of POST jobs (files travel as base64)"""
    body_bytes: int = 2 * 2**20
    """largest body of everything else"""
    body_seconds: float = 120.0
    """longest time that the body of a request may take to arrive"""
    body_silence: float = 20.0
    """longest time without a byte of it"""
    max_bodies: int = 64
    """bodies that are received at the same time, of all callers"""
    max_bodies_per_caller: int = 16
    """as many of them as one caller may have (the spawner: all)"""
    bodies_for_spawner: int = 8
    """places among them that only callers with the scope `reserve` get: the Hub's spawner, which acts for all users"""
    worker_bytes: int = 2**20
    """largest body of a worker (a part of its log or result)"""
    max_worker_outputs: int = 64
    """outputs of workers that are received at the same time; people's bodies have places of their own"""
    max_worker_reports: int = 256
    """reports and claims of workers that are received at the same time: a slow output keeps none out"""
    max_agent_reports: int = 64
    """reports of machines that are received at the same time"""
    agent_bytes: int = 2**18
    """largest body of an agent of a machine (the end of the output of its init script)"""
    max_bodies_per_worker: int = 2
    """as many of them as one worker, or one machine, may have"""
    max_large_bodies: int = 2
    """bodies above 1 MiB that are processed at the same time, of submissions and of all else; others wait on disk"""
    max_waiting_bytes: int = 2**30
    """bytes of bodies above 1 MiB that arrive, wait or are processed, of all callers (at least one submission)"""
    max_waiting_bytes_per_caller: int = 2**28
    """as much of it as one caller may have (at least one submission)"""
    ticket_seconds: int = 900
    heartbeat: float = 15.0
    """seconds of silence after which the stream says that it is alive"""
    page_heartbeat: float = 5.0
    """the same for the stream of pages, which say after two missed ones that they are out of date"""
    streams_per_user: int = 20
    """event streams that one person may have open; 0: no limit"""
    auth_cache_seconds: int = 5
    """how long an answer of the Hub about a token or a user's groups is cached (at most 10)"""

    def __post_init__(self) -> None:
        """Bring the paths into the form /…/."""
        object.__setattr__(self, "prefix", "/" + self.prefix.strip("/") + "/" if self.prefix.strip("/") else "/")
        object.__setattr__(self, "hub_base", "/" + self.hub_base.strip("/") + "/" if self.hub_base.strip("/") else "/")
        object.__setattr__(self, "auth_cache_seconds", min(max(self.auth_cache_seconds, 1), 10))

    @classmethod
    def of(cls, settings: ServiceSettings) -> WebSettings:
        """Return the settings that follow from those of the service."""
        return cls(
            prefix=settings.prefix,
            hub_base=settings.hub_base_url,
            hub_origin=settings.hub_origin,
            secret=_secret(settings),
            metrics_token=settings.metrics_token,
            job_bytes=job_bytes(settings.max_files_bytes),
            streams_per_user=settings.max_streams,
        )

    @property
    def hub(self) -> str:
        """Return the address below which the Hub's own pages are: a path, where it has the same origin."""
        return f"{self.hub_origin}{self.hub_base}hub/"

    @property
    def api(self) -> str:
        """Return the path of the API without a slash at its end."""
        return f"{self.prefix}api/v1"


def _secret(settings: ServiceSettings) -> bytes:
    """Return what signs cookies and tickets: the site's secret, else one made from the service's token at the Hub."""
    if settings.ticket_secret:
        return settings.ticket_secret.encode()
    token = settings.api_token.encode()
    return hmac.digest(token, b"makeway: cookies and tickets", "sha256") if token else os.urandom(32)


def job_bytes(files: int) -> int:
    """Return the size of a request that carries so many bytes of files as base64."""
    return -(-files // 3) * 4 + JSON_OVERHEAD
