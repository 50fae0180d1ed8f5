"""One replica whose workers are elsewhere, in a process of its own: `elsewhere_process.py MACHINES ADDRESS PORT_FILE`.

It listens on the port of its own address; its workers use ADDRESS, which may be another replica's.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from elsewhere import Processes
from makeway_quota.application import Application
from makeway_quota.settings import load
from makeway_quota.web.server.http_server import run
from replica_server import serve_replica


async def serve(machines: Path, address: str, port_file: Path) -> None:
    """Serve until it is killed; the port is written to a file once it listens."""
    backend = Processes(machines, address, gpus=10)
    service = await Application.open(load(environ=dict(os.environ)), backend)
    await serve_replica(service, int(os.environ["PORT"]), port_file)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run(serve(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
