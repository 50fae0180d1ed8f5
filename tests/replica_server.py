"""Serve one replica in the process of a test until it is stopped, and write its port to a file once it listens."""

from __future__ import annotations

import socket
from pathlib import Path

import uvicorn
from makeway_quota.application import Application
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.server.http_server import server_config
from makeway_quota.web.settings import WebSettings
from running import PEOPLE


async def serve_replica(service: Application, port: int, port_file: Path) -> None:
    """Serve on a port (0: a free one) until SIGTERM; jobs go on afterwards."""
    app = create_app(service.services, WebSettings(secret=b"test" * 8), TokenAuth(PEOPLE))
    server = uvicorn.Server(server_config(app, timeout_graceful_shutdown=2))
    with socket.create_server(("127.0.0.1", port)) as listener:
        await service.start()
        (partial := port_file.with_suffix(".new")).write_text(str(listener.getsockname()[1]))
        partial.rename(port_file)
        await server.serve([listener])
    await service.stop(stop_jobs=False)
