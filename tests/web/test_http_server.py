"""The HTTP server over real sockets: bounds on the head of a request, with answers that reach the sender."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from makeway_quota.web.server import http_server
from makeway_quota.web.server.http_server import (
    HEAD_BYTES,
    HEAD_FIELDS,
    MAX_PIPELINED,
    BoundedHttp,
    run,
    server_config,
)
from uvicorn.server import ServerState
from web.portal import Server, listening

PLAIN = b"GET /plain HTTP/1.1\r\nHost: a\r\n\r\n"
GENEROUS = 60.0


class App:
    """Answers every request with what it saw of it, once `gate` is open."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[bytes, bytes], bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.set()
        body = b""
        if scope["path"] != "/ignores-its-body":
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.gone.set()
                    return
                body += message["body"]
                if not message["more_body"]:
                    break
        self.seen.append((dict(scope["headers"]), body))
        await self.gate.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served(app: Any, protocol: type[BoundedHttp] = BoundedHttp) -> AsyncIterator[int]:
    """Serve an app; gives its port."""
    async with listening(Server(server_config(app, port=0, lifespan="off", http=protocol))) as port:
        yield port


async def converse(port: int, *parts: bytes, end: bool = False) -> bytes:
    """Send all parts, then read until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(GENEROUS):
            for part in parts:
                writer.write(part)
                await writer.drain()
            if end:
                writer.write_eof()
            return await reader.read()
    finally:
        writer.close()


def problem(answer: bytes, status: int, *words: str) -> None:
    """Check that the only answer is a problem with this status, whose sentence has these words."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:500]
    assert b"\r\nconnection: close" in head
    assert b"\r\ncontent-type: application/problem+json" in head
    result = json.loads(body)
    assert result["status"] == status
    for word in words:
        assert word in result["detail"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x" * HEAD_BYTES + b": 1\r\n\r\n",
        b"GET /" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (at, b"x" * 700) for at in range(100)) + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % at for at in range(HEAD_FIELDS + 1)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2**24,
    ],
    ids=["value", "name", "address", "sum", "fields", "endless"],
)
async def test_a_head_beyond_the_bounds_is_refused(head: bytes) -> None:
    app = App()
    async with served(app) as port:
        problem(await converse(port, head), 431, "64 KiB", "200 fields")
    assert not app.entered.is_set()


async def test_a_head_within_the_bounds_passes_in_small_parts() -> None:
    app = App()
    fields = b"".join(b"X-%d: %s\r\n" % (at, b"x" * 300) for at in range(HEAD_FIELDS - 2))
    head = b"GET / HTTP/1.1\r\nHost: a\r\n" + fields + b"Connection: close\r\n\r\n"
    assert HEAD_BYTES * 0.9 < len(head) < HEAD_BYTES
    async with served(app) as port:
        answer = await converse(port, *(head[at : at + 997] for at in range(0, len(head), 997)))
    assert answer.endswith(b"ok")
    assert len(app.seen[0][0]) == HEAD_FIELDS


async def test_the_bytes_of_a_body_are_no_head() -> None:
    """Bodies, chunk by chunk and in tiny parts, and the head that follows on the same connection."""
    app = App()
    many = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [b"x" * 9] * 20_000)
    chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + many + b"0\r\n\r\n"
    sized = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + b"y" * 300_000
    last = PLAIN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with served(app) as port:
        answer = await converse(port, chunked, *(sized[at : at + 4099] for at in range(0, len(sized), 4099)), last)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert [len(body) for _, body in app.seen] == [180_000, 300_000, 0]


async def test_a_trailer_is_no_header() -> None:
    app = App()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with served(app) as port:
        await converse(port, head, b"2\r\nhi\r\n0\r\nAuthorization: token root\r\n\r\n")
    headers, body = app.seen[0]
    assert body == b"hi"
    assert b"authorization" not in headers


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"0\r\nX: " + b"x" * 2**20, 431),
        (b"0\r\n" + b"".join(b"X-%d: 1\r\n" % at for at in range(HEAD_FIELDS + 1)) + b"\r\n", 431),
        (b"2;" + b"x" * 2**20, 431),
        (b"no length\r\n", 400),
    ],
    ids=["value", "fields", "extension", "broken"],
)
async def test_a_body_with_broken_framing_is_refused_and_never_complete(rest: bytes, status: int) -> None:
    app = App()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with served(app) as port:
        problem(await converse(port, head, b"2\r\nhi\r\n", rest), status)
        await asyncio.wait_for(app.gone.wait(), GENEROUS)
    assert app.seen == []


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"nonsense\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi",
    ],
    ids=["tls", "words", "not-ascii", "connect", "two-framings", "two-lengths", "space", "upgrade"],
)
async def test_what_is_not_http_is_refused(nonsense: bytes) -> None:
    app = App()
    async with served(app) as port:
        problem(await converse(port, nonsense), 400)
    assert app.seen == []


async def test_an_upgrade_is_answered_as_http_and_what_follows_is_dropped() -> None:
    app = App()
    head = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with served(app) as port:
        answer = await converse(port, head + PLAIN, PLAIN)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert len(app.seen) == 1


class Impatient(BoundedHttp):
    """Waits for the first byte as long as it takes, and for all that follows for 50 ms only."""

    head_seconds = GENEROUS

    def on_message_begin(self) -> None:
        self.head_seconds = 0.05
        super().on_message_begin()


class Deaf(BoundedHttp):
    """Waits 50 ms for the first byte."""

    head_seconds = 0.05


@pytest.mark.parametrize("start", [b"G", b"GET / HTTP/1.1\r\nHost: a\r\nX: 1"])
async def test_a_slow_head_is_refused(start: bytes) -> None:
    app = App()
    async with served(app, Impatient) as port:
        problem(await converse(port, start), 408)
    assert not app.entered.is_set()


async def test_a_connection_that_sends_nothing_is_closed() -> None:
    async with served(App(), Deaf) as port:
        assert await converse(port) == b""


async def test_a_body_that_goes_on_after_its_answer_has_a_limit() -> None:
    head = b"POST /ignores-its-body HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
    async with served(App(), Impatient) as port:
        assert (await converse(port, head)).startswith(b"HTTP/1.1 200")


async def test_the_time_for_a_head_does_not_cut_an_answer_short() -> None:
    """The answer takes many times as long as the head of the next request may."""
    app = App()
    app.gate.clear()
    async with served(app, Impatient) as port:
        answering = asyncio.create_task(converse(port, PLAIN, b"GET /next HTTP"))
        await asyncio.wait_for(app.entered.wait(), GENEROUS)
        await asyncio.sleep(0.3)
        assert not answering.done()
        app.gate.set()
        answer = await answering
    _, first, second = answer.split(b"HTTP/1.1 ")
    assert first.endswith(b"ok")
    assert second.startswith(b"408 ")


async def test_nonsense_after_a_request_does_not_spoil_its_answer() -> None:
    app = App()
    app.gate.clear()
    async with served(app) as port:
        answering = asyncio.create_task(converse(port, PLAIN, b"\0\0\0"))
        await asyncio.wait_for(app.entered.wait(), GENEROUS)
        app.gate.set()
        answer = await answering
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"ok")


class Wire(asyncio.Transport):
    """A connection that keeps what is written, and whether the server reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads = True
        self.closed = asyncio.Event()

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()


def connected(app: Any) -> tuple[BoundedHttp, Wire]:
    """Return one connection without a socket: what arrives is fed to it in parts as large as the test likes."""
    protocol, wire = BoundedHttp(server_config(app, lifespan="off"), ServerState(), {}), Wire()
    protocol.connection_made(wire)
    return protocol, wire


async def test_requests_that_wait_for_an_answer_are_few_and_the_connection_closes_after_them() -> None:
    app = App()
    app.gate.clear()
    protocol, wire = connected(app)
    protocol.data_received(PLAIN * 1000)
    protocol.data_received(PLAIN * 1000)
    assert len(protocol.pipeline) == MAX_PIPELINED
    app.gate.set()
    await asyncio.wait_for(wire.closed.wait(), GENEROUS)
    assert wire.written.count(b"HTTP/1.1 ") == wire.written.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1


async def test_nothing_is_read_while_requests_wait() -> None:
    """Every answer makes room for one request; one read may bring thousands."""
    waiting: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if protocol.pipeline:
            waiting.append(len(protocol.pipeline))
            assert not wire.reads
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        if not protocol.pipeline:
            done.set()

    done = asyncio.Event()
    protocol, wire = connected(app)
    protocol.data_received(PLAIN * 5)
    await asyncio.wait_for(done.wait(), GENEROUS)
    await asyncio.gather(*protocol.tasks)
    assert waiting == [4, 3, 2, 1]
    assert wire.written.count(b"HTTP/1.1 200") == 5
    assert wire.reads
    protocol.connection_lost(None)


async def test_a_refused_request_spoils_no_answer_before_it() -> None:
    app = App()
    app.gate.clear()
    protocol, wire = connected(app)
    protocol.data_received(PLAIN + PLAIN + b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    protocol.data_received(b"no length\r\n")
    assert wire.written == b""
    app.gate.set()
    await asyncio.wait_for(wire.closed.wait(), GENEROUS)
    assert wire.written.count(b"HTTP/1.1 ") == wire.written.count(b"HTTP/1.1 200") == 2
    assert len(app.seen) == 2


async def test_the_request_under_way_hears_that_the_connection_is_gone_also_with_others_behind_it() -> None:
    started: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        started.append(scope["path"])
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        gone.set()

    gone = asyncio.Event()
    protocol, _wire = connected(app)
    protocol.data_received(PLAIN * 2)
    await asyncio.sleep(0)
    protocol.connection_lost(None)
    await asyncio.wait_for(gone.wait(), GENEROUS)
    assert started == ["/plain"]


async def test_an_idle_connection_is_used_again() -> None:
    app = App()
    async with served(app, Impatient) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(PLAIN)
            assert (await asyncio.wait_for(reader.readuntil(b"ok"), GENEROUS)).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.1)
        writer.write(b"\r\n")  # an empty line before a request is allowed, and starts no limit of a head
        await asyncio.sleep(0.1)
        writer.write(PLAIN)
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), GENEROUS)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert len(app.seen) == 4


def test_the_service_runs_on_uvloop_and_hears_of_a_process_that_ends() -> None:
    """The backend of this machine waits for its processes with `add_reader` on a file descriptor of each."""

    process = subprocess.Popen([sys.executable, "-c", "pass"])
    descriptor = os.pidfd_open(process.pid)

    async def ended() -> str:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(descriptor, gone.set)
        await asyncio.wait_for(gone.wait(), GENEROUS)
        loop.remove_reader(descriptor)
        return type(loop).__module__

    assert run(ended()).startswith("uvloop")
    os.close(descriptor)
    assert process.wait(60) == 0
    assert process.wait(GENEROUS) == 0


def test_the_server_has_the_bounds_of_the_documentation() -> None:
    config = server_config(App())
    assert (config.http, config.ws) == (BoundedHttp, "none")
    assert (http_server.HEAD_BYTES, http_server.HEAD_FIELDS, http_server.HEAD_SECONDS) == (65536, 200, 20.0)
