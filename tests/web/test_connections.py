"""Connections that nothing comes from keep out neither the Hub nor probes, however many there are."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from makeway_api import open_files
from makeway_quota.web.server.connections import Connections, SpawnerTokens
from makeway_quota.web.server.http_server import BoundedHttp, server_config
from web.portal import Server, listening
from web.test_http_server import App, converse, problem, served

IDLE = 1100
"""More than the open files with which most systems start a program"""
PROBE = b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n"


class One:
    """A connection that is only counted."""

    def __init__(self, address: str, idle_since: float | None, requests: int = 1, logged_in: bool = False) -> None:
        self.address, self.idle_since, self.requests, self.logged_in = address, idle_since, requests, logged_in
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_the_oldest_idle_connection_of_the_largest_address_goes_first() -> None:
    connections = Connections(limit=6)
    hub = One("hub", 0.0)
    busy = One("many", None)
    proven, silent, later = One("many", 1.0), One("many", 3.0, requests=0), One("many", 2.0)
    for connection in (hub, busy, proven, silent, later, One("other", 0.0)):
        connections.opened(connection)
    connections.opened(One("hub", 9.0, requests=0))
    assert silent.dropped
    connections.opened(One("hub", 9.0, requests=0))
    assert proven.dropped
    assert [connection.dropped for connection in (hub, busy, later)] == [False] * 3


def test_where_all_are_busy_the_new_one_is_refused() -> None:
    connections = Connections(limit=2)
    busy = [One("a", None), One("b", None)]
    for connection in busy:
        connections.opened(connection)
    new = One("c", 0.0, requests=0)
    connections.opened(new)
    assert new.dropped
    assert not any(connection.dropped for connection in busy)
    connections.closed(busy[0])
    connections.opened(other := One("c", 0.0, requests=0))
    assert not other.dropped


def test_where_all_are_busy_only_probes_and_the_hub_are_answered() -> None:
    tokens = SpawnerTokens()
    tokens.add("of-the-spawner")
    connections = Connections(limit=8, tokens=tokens)  # two of them are reserved
    busy = [One(f"worker-{i}", None) for i in range(6)]
    for connection in busy:
        connections.opened(connection)
    beyond = [One("proxy", None), One("hub", None)]
    for connection in beyond:
        connections.opened(connection)
    assert not any(connection.dropped for connection in (*busy, *beyond))
    spawner = [(b"host", b"a"), (b"authorization", b"token of-the-spawner")]
    for connection in beyond:
        for target in (b"/readyz", b"/healthz?x=1", b"/services/makeway/readyz"):
            assert connections.admits(connection, target, [])
        assert connections.admits(connection, b"/services/makeway/api/v1/sessions", spawner)
        for headers in ([], [(b"authorization", b"token another")], [(b"authorization", b"")]):
            assert not connections.admits(connection, b"/services/makeway/", headers)
    assert all(connections.admits(connection, b"/services/makeway/", []) for connection in busy)
    connections.opened(last := One("other", 0.0, requests=0))
    assert last.dropped, "no more are possible"
    connections.closed(busy[0])
    assert connections.admits(beyond[0], b"/services/makeway/", []), "there is room for all again"
    assert not connections.admits(beyond[1], b"/services/makeway/", [])


def test_silent_connections_do_not_keep_the_reserved_places() -> None:
    connections = Connections(limit=8)
    for i in range(6):
        connections.opened(One(f"worker-{i}", None))
    for i in range(100):
        connections.opened(One(f"127.0.0.{i % 10}", float(i), requests=0))
    probe = One("kubelet", 1000.0, requests=0)
    connections.opened(probe)
    assert not probe.dropped
    assert connections.admits(probe, b"/readyz", [])


@pytest.mark.parametrize("addresses", [1, 10])
def test_what_answers_is_kept_beside_idle_connections_of_many_addresses(addresses: int) -> None:
    connections = Connections(limit=100)
    busy = [One("proxy", None) for _ in range(50)]
    signed_in = [One("proxy", 0.0, requests=9, logged_in=True) for _ in range(20)]
    for connection in (*busy, *signed_in):
        connections.opened(connection)
    for i in range(1100):
        connections.opened(One(f"127.0.0.{2 + i % addresses}", float(i), requests=i % 3))
        if i % 10 == 0:
            connections.opened(probe := One("kubelet", float(i), requests=0))
            assert not probe.dropped
            assert connections.admits(probe, b"/readyz", [])
            connections.closed(probe)
    assert not any(connection.dropped for connection in (*busy, *signed_in))


class Large:
    """Answers with more than any buffer holds."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(400):
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Impatient(BoundedHttp):
    stall_seconds = 0.6


async def test_a_reader_that_takes_nothing_is_closed_and_a_slow_one_is_not() -> None:
    async with served(Large(), Impatient) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
        slow, other = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
        for stream in (writer, other):
            stream.write(PROBE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        received = 0
        async with asyncio.timeout(60):
            while part := await slow.read(2**18):
                received += len(part)
                await asyncio.sleep(0.01)
        assert received > 400 * 2**16, "it took more than a second, and some of it every moment"
        received = 0
        async with asyncio.timeout(60):
            with suppress(ConnectionResetError):
                while part := await reader.read(2**20):
                    received += len(part)
        assert received < 400 * 2**16, "what the buffers held when it was closed"
        writer.close()
        other.close()


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
    max_connections = 40  # ten of them are reserved


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


class Held:
    """Holds requests for /held until `gate` is open; `state` is that of an app that knows the Hub's spawner."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.held = asyncio.Semaphore(0)
        tokens = SpawnerTokens()
        tokens.add("spawner")
        self.state = SimpleNamespace(authenticator=SimpleNamespace(spawner_tokens=tokens))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/held":
            self.held.release()
            await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def asking(path: str, *fields: str) -> bytes:
    """Return a request after which the connection closes."""
    lines = (f"GET {path} HTTP/1.1", "Host: a", "Connection: close", *fields)
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


async def test_the_hub_and_probes_get_in_where_workers_hold_all_places() -> None:
    app = Held()
    async with served(app, Few) as port:
        held = [asyncio.create_task(converse(port, asking("/held"))) for _ in range(30)]
        for _ in held:
            await app.held.acquire()
        for request in (asking("/readyz"), asking("/healthz"), asking("/x", "Authorization: token spawner")):
            assert (await converse(port, request)).startswith(b"HTTP/1.1 200"), request
        for request in (asking("/x"), asking("/x", "Authorization: token another"), asking("/held")):
            refused = await converse(port, request)
            problem(refused, 503, "try again in a moment")
            assert b"\r\nretry-after: 5" in refused
        async with idle_connections(port, 60):
            assert (await converse(port, asking("/readyz"))).startswith(b"HTTP/1.1 200")
        app.gate.set()
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in await asyncio.gather(*held))
        assert (await converse(port, asking("/x"))).startswith(b"HTTP/1.1 200"), "there is room for all again"


SERVE = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import uvicorn
from makeway_api.open_files import raise_limit
from makeway_quota.web.server.http_server import run, server_config

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


def open_files_of(pid: int) -> int:
    """Return how many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize(("limit", "kept"), [("raise", True), ("1024", False)])
async def test_eleven_hundred_idle_connections_cost_no_answer(tmp_path: Path, limit: str, kept: bool) -> None:
    async with listening(Server(server_config(App(), port=0, lifespan="off"))) as port:
        pass  # a port that is free
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    errors = tmp_path / "errors"
    with errors.open("wb") as file:  # a pipe that is not read would block it
        server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, str(port), limit, stderr=file)
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as hub, asyncio.timeout(180):
            while True:
                try:
                    await hub.get("/readyz")
                    break
                except httpx2.TransportError:
                    await asyncio.sleep(0.05)
            async with idle_connections(port, IDLE):
                for _ in range(40):
                    assert (await hub.get("/readyz")).status_code == 200, "on a connection that stays open"
                    assert (await converse(port, asking("/readyz"))).startswith(b"HTTP/1.1 200"), "on a new one"
                assert (open_files_of(server.pid) > IDLE) == kept, "idle ones are closed only where files run out"
    finally:
        server.kill()
        await server.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert b"Too many open files" not in errors.read_bytes()


def test_the_limit_is_raised_and_jobs_get_the_one_before() -> None:
    code = (
        "import resource as r; h = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (512, h));"
        "from makeway_api import open_files as d; d.raise_limit(); d.raise_limit();"
        "print(d.limit(), min(h, d.MAX_OPEN_FILES), d.soft_limit_of_jobs())"
    )
    unraised = {name: value for name, value in os.environ.items() if name != open_files.SOFT_LIMIT_VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unraised)
    now, wanted, jobs = done.stdout.split()
    assert (now, jobs) == (wanted, "512")
