"""Measure probes and the Hub's requests beside 1,100 connections that log in nowhere and send nothing."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from statistics import median

from .lease import ask_and_release
from .measure import Measured
from .portal import Portal, timed

IDLE = 1100
ROUNDS = 5
"""Windows without and with idle connections, one after the other: what else the machine does meets both alike"""
ASKS = 30
"""Probes and leases in each window"""
HIGHER = 1.25
"""How many times the 95 % without them still counts as unchanged"""


def measure() -> Iterator[Measured]:
    """Time `/readyz` on new connections, and leases of the spawner, without and with idle connections in turn."""
    result: dict[str, tuple[list[float], list[float]]] = {"probe": ([], []), "lease": ([], [])}
    with Portal(gpus=4) as portal, _more_files():
        _window(portal)
        for _ in range(ROUNDS):
            for at, count in enumerate((0, IDLE)):
                with _idle_connections(portal.service_port, count):
                    for what, samples in _window(portal).items():
                        result[what][at].extend(samples)
    names = {"probe": "/readyz on a new connection", "lease": "the spawner's request to its lease"}
    for what, (without, beside) in result.items():
        p95 = Measured("", "ms", without, "", 1.0).worst
        yield Measured(
            f"{names[what]}, beside {IDLE:,} idle connections",
            "ms",
            beside,
            "the same without them",
            median(without),
            HIGHER * p95,
            f"They have no login; in turn with windows without them, whose 95 % is {p95:.3g} ms.",
            at_95=True,
        )


def _window(portal: Portal) -> dict[str, list[float]]:
    """Return the milliseconds of each probe and of each lease."""

    def probe() -> None:
        connection = HTTPConnection("127.0.0.1", portal.service_port, timeout=60)
        with closing(connection):
            connection.request("GET", "/readyz")
            assert connection.getresponse().status == 200

    pairs = [(1000 * timed(probe), 1000 * ask_and_release(portal)) for _ in range(ASKS)]
    return {"probe": [pair[0] for pair in pairs], "lease": [pair[1] for pair in pairs]}


@contextmanager
def _idle_connections(port: int, count: int) -> Iterator[None]:
    """Hold so many connections open, and wait until the service has taken them."""
    opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    time.sleep(1)
    try:
        yield
    finally:
        for item in opened:
            item.close()
        time.sleep(1)


@contextmanager
def _more_files() -> Iterator[None]:
    """Raise the limit of open files of this process to what the connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * IDLE)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
