"""Hold back GET and HEAD requests while a cycle of the control loop is under way."""

from __future__ import annotations

from ...services import Services
from ..settings import WebSettings
from .limits import App, Receive, Scope, Send

READS = frozenset({"GET", "HEAD"})


class HoldReads:
    """ASGI middleware: reads wait until the gate is open; health checks and static files do not."""

    def __init__(self, app: App, settings: WebSettings, services: Services) -> None:
        self.app = app
        self._services = services
        self._at_once = tuple(
            f"{base}{name}" for base in ("/", settings.prefix) for name in ("healthz", "readyz", "static/")
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in READS and not scope["path"].startswith(self._at_once):
            await self._services.context.gate.wait_async()
        await self.app(scope, receive, send)
