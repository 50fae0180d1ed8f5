"""One replica whose workers are elsewhere, in a process of its own: `elsewhere_process.py MACHINES ADDRESS PORT_FILE`.

It listens on the port of its own address; its workers use ADDRESS, which may be another replica's.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn
from elsewhere import Processes
from makeway_quota.application import Application
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.server.http_server import run, server_config
from makeway_quota.web.settings import WebSettings
from running import PEOPLE


async def serve(machines: Path, address: str, port_file: Path) -> None:
    """Serve until it is killed; the port is written to a file once it listens."""
    backend = Processes(machines, address, gpus=10)
    service = await Application.open(load(environ=dict(os.environ)), backend)
    app = create_app(service.services, WebSettings(secret=b"test" * 8), TokenAuth(PEOPLE))
    server = uvicorn.Server(server_config(app, timeout_graceful_shutdown=2))
    with socket.create_server(("127.0.0.1", int(os.environ["PORT"]))) as listener:
        await service.start()
        (partial := port_file.with_suffix(".new")).write_text(str(listener.getsockname()[1]))
        partial.rename(port_file)
        await server.serve([listener])
    await service.stop(stop_jobs=False)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run(serve(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
