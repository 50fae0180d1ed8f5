"""One replica whose jobs run on machines, in a process of its own: `machines_process.py CLOUD NAME PORT_FILE`.

It listens on the port PORT. The calls of its cloud take up to SLOW seconds before and after they are done, and those
that the folder `holds` of the cloud names wait until they are let go: `launch-before`, `terminate-after` and the like.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import time
from pathlib import Path

import uvicorn
from makeway_quota.application import Application
from makeway_quota.autoscale.instances import Instance
from makeway_quota.autoscale.provider import JoinData
from makeway_quota.autoscale.providers import local
from makeway_quota.backends.machines.backend import MachinesBackend
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.routing.backend import RoutingBackend
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.server.http_server import run, server_config
from makeway_quota.web.settings import WebSettings
from running import PEOPLE


class SlowCloud(local.LocalProvider):
    """The cloud in a folder, whose calls take a while, or hang."""

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Launch a machine."""
        self._wait("launch-before")
        made = super().launch(request, token, join)
        self._wait("launch-after")
        return made

    def terminate(self, instance: str) -> bool:
        """End a machine."""
        self._wait("terminate-before")
        done = super().terminate(instance)
        self._wait("terminate-after")
        return done

    def _wait(self, when: str) -> None:
        time.sleep(random.uniform(0.0, float(os.environ["SLOW"])))
        hold = self.folder / "holds" / when
        if hold.exists():
            hold.with_name(f"{when}-by-{sys.argv[2]}").touch()
            while hold.exists():
                time.sleep(0.02)


class NoNodes(MemoryBackend):
    """A backend on which nothing ever runs, which several replicas may have."""

    shared = True


async def serve(port_file: Path) -> None:
    """Serve until it is killed; the port is written to a file once it listens."""
    local.LocalProvider = SlowCloud  # type: ignore[misc]
    backend = RoutingBackend([NoNodes(), MachinesBackend(durable_checkpoints=True)])
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
    run(serve(Path(sys.argv[3])))
