"""One replica whose jobs run on machines, in a process of its own: `machines_process.py CLOUD NAME PORT_FILE`.

It listens on the port PORT. The calls of its cloud take up to SLOW seconds before and after they are done, and those
that the folder `holds` of the cloud names wait until they are let go: `launch-before`, `terminate-after` and the like.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from pathlib import Path

from makeway_quota.application import Application
from makeway_quota.autoscale.instances import Instance
from makeway_quota.autoscale.provider import JoinData
from makeway_quota.autoscale.providers import local
from makeway_quota.backends.machines.backend import MachinesBackend
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.routing.backend import RoutingBackend
from makeway_quota.settings import load
from makeway_quota.web.server.http_server import run
from replica_server import serve_replica


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
    await serve_replica(service, int(os.environ["PORT"]), port_file)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run(serve(Path(sys.argv[3])))
