"""A thousand connections without a login, to each port of a whole portal, hinder neither its parts nor its people."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
from hub.portal import SERVICE, Portal, until
from makeway_api.models import JobRequest

pytestmark = [pytest.mark.e2e, pytest.mark.covers("N26")]

IDLE = 1100
SOFT = 1024
"""The limit of open files with which most systems start a program."""
JUPYTERS = "4096"
"""To which a Jupyter server raises a lower limit itself; it leaves a higher one as it is."""
PATIENCE = 10.0


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Portal, dict[str, int]]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 4 * IDLE:
        pytest.skip(f"this machine lets a process open {before[1]} files, and {4 * IDLE} are needed")
    wrap = ("bash", "-c", f'ulimit -Sn {SOFT}; exec "$@"', "_")
    made = Portal(tmp_path, wrap=wrap)
    made.state.create()
    ports = made.state.ports()  # which the portal takes, as they are free
    made.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4 * IDLE), before[1]))
    yield made, ports
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    made.stop()


@contextmanager
def idle(ports: list[int], addresses: int) -> Iterator[None]:
    """Hold connections that send nothing, from one or more addresses of this machine."""
    with ExitStack() as stack:
        for port in ports:
            for i in range(IDLE):
                source = (f"127.0.0.{2 + i % addresses}", 0)
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 10, source_address=source))
        yield


def p95(urls: dict[str, str], times: int = 60) -> dict[str, str]:
    """Return the 95th percentile of the answers of each address, for people who read the output of the test."""
    result = {}
    for name, url in urls.items():
        with httpx2.Client(trust_env=False, timeout=PATIENCE) as client:
            took = sorted(client.get(url).elapsed.total_seconds() for _ in range(times))
        result[name] = f"{1000 * took[round(0.95 * times) - 1]:.0f} ms"
    return result


def soft_limit(pid: int) -> str:
    (line,) = [
        line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max open files")
    ]
    return line.split()[3]


def test_idle_connections_without_a_login_hinder_no_part_and_no_person(started: tuple[Portal, dict[str, int]]) -> None:
    portal, ports = started
    browser = portal.browser("ana")
    ana = portal.client(portal.user_token("ana"))
    service, hub = (f"http://127.0.0.1:{ports[name]}" for name in ("service", "hub"))
    watched = {"/readyz": f"{service}/readyz", "/hub/health": f"{hub}/hub/health", "/hub/login": f"{hub}/hub/login"}
    print(f"p95 without idle connections: {p95(watched)}")
    for addresses in (1, 10):
        with idle([portal.port, ports["service"], ports["hub"]], addresses):
            print(f"p95 with {IDLE} to each port from {addresses} address(es): {p95(watched)}")
            for _ in range(5):
                for url in (f"{service}/readyz", f"{service}/healthz", f"{hub}/hub/health", f"{portal.url}/hub/health"):
                    began = time.monotonic()
                    assert httpx2.get(url, timeout=PATIENCE, trust_env=False).status_code == 200
                    assert time.monotonic() - began < PATIENCE
                assert browser.get(f"{SERVICE}/").status_code == 200
                assert browser.get("/hub/home").status_code == 200
            portal.start_server("ana", profile="gpu1", team="rnd")
            pid = portal.hub("GET", "/users/ana").json()["servers"][""]["state"]["pid"]
            assert soft_limit(pid) == JUPYTERS, "a notebook starts with the limit of the shell"
            portal.hub("DELETE", "/users/ana/server")
            until(lambda: not portal.server("ana"), "the server has stopped")
            job = ana.submit(JobRequest(team="rnd", profile="gpu1", command=["bash", "-c", "ulimit -Sn"]))
            until(lambda id=job.id: ana.job(id).state.ended, "the job has ended")
            assert ana.logs(job.id).text.strip() == str(SOFT), "and so has a job"
    ana.close()
