"""The service of the benchmark of pods: the real API, database and loop, with pods on a cluster of simulated nodes.

It prints its address, and one line of figures for each line that it reads.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import psutil
import uvicorn
from makeway_quota.application import Application
from makeway_quota.backends.kubernetes.backend import KubernetesBackend
from makeway_quota.backends.kubernetes.client import ApiClient
from makeway_quota.backends.kubernetes.connection import from_kubeconfig
from makeway_quota.backends.kubernetes.manifest import PodSettings
from makeway_quota.backends.kubernetes.nodes import toleration
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.auth import TokenAuth
from makeway_quota.web.http_server import run, server_config
from makeway_quota.web.settings import WebSettings

from kube_cluster.simulated import SIMULATED

from .request_load import people
from .requests import cycles

NAMESPACE = "bench"
IMAGE = "bench.test/none"
NEVER = 1e9
"""Seconds: no launcher runs on a simulated node, so that none is expected to report."""


async def serve(folder: Path, kubeconfig: Path) -> None:
    """Serve on a free port until a signal."""
    environ = {"MAKEWAY_STATE_DIR": str(folder), "MAKEWAY_POLICY_FILE": str(folder / "policy.yaml")}
    environ |= {"MAKEWAY_MAX_PENDING_JOBS": "0", "MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE": "0"}
    environ |= {"MAKEWAY_WORKER_URL": "http://bench.test/services/makeway", "MAKEWAY_TICKET_SECRET": "0" * 64}
    client = ApiClient(from_kubeconfig(kubeconfig))
    pods = PodSettings(NAMESPACE, "bench", environ["MAKEWAY_WORKER_URL"], IMAGE, IMAGE)
    backend = KubernetesBackend(client, pods, [toleration(SIMULATED)], lost_after=NEVER, report_within=NEVER)
    service = await Application.open(load(environ=environ), backend)
    web = WebSettings(secret=b"benchmark" * 4)
    app = create_app(service.services, web, TokenAuth(people()))
    server = uvicorn.Server(server_config(app))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await service.start()
    answering: asyncio.Task[None] | None = None
    try:
        with cycles() as seconds:
            answering = asyncio.create_task(_answer(seconds, client))
            print(f"http://127.0.0.1:{listener.getsockname()[1]}{web.prefix.rstrip('/')}", flush=True)
            await server.serve([listener])
    finally:
        if answering is not None:
            answering.cancel()
        await service.stop(stop_jobs=False)


async def _answer(seconds: list[float], client: ApiClient) -> None:
    """For each line that is read, print what happened since the line before."""
    process, requests, size = psutil.Process(), 0, 0
    while await asyncio.to_thread(sys.stdin.readline):
        times = process.cpu_times()
        figures = {
            "cycles": seconds[:],
            "requests": client.requests - requests,
            "bytes": client.bytes_read - size,
            "memory": process.memory_info().rss,
            "cpu": times.user + times.system,
        }
        seconds.clear()
        requests, size = client.requests, client.bytes_read
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
