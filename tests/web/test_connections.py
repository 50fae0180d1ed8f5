"""Connections that nothing comes from keep out neither the Hub nor probes, however many there are."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import quantiles

import httpx2
import pytest
from makeway_quota.web.connections import Connections
from makeway_quota.web.http_server import BoundedHttp, server_config
from web.portal import Server, listening
from web.test_http_server import App, converse, served

PROBE = b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n"


class One:
    """A connection that is only counted."""

    def __init__(self, address: str, idle_since: float | None, requests: int = 1) -> None:
        self.address, self.idle_since, self.requests = address, idle_since, requests
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_the_oldest_idle_connection_of_the_largest_address_goes_first() -> None:
    connections = Connections(most=6)
    hub = One("hub", 0.0)
    busy = One("many", None)
    proven, silent, later = One("many", 1.0), One("many", 3.0, requests=0), One("many", 2.0)
    for each in (hub, busy, proven, silent, later, One("other", 0.0)):
        connections.opened(each)
    connections.opened(One("hub", 9.0, requests=0))
    assert silent.dropped
    connections.opened(One("hub", 9.0, requests=0))
    assert proven.dropped
    assert [each.dropped for each in (hub, busy, later)] == [False] * 3


def test_where_all_are_busy_the_new_one_is_refused() -> None:
    connections = Connections(most=2)
    busy = [One("a", None), One("b", None)]
    for each in busy:
        connections.opened(each)
    new = One("c", 0.0, requests=0)
    connections.opened(new)
    assert new.dropped
    assert not any(each.dropped for each in busy)
    connections.closed(busy[0])
    connections.opened(other := One("c", 0.0, requests=0))
    assert not other.dropped


@asynccontextmanager
async def idle_connections(port: int, count: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Open connections that send nothing."""
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
    yield writers
    for writer in writers:
        writer.close()


class Few(BoundedHttp):
    most_connections = 40


async def test_requests_are_answered_beside_more_idle_connections_than_are_possible() -> None:
    app = App()
    async with served(app, Few) as port:
        app.gate.clear()
        busy = asyncio.create_task(converse(port, PROBE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")))
        await app.entered.wait()
        async with idle_connections(port, 100):
            app.gate.set()
            for _ in range(20):
                answer = await converse(port, PROBE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                assert answer.startswith(b"HTTP/1.1 200")
            assert (await busy).startswith(b"HTTP/1.1 200"), "what is answered is never closed"


SERVE = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import uvicorn
from makeway_quota.descriptors import raise_limit
from makeway_quota.web.http_server import run, server_config

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

if sys.argv[2] == "raise":
    raise_limit()
else:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
server = uvicorn.Server(server_config(app, port=int(sys.argv[1]), lifespan="off", backlog=4096))
run(server.serve())
"""


@pytest.mark.parametrize("hard", ["raise", "1024"])
async def test_eleven_hundred_idle_connections_change_no_answer(hard: str) -> None:
    async with listening(Server(server_config(App(), port=0, lifespan="off"))) as port:
        pass  # a port that is free
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, str(port), hard)
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as hub, asyncio.timeout(120):
            while True:
                try:
                    await hub.get("/readyz")
                    break
                except httpx2.TransportError:
                    await asyncio.sleep(0.05)
            before = await p95(hub, port)
            async with idle_connections(port, 1100):
                beside = await p95(hub, port)
            assert beside < before * 3 + 0.05, (before, beside)
    finally:
        server.kill()
        await server.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


async def p95(hub: httpx2.AsyncClient, port: int) -> float:
    """Return the 95th percentile of the seconds of a probe on a new connection, and of a request of the Hub's."""
    taken = []
    for _ in range(40):
        began = time.perf_counter()
        assert (await hub.get("/readyz")).status_code == 200
        taken.append(time.perf_counter() - began)
        began = time.perf_counter()
        answer = await converse(port, PROBE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 200")
        taken.append(time.perf_counter() - began)
    return quantiles(taken, n=20)[-1]


def test_the_limit_is_raised_and_jobs_get_the_one_before() -> None:
    code = (
        "import resource as r; h = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (512, h));"
        "from makeway_quota import descriptors as d; d.raise_limit(); d.raise_limit();"
        "print(d.limit(), min(h, d.ENOUGH), d.limit_of_jobs())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    now, wanted, jobs = done.stdout.split()
    assert (now, jobs) == (wanted, "512")
