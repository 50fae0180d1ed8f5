"""The service of the queue mix: the real API, database and loop, over machines that only exist in memory."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import uvicorn
from makeway_quota.application import Application
from makeway_quota.backends.base import NodeStatus, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services import Caller
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.server.http_server import run, server_config
from makeway_quota.web.settings import WebSettings

from .queue_mix import CLASSES, UNITS, policy, queues

SCOPES = frozenset({"custom:makeway:read", "custom:makeway:submit"})
SECONDS = {c.name: c.seconds for c in CLASSES}


def lasts(order: StartOrder) -> float:
    """How long an attempt takes, by its profile."""
    return SECONDS[order.profile.rpartition("-")[2]]


async def serve(folder: Path) -> None:
    """Serve on a free port until a signal; the address is the one line on standard output."""
    seed = folder / "policy.yaml"
    seed.write_text(policy(), encoding="utf-8")
    environ = {"MAKEWAY_STATE_DIR": str(folder), "MAKEWAY_POLICY_FILE": str(seed)}
    environ |= {"MAKEWAY_MAX_PENDING_JOBS": "0", "MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE": "0"}  # a team is one person here
    config = load(environ=environ)
    nodes = [NodeStatus(f"{pool}-machine", pool, tuple(range(UNITS))) for pool in sorted({p for p, _ in queues()})]
    backend = MemoryBackend(nodes, lasts=lasts, real_time=True)
    service = await Application.open(config, backend)
    people = {team: Caller(team, scopes=SCOPES) for _, team in queues()}
    people["root"] = Caller("root", admin=True, scopes=SCOPES)
    web = WebSettings(secret=b"benchmark" * 4)
    app = create_app(service.services, web, TokenAuth(people))
    server = uvicorn.Server(server_config(app))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await service.start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}{web.prefix.rstrip('/')}", flush=True)
    try:
        await server.serve([listener])
    finally:
        await service.stop(stop_jobs=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run(serve(Path(sys.argv[1])))
