"""The service in a process of its own, which tests kill and freeze: `job_service_process.py HOST PORT`."""

from __future__ import annotations

import logging
import os
import socket
import sys

import uvicorn
from makeway_quota.application import Application
from makeway_quota.main import make_backend
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.auth import TokenAuth
from makeway_quota.web.http_server import run, server_config
from makeway_quota.web.settings import WebSettings
from running import PEOPLE


async def serve(host: str, port: int) -> None:
    """Serve on a port that a test has reserved, until the process is killed."""
    settings = load(environ=dict(os.environ))
    service = await Application.open(settings, make_backend(settings))
    app = create_app(service.services, WebSettings(secret=b"test" * 8), TokenAuth(PEOPLE))
    server = uvicorn.Server(server_config(app, timeout_graceful_shutdown=1))
    with socket.create_server((host, port), reuse_port=True) as listener:
        await service.start()
        await server.serve([listener])
    await service.stop(stop_jobs=False)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run(serve(sys.argv[1], int(sys.argv[2])))
