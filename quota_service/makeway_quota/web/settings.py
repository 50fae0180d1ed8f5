"""What the web part must be told: where it lives, who signs, and how much it accepts."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Plain values."""

    prefix: str = "/services/makeway/"
    hub_base: str = "/"
    """the Hub's base_url: the panel links to {hub_base}hub/home"""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """signs cookies, tickets and anti-forgery tokens; one for all replicas, else logins end with a restart"""
    job_bytes: int = 64 * 2**20
    """largest body of POST jobs (files travel as base64)"""
    body_bytes: int = 2 * 2**20
    """largest body of everything else"""
    ticket_seconds: int = 900
    heartbeat: float = 15.0
    """seconds of silence after which the stream says that it is alive"""
    stream_backlog: int = 1000
    """events that a slow reader may lag before it is cut off (it resumes by Last-Event-ID)"""
    auth_cache_seconds: int = 5
    """how long an answer of the Hub about a token or a user's groups is believed (at most 10)"""

    def __post_init__(self) -> None:
        """Bring the paths into the form /…/."""
        object.__setattr__(self, "prefix", "/" + self.prefix.strip("/") + "/" if self.prefix.strip("/") else "/")
        object.__setattr__(self, "hub_base", "/" + self.hub_base.strip("/") + "/" if self.hub_base.strip("/") else "/")
        object.__setattr__(self, "auth_cache_seconds", min(max(self.auth_cache_seconds, 1), 10))

    @property
    def hub(self) -> str:
        """The path below which the Hub's own pages are."""
        return f"{self.hub_base}hub/"

    @property
    def api(self) -> str:
        """The path of the API without a slash at its end."""
        return f"{self.prefix}api/v1"
