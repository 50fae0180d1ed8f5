"""Requests at 1,000 nodes: how long pages wait, how fast jobs are taken, and how little both slow the loop."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI
from makeway_quota.control import cycle
from makeway_quota.service import Service
from makeway_quota.store.records import Change
from makeway_quota.web.http_server import run, server_config

from .measure import Measured
from .request_load import API, TEAMS, large_service

NODES = 1000
RUNNING, PENDING = 1000, 5000
"""jobs of 8 GPUs, for the answers and the submissions"""
MANY_RUNNING, MANY_PENDING = 8000, 20_000
"""jobs of 1 GPU, for the load"""
PAGES, PANELS = 200, 50
CLIENTS = 16
SECONDS = 30.0
BEFORE = {"usage": 320.0, "offers": 230.0, "pools": 200.0, "submit": 113.0}
"""milliseconds at commit cbaa94b"""


def measure() -> list[Measured]:
    """Measure everything."""
    return run(_measure())


async def _measure() -> list[Measured]:
    found = []
    async with large_service(NODES, RUNNING, PENDING, 8) as (service, app, client):
        await decided(service, RUNNING)
        for name, goal in (("usage", 20.0), ("offers", 50.0), ("pools", 50.0)):
            samples = [await _answer(service, client, name) for _ in range(20)]
            note = "1,000 nodes, 6,000 jobs of 50 teams in one pool; one job changed before each request"
            found.append(Measured(f"GET {name}", "ms", samples, "cbaa94b", BEFORE[name], goal, note))
        async with serving(app) as url:
            found += await _submissions(url)
    async with large_service(NODES, MANY_RUNNING, MANY_PENDING, 1) as (service, app, client):
        await decided(service, MANY_RUNNING)
        found.append(await _loop_under_load(service, app))
    return found


async def decided(service: Service, running: int) -> None:
    """Wait until so many jobs run and all others have their first decision."""
    feed = service.services.feed
    while True:
        rows = (await service.world.rows()).values()
        if sum(row.state == "running" for row in rows) >= running and all(row.reason_code for row in rows):
            return
        await feed.changed(feed.mark(), 0.5)


async def touch(service: Service) -> None:
    """Change one running job, as a checkpoint does, so that no answer of before is still valid."""
    row = next(row for row in (await service.world.attended()).values() if row.state == "running")
    change = Change(row.id, {"checkpoint_step": (row.checkpoint_step or 0) + 1})
    await asyncio.to_thread(service.store.commit, [change], now=service.clock())


async def _answer(service: Service, client: httpx2.AsyncClient, path: str) -> float:
    await touch(service)
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    answer = await client.get(f"{API}/{path}", headers={"Authorization": "token user00-0"})
    answer.raise_for_status()
    return (time.perf_counter() - began) * 1000


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Serve the app on a free port; gives the address of the API."""
    server = uvicorn.Server(server_config(app, lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{API}"
    finally:
        app.state.streams.close()
        server.should_exit = True
        await task


async def _submissions(url: str) -> list[Measured]:
    """Submit from another process: one client alone, then many."""
    one = [1000 * took for took in (await _elsewhere("submit", url, 1, 40))["took"]]
    many = await _elsewhere("submit", url, CLIENTS, 40)
    rate = CLIENTS * 40 / many["seconds"]
    note = f"{PENDING:,} jobs wait; {CLIENTS} clients: {rate:.0f} submissions a second (goal 300, cbaa94b 31)"
    return [
        Measured("submit, one client", "ms", one, "cbaa94b", BEFORE["submit"], 20.0, note),
        Measured(f"submit, {CLIENTS} clients: time for each", "ms", [1000 / rate], "cbaa94b", 1000 / 31, 1000 / 300),
    ]


async def _elsewhere(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.requests", *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    found: dict[str, Any] = json.loads(output)
    return found


@contextmanager
def cycles() -> Iterator[list[float]]:
    """Record the seconds of every cycle of the loop."""
    found: list[float] = []

    class Recorder:
        def observe(self, seconds: float) -> None:
            found.append(seconds)

    names = vars(cycle)
    before, names["CYCLE_SECONDS"] = names["CYCLE_SECONDS"], Recorder()
    try:
        yield found
    finally:
        names["CYCLE_SECONDS"] = before


async def _loop_under_load(service: Service, app: FastAPI) -> Measured:
    async with serving(app) as url:
        alone = await _cycles(service)
        load = asyncio.create_task(_elsewhere("load", url, PAGES, PANELS, SECONDS + 5))
        await asyncio.sleep(5)
        loaded = await _cycles(service)
        asked = await load
    middle = 1000 * float(str(asked["median"]))
    note = (
        f"28,000 workloads; {PAGES} spawn pages ask for offers every 2 s, {PANELS} panels read the event stream and "
        f"ask for usage, pools and jobs every 2 s: {asked['requests']} requests, median {middle:.0f} ms, "
        f"{asked['refused']} told to come back"
    )
    base = 1000 * p95(alone)
    return Measured("cycle of the loop under load, p95", "ms", [1000 * p95(loaded)], "without", base, 1.3 * base, note)


async def _cycles(service: Service) -> list[float]:
    with cycles() as found:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            await touch(service)
            service.loop.wake()
            await asyncio.sleep(0.1)
    return found


def p95(samples: list[float]) -> float:
    """Return the value that 95 of 100 samples stay below."""
    return sorted(samples)[int(0.95 * (len(samples) - 1))]


# -- in the process that asks ------------------------------------------------------------------------------------------


async def submit(url: str, clients: int, each: int) -> dict[str, object]:
    """Submit `each` jobs from every client, one after the other."""
    took: list[float] = []

    async def one(number: int) -> None:
        headers = {"Authorization": f"token user{number:02}-1"}
        for _ in range(each):
            began = time.perf_counter()
            ask = {"name": "x", "profile": "gpu1", "command": ["python", "x.py"]}
            (await client.post(f"{url}/jobs", json=ask, headers=headers)).raise_for_status()
            took.append(time.perf_counter() - began)

    async with httpx2.AsyncClient(timeout=120) as client:
        began = time.perf_counter()
        await asyncio.gather(*map(one, range(clients)))
    return {"took": took, "seconds": time.perf_counter() - began}


async def load(url: str, pages: int, panels: int, seconds: float) -> dict[str, object]:
    """Keep spawn pages and panels open."""
    took: list[float] = []
    refused: list[str] = []
    until = time.monotonic() + seconds

    async def page(number: int, paths: tuple[str, ...]) -> None:
        headers = {"Authorization": f"token user{number % TEAMS:02}-{number // TEAMS % 10}"}
        await asyncio.sleep(2 * number / (pages + panels))
        while time.monotonic() < until:
            began = time.perf_counter()
            for path in paths:
                sent = time.perf_counter()
                answer = await client.get(f"{url}/{path}", headers=headers)
                if answer.status_code == 503:  # the first offers of all teams at once
                    refused.append(path)
                    continue
                answer.raise_for_status()
                took.append(time.perf_counter() - sent)
            await asyncio.sleep(max(0.0, began + 2 - time.perf_counter()))

    async def stream(number: int) -> None:
        headers = {"Authorization": f"token user{number % TEAMS:02}-0"}
        async with client.stream("GET", f"{url}/events", headers=headers) as answer:
            async for _ in answer.aiter_bytes():
                if time.monotonic() > until:
                    return

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(timeout=None, limits=limits) as client:
        tasks = [page(number, ("offers",)) for number in range(pages)]
        paths = ("usage", "pools", "jobs?state=pending", "jobs?state=running")
        tasks += [page(number, paths) for number in range(panels)]
        streams = [asyncio.create_task(stream(number)) for number in range(panels)]
        await asyncio.gather(*tasks)
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return {"requests": len(took), "median": median(took), "refused": len(refused)}


if __name__ == "__main__":
    what, address, *rest = sys.argv[1:]
    if what == "submit":
        print(json.dumps(asyncio.run(submit(address, int(rest[0]), int(rest[1])))))
    else:
        print(json.dumps(asyncio.run(load(address, int(rest[0]), int(rest[1]), float(rest[2])))))
