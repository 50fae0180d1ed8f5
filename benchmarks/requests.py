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
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI
from makeway_quota.application import Application
from makeway_quota.control import loop
from makeway_quota.store.records import Change
from makeway_quota.web.server.http_server import run, server_config

from .measure import Measured
from .request_load import API, PREFIX, large_service

NODES = 1000
RUNNING, PENDING = 1000, 5000
"""jobs of 8 GPUs, for the answers and the submissions"""
MANY_RUNNING, MANY_PENDING = 8000, 20_000
"""jobs of 1 GPU, for the load"""
PAGES, PANELS = 200, 50
CLIENTS = 16
SECONDS = 30.0
BEFORE = {"usage": 320.0, "offers": 230.0, "pools": 200.0, "submit": 113.0, "panel": 850.0}
"""milliseconds at commit cbaa94b"""


def measure() -> list[Measured]:
    """Measure everything."""
    return run(_measure())


async def _measure() -> list[Measured]:
    result = []
    async with large_service(NODES, RUNNING, PENDING, 8) as (service, app, client):
        await decided(service, RUNNING)
        for name, goal in (("usage", 20.0), ("offers", 50.0), ("pools", 50.0)):
            samples = [await _answer(service, client, name) for _ in range(20)]
            note = "1,000 nodes, 6,000 jobs of 50 teams in one pool; one job changed before each request"
            result.append(Measured(f"GET {name}", "ms", samples, "cbaa94b", BEFORE[name], goal, note))
        result.append(await _panel(service, client))
        async with serving(app) as url:
            result += await _submissions(url)
    async with large_service(NODES, MANY_RUNNING, MANY_PENDING, 1) as (service, app, client):
        await decided(service, MANY_RUNNING)
        result += await _loop_under_load(service, app)
    return result


async def decided(service: Application, running: int) -> None:
    """Wait until so many jobs run and all others have their first decision."""
    feed = service.services.feed
    while True:
        rows = (await service.components.world.rows()).values()
        if sum(row.state == "running" for row in rows) >= running and all(row.reason_code for row in rows):
            return
        await feed.changed(feed.mark(), 0.5)


async def touch(service: Application) -> None:
    """Change one running job, as a checkpoint does, so that no answer of before is still valid."""
    row = next(row for row in (await service.components.world.holding()).values() if row.state == "running")
    change = Change(row.id, {"checkpoint_step": (row.checkpoint_step or 0) + 1})
    await asyncio.to_thread(service.components.store.commit, [change], now=service.components.clock())


async def _answer(service: Application, client: httpx2.AsyncClient, path: str) -> float:
    await touch(service)
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    answer = await client.get(f"{API}/{path}", headers={"Authorization": "token user00-0"})
    answer.raise_for_status()
    return (time.perf_counter() - began) * 1000


async def _panel(service: Application, client: httpx2.AsyncClient) -> Measured:
    """Open the panel as members of different teams, one after the other, while jobs change."""
    samples, largest = [], 0
    for team in range(20):
        await touch(service)
        await asyncio.sleep(1.0)
        headers = {"Authorization": f"token user{team:02}-0", "Accept": "text/html"}
        began = time.perf_counter()
        answer = await client.get(PREFIX, headers=headers)
        answer.raise_for_status()
        samples.append((time.perf_counter() - began) * 1000)
        largest = max(largest, len(answer.content))
    note = f"members of 20 teams, one after the other; the largest page has {largest / 1024:.0f} KiB (goal 200)"
    return Measured("GET the panel", "ms", samples, "cbaa94b", BEFORE["panel"], 100.0, note)


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Serve the app on a free port; gives its address."""
    server = uvicorn.Server(server_config(app, lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
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
    async with clients(*arguments) as process:
        output, _ = await process.communicate()
    result: dict[str, Any] = json.loads(output)
    return result


@asynccontextmanager
async def clients(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run clients in a process of their own; it is gone at the end of the block."""
    command = [sys.executable, "-m", "benchmarks.request_clients", *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextmanager
def cycles() -> Iterator[list[float]]:
    """Record the seconds of every cycle of the loop."""
    result: list[float] = []

    class Recorder:
        def observe(self, seconds: float) -> None:
            result.append(seconds)

    names = vars(loop)
    before, names["CYCLE_SECONDS"] = names["CYCLE_SECONDS"], Recorder()
    try:
        yield result
    finally:
        names["CYCLE_SECONDS"] = before


async def _loop_under_load(service: Application, app: FastAPI) -> list[Measured]:
    """Measure cycles before, during and after the load, so that a machine that slows down shows on both sides."""
    async with serving(app) as url:
        alone = await _cycles(service)
        async with clients("load", url, PAGES, PANELS) as process:
            assert process.stdout is not None
            opened = float(json.loads(await process.stdout.readline())["seconds"])
            loaded = await _cycles(service)
            output, _ = await process.communicate(b"")  # the end of its standard input ends the load
        alone += await _cycles(service)
    asked = json.loads(output)
    medians = ", ".join(f"{what} {1000 * took:.0f} ms" for what, took in sorted(asked["median"].items()))
    ratio = p95(loaded) / p95(alone)
    note = (
        f"{ratio:.2f} times that without (goal 1.3); {PAGES} spawn pages ask for offers every 2 s, {PANELS} users of "
        f"{PANELS} teams have the panel open and follow its stream: {asked['requests']} requests, "
        f"{asked['parts']} new versions of panels; medians: {medians}; {asked['refused']} told to come back"
    )
    base = 1000 * p95(alone)
    opening = f"{PAGES} spawn pages and {PANELS} panels opened at once, until the last one is shown"
    return [
        Measured("cycle of the loop under load, p95", "ms", [1000 * p95(loaded)], "without", base, 1.3 * base, note),
        Measured("opening all pages", "s", [opened], "first run", 56.0, None, opening),
    ]


async def _cycles(service: Application) -> list[float]:
    with cycles() as result:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            await touch(service)
            service.loop.wake()
            await asyncio.sleep(0.1)
    return result


def p95(samples: list[float]) -> float:
    """Return the value that 95 of 100 samples stay below."""
    return sorted(samples)[int(0.95 * (len(samples) - 1))]
