"""The service of the benchmarks of pods: the real API, database and loop, with pods on a cluster of this machine.

It prints its address, and one line of figures for each line that it reads. Without launchers, which do not run on
simulated nodes, it does not expect any worker to report.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil
import uvicorn
from makeway_api.models.attempts import WorkerReportIn
from makeway_quota.application import Application
from makeway_quota.backends.base import LOST_AFTER
from makeway_quota.backends.kubernetes.api.client import ApiClient
from makeway_quota.backends.kubernetes.api.connection import from_kubeconfig
from makeway_quota.backends.kubernetes.api.informer import Informer
from makeway_quota.backends.kubernetes.backend import KubernetesBackend
from makeway_quota.backends.kubernetes.cluster.nodes import toleration
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings
from makeway_quota.backends.remote.backend import REPORT_WITHIN
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.server.http_server import run, server_config
from makeway_quota.web.settings import WebSettings

from kube_cluster.images import HOST
from kube_cluster.simulated import SIMULATED

from .request_load import people
from .requests import cycles

T = TypeVar("T", bound=Informer[str])
ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "bench"
LAUNCH = "launch\n"
NEVER = 1e9
"""Seconds within which workers report where no launcher runs."""


async def serve(folder: Path, kubeconfig: Path, host: str, launchers: bool) -> None:
    """Serve on a free port of this address until a signal."""
    listener = socket.create_server((host, 0), backlog=1024)
    web = WebSettings(secret=b"benchmark" * 4)
    url = f"http://{host}:{listener.getsockname()[1]}{web.prefix.rstrip('/')}"
    environ = {"MAKEWAY_STATE_DIR": str(folder), "MAKEWAY_POLICY_FILE": str(folder / "policy.yaml")}
    environ |= {"MAKEWAY_MAX_PENDING_JOBS": "0", "MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE": "0"}
    environ |= {"MAKEWAY_WORKER_URL": url, "MAKEWAY_TICKET_SECRET": "0" * 64}
    client = ApiClient(from_kubeconfig(kubeconfig))
    pods = PodSettings(NAMESPACE, "bench", url, HOST, HOST, checkpoint_claim="checkpoints" if launchers else "")
    lost_after, report_within = (LOST_AFTER, REPORT_WITHIN) if launchers else (NEVER, NEVER)
    backend = KubernetesBackend(
        client, pods, [toleration(SIMULATED)], lost_after=lost_after, report_within=report_within
    )
    service = await Application.open(load(environ=environ), backend)
    app = create_app(service.services, web, TokenAuth(people()))
    server = uvicorn.Server(server_config(app))
    await service.start()
    answering: asyncio.Task[None] | None = None
    try:
        with cycles() as seconds:
            answering = asyncio.create_task(_answer(service, seconds, client))
            print(url, flush=True)
            await server.serve([listener])
    finally:
        if answering is not None:
            answering.cancel()
        await service.stop(stop_jobs=False)


async def _answer(service: Application, seconds: list[float], client: ApiClient) -> None:
    """For each line that is read, print what happened since the line before; LAUNCH: first launch what is starting."""
    process, requests, size = psutil.Process(), 0, 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line == LAUNCH:
            await _launch(service)
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


async def _launch(service: Application) -> None:
    """Claim each attempt that is starting, and report that it runs, as its launcher would."""
    channel, attempts = service.components.channel, service.services.attempts
    for id, row in (await service.components.world.holding()).items():
        if row.kind == "job" and row.state == "starting":
            key = (id, row.attempt, 0)
            token = channel.tokens.token(key)
            await attempts.claim(token, key, "benchmark")
            await attempts.report(token, key, WorkerReportIn(started_at=time.time()))


@asynccontextmanager
async def followed(informer: T) -> AsyncIterator[T]:
    """Run an informer, which is synced when the block begins, until it ends."""
    task = asyncio.create_task(informer.run())
    try:
        await informer.wait_synced()
        yield informer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True, slots=True)
class Service:
    """The running service, seen from the process of the benchmark."""

    url: str
    process: subprocess.Popen[str]

    def launch(self) -> None:
        """Have all jobs that are starting report that they run: the pods of simulated nodes run no launcher."""
        self.figures(LAUNCH)

    def figures(self, line: str = "\n") -> dict[str, Any]:
        """Return what it did since the last call."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line)
        self.process.stdin.flush()
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        return result


@contextmanager
def running(kubeconfig: Path, policy: str, host: str = "127.0.0.1", *, launchers: bool = False) -> Iterator[Service]:
    """Run the service with a policy document."""
    with TemporaryDirectory(prefix="makeway-pods-") as folder:
        Path(folder, "policy.yaml").write_text(policy, encoding="utf-8")
        words = [folder, str(kubeconfig), host, "launchers" if launchers else "alone"]
        command = [sys.executable, "-m", "benchmarks.pod_service", *words]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, text=True) as process:
            try:
                assert process.stdout
                yield Service(process.stdout.readline().strip(), process)
            finally:
                process.terminate()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run(serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], launchers=sys.argv[4] == "launchers"))
