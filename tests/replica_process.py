"""One replica of the service in a process of its own: `replica_process.py BACKEND NAME PORT_FILE`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from makeway_quota.application import Application
from makeway_quota.settings import load
from makeway_quota.web.server.http_server import run
from replica_server import serve_replica
from replicas import RemoteBackend


async def serve(path: str, name: str, port_file: Path) -> None:
    """Serve on a free port, which is written to a file, until SIGTERM."""
    backend = RemoteBackend(path, name)
    service = await Application.open(load(environ=dict(os.environ)), backend)
    backend.term = lambda: service.loop.term
    await serve_replica(service, 0, port_file)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
