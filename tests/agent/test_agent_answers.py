"""What an agent makes of answers that are none of the service's, or do not end: from proxies, portals and bad lines."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from makeway.agent import client as client_module
from makeway.agent.client import AgentClient, MachineEnded
from makeway.launcher import service as service_module
from makeway.launcher.service import MAX_ANSWER, ServiceUnavailable

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
HTML = b"<html><body>Please log in to the network</body></html>"


def whole(head: bytes, body: bytes) -> bytes:
    """Return an answer with its length."""
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@contextmanager
def answering(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a server that reads the head of each request, and then says what it likes."""

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                data = b""
                while b"\r\n\r\n" not in data:
                    more = connection.recv(65_536)
                    if not more:
                        return
                    data += more
                speak(connection)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def drip(connection: socket.socket, data: bytes) -> None:
    for at in range(len(data)):
        connection.sendall(data[at : at + 1])
        time.sleep(0.05)


@pytest.mark.parametrize(
    "answer",
    [whole(JSON, b'{"revision": "1", "attempts": []' + b" " * 1000 + b"}"), JSON + b"X-Slow: x" + b"y" * 1000],
    ids=["body", "head"],
)
def test_an_answer_that_drips_is_given_up_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """Each byte comes in time, and the answer never."""
    monkeypatch.setattr(service_module, "TIMEOUT", 0.5)
    monkeypatch.setattr(service_module, "POLL_MARGIN", 0.5)
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.0)
    with answering(lambda connection: drip(connection, answer)) as url:
        client = AgentClient(url, "m-1", "token")
        for ask in (lambda: client.report({}), lambda: client.asked("")):
            began = time.monotonic()
            with pytest.raises(ServiceUnavailable):
                ask()
            assert 0.4 < time.monotonic() - began < 5.0
        client.close()


def test_a_body_without_an_end_takes_no_memory() -> None:
    def flood(connection: socket.socket) -> None:
        connection.sendall(JSON + b"Connection: close\r\n\r\n")
        block = b"x" * 2**20
        for _ in range(400):
            connection.sendall(block)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with answering(flood) as url:
        client = AgentClient(url, "m-1", "token")
        with pytest.raises(ServiceUnavailable, match="longer than"):
            client.report({})
        client.close()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 4 * MAX_ANSWER


@pytest.mark.parametrize("length", [MAX_ANSWER + 1, 10**18])
def test_a_body_that_is_announced_as_too_long_is_not_read(length: int) -> None:
    with answering(lambda connection: connection.sendall(JSON + b"Content-Length: %d\r\n\r\n{" % length)) as url:
        client = AgentClient(url, "m-1", "token")
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable, match="longer than"):
            client.report({})
        assert time.monotonic() - began < 5.0
        client.close()


@pytest.mark.parametrize(
    "answer",
    [
        whole(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n", HTML),
        whole(b"HTTP/1.1 302 Found\r\nLocation: http://login.example/\r\n", HTML),
        whole(b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\n", HTML),
        whole(JSON, b"[]"),
        whole(JSON, b"[" * 100_000),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    ],
    ids=["portal", "redirect", "proxy", "list", "nested", "chunks", "another protocol"],
)
def test_an_answer_that_is_not_the_services_is_silence(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """A machine behind the login page of a network has not been heard, however friendly the page is."""
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.0)
    with answering(lambda connection: connection.sendall(answer)) as url:
        client = AgentClient(url, "m-1", "token")
        client._heard_at -= 100.0
        for ask in (lambda: client.report({}), lambda: client.asked("")):
            with pytest.raises(ServiceUnavailable):
                ask()
            assert client.silence >= 100.0
        client.close()


def test_an_answer_of_the_service_is_heard_and_its_connection_is_kept() -> None:
    connections = set[int]()

    def speak(connection: socket.socket) -> None:
        connections.add(connection.fileno())
        connection.sendall(whole(JSON, json.dumps({"token": None}).encode()))

    with answering(speak) as url:
        client = AgentClient(url, "m-1", "token")
        client._heard_at -= 100.0
        for _ in range(3):
            client.report({})
        assert client.silence < 50.0
        assert len(connections) == 1
        client.close()


def test_a_machine_that_is_over_is_told_through_a_slow_line() -> None:
    body = json.dumps({"status": 410, "code": "machine_over", "detail": "it is over"}).encode()
    with answering(lambda connection: drip(connection, whole(b"HTTP/1.1 410 Gone\r\n", body)[:200])) as url:
        client = AgentClient(url, "m-1", "token")
        with pytest.raises(MachineEnded, match="it is over"):
            client.report({})
        client.close()
