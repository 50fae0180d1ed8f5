"""Five hundred workers that report and hold a request each, beside idle connections without a login."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.web.server.http_server import BoundedHttp, server_config
from running import running
from web.portal import API, PEOPLE, PREFIX, Portal, Server, listening

WORKERS = 500
IDLE = 1100
PATIENCE = 10.0
"""Seconds within which everything is answered, on a machine that runs other tests beside."""
TLS = ssl.create_default_context()
"""One for all clients: each would make its own, which takes longer than all that they do."""
POLICY = f"""\
version: 1
pools:
  - {{name: gpu, nodes: {{local: {{gpus: all}}}}, profiles: [gpu1]}}
profiles:
  - {{name: gpu1, title: 1 GPU, gpus: 1, pools: [gpu], grace: 30, max_workers: {WORKERS}}}
policies:
  - {{name: rnd, title: R&D, groups: [rnd], quotas: [{{reserved: {WORKERS}}}]}}
"""


class Crowded(BoundedHttp):
    max_connections = 2 * WORKERS + 300
    """As many as the workers need, with few to spare."""


class Reporter:
    """A launcher: one connection for its reports, and one for the request on which it waits for orders."""

    def __init__(self, base: str, path: str, token: str) -> None:
        own: dict[str, Any] = {
            "verify": TLS,
            "base_url": f"{base}{PREFIX}{path}",
            "headers": {"Authorization": f"Bearer {token}"},
        }
        self.reports = httpx2.AsyncClient(**own, timeout=60, trust_env=False)
        self.orders = httpx2.AsyncClient(**own, timeout=60, trust_env=False)
        self.took: list[float] = []

    async def claim(self) -> None:
        (await self.reports.post("/claim", json={"instance": "launcher-1"})).raise_for_status()

    async def hold(self) -> None:
        while True:
            (await self.orders.get("/orders", params={"wait": 60})).raise_for_status()

    async def report(self, times: int) -> None:
        for _ in range(times):
            began = time.monotonic()
            (await self.reports.post("/report", json={})).raise_for_status()
            self.took.append(time.monotonic() - began)
            await asyncio.sleep(0.5)

    async def close(self) -> None:
        await self.reports.aclose()
        await self.orders.aclose()


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * (WORKERS + IDLE) + 2000
    if before[1] != resource.RLIM_INFINITY and before[1] < wanted:
        pytest.skip(f"this machine lets a process open {before[1]} files, and {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], wanted), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def idle(stack: ExitStack, port: int, addresses: int, count: int) -> None:
    """Open connections that send nothing, from one or more addresses of this machine."""
    for i in range(count):
        source = (f"127.0.0.{2 + i % addresses}", 0)
        stack.enter_context(socket.create_connection(("127.0.0.1", port), 10, source_address=source))


@pytest.mark.slow
@pytest.mark.covers("N26")
async def test_five_hundred_workers_report_beside_idle_connections(tmp_path: Path, many_files: None) -> None:
    backend = MemoryBackend([NodeStatus("local", "gpu", tuple(range(WORKERS)), virtual=True)], real_time=True)
    async with running(tmp_path, POLICY, backend=backend, people=PEOPLE) as run:
        web = Portal(run, backend)
        job = await run.submit("ana", "gang", profile="gpu1", workers=WORKERS)
        await run.job(job.id, "running")
        channel = run.service.components.channel
        config = server_config(web.app, port=0, log_level="error", lifespan="off", http=Crowded, backlog=4096)
        async with listening(Server(config)) as port:
            base = f"http://127.0.0.1:{port}"
            workers = [Reporter(base, *channel.credentials(job.id, 1, number)) for number in range(WORKERS)]
            try:
                for part in range(0, WORKERS, 50):
                    await asyncio.gather(*(worker.claim() for worker in workers[part : part + 50]))
                await beside_idle_connections(base, port, workers)
            finally:
                web.app.state.streams.close()
                await asyncio.gather(*(worker.close() for worker in workers))
        await web.close()


async def beside_idle_connections(base: str, port: int, workers: list[Reporter]) -> None:
    """Have all workers report while idle connections come, and ask as probes, as the Hub and as people do."""
    held = [asyncio.create_task(worker.hold()) for worker in workers]
    await asyncio.gather(*(worker.report(1) for worker in workers))
    for addresses in (1, 10):
        reporting = [asyncio.create_task(worker.report(4)) for worker in workers]
        with ExitStack() as stack:
            loop = asyncio.get_running_loop()
            flood = loop.run_in_executor(None, idle, stack, port, addresses, IDLE)
            while not all(task.done() for task in reporting):
                for path, token in (
                    ("/readyz", ""),
                    ("/healthz", ""),
                    (f"{API}/offers?user=ana", "spawner"),
                    (f"{API}/me", "ana"),
                ):
                    headers = {"Authorization": f"token {token}"} if token else {}
                    async with httpx2.AsyncClient(
                        base_url=base, timeout=PATIENCE, verify=TLS, trust_env=False
                    ) as fresh:
                        answer = await fresh.get(path, headers=headers)
                    assert answer.status_code == 200, (path, answer.text)
            await asyncio.gather(*reporting)
            await flood
        assert not any(task.done() for task in held), "a held request is never closed"
    assert max(max(worker.took) for worker in workers) < PATIENCE
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
