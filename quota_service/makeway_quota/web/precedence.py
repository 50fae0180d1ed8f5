"""Delay the reads that arrive while a cycle of the control loop is under way until its end."""

from __future__ import annotations

from ..services import Services
from .limits import App, Receive, Scope, Send
from .settings import WebSettings

READS = frozenset({"GET", "HEAD"})


class Precedence:
    """ASGI middleware: reads wait at the gate, a tenth of a second at most; health checks and static files do not."""

    def __init__(self, app: App, settings: WebSettings, services: Services) -> None:
        self.app = app
        self._services = services
        self._at_once = tuple(
            f"{base}{name}" for base in ("/", settings.prefix) for name in ("healthz", "readyz", "static/")
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in READS and not scope["path"].startswith(self._at_once):
            await self._services.context.gate.passed()
        await self.app(scope, receive, send)
