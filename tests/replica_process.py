"""One replica of the service in a process of its own: `replica_process.py BACKEND NAME PORT_FILE`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn
from makeway_quota.application import Application
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.server.http_server import run, server_config
from makeway_quota.web.settings import WebSettings
from replicas import RemoteBackend
from running import PEOPLE


async def serve(path: str, name: str, port_file: Path) -> None:
    """Serve on a free port, which is written to a file, until SIGTERM."""
    backend = RemoteBackend(path, name)
    service = await Application.open(load(environ=dict(os.environ)), backend)
    backend.term = lambda: service.loop.term
    app = create_app(service.services, WebSettings(secret=b"test" * 8), TokenAuth(PEOPLE))
    server = uvicorn.Server(server_config(app, timeout_graceful_shutdown=2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await service.start()
        (partial := port_file.with_suffix(".new")).write_text(str(listener.getsockname()[1]))
        partial.rename(port_file)
        await server.serve([listener])
    await service.stop(stop_jobs=False)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
