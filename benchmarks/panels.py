"""Measure what open panels of administrators cost the service, and how late they show the ends and starts of jobs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from statistics import median

from makeway_quota.application import Application
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.web.server.http_server import run

from .measure import Measured
from .request_load import ADMINISTRATORS, large_service
from .requests import clients, decided, serving

NODES, JOBS, SIZE = 1000, 6000, 2
RUNNING = NODES * 8 // SIZE
PANELS = ADMINISTRATORS
ENDS = 10
"""Jobs that end in a second; each lets another one start"""
WINDOW = 20.0
ROUNDS = 2
GOAL = 15.0
LATE = 1.0
"""Seconds within which every panel shows every end"""
LAST = 2.0
"""Seconds at the end of a window whose changes need not have arrived"""


def measure() -> list[Measured]:
    """Measure windows without and with the panels, one after the other."""
    return run(_measure())


async def _measure() -> list[Measured]:
    without, beside, late, parts = list[float](), list[float](), list[float](), 0
    async with large_service(NODES, RUNNING, JOBS - RUNNING, SIZE) as (service, app, _client):
        await decided(service, RUNNING)
        async with serving(app) as url:
            for _ in range(ROUNDS):
                without.append((await _window(service))[0])
                async with clients("administrators", url, 0, PANELS) as process:
                    assert process.stdout is not None
                    await process.stdout.readline()
                    processor, ends = await _window(service)
                    output = json.loads((await process.communicate(b""))[0])
                beside.append(processor)
                parts += output["parts"]
                late += _lateness(output["arrivals"], ends)
    base = median(without)
    load = f"{NODES:,} nodes, {JOBS:,} jobs, {ENDS} of which end in a second and let another one start"
    note = f"{load}; the service alone takes {base:.1f} % of a core. {parts} new versions of panels were sent."
    costs = [max(0.0, item - base) for item in beside]
    shown = (
        f"From the exit of a job to the last panel that shows it; {len(late)} ends, the latest after {max(late):.2f} s."
    )
    return [
        Measured(f"{PANELS} open panels of administrators", "% of a core", costs, "without", base, GOAL, note),
        Measured(
            f"the last of {PANELS} panels shows the end of a job", "s", late, "its goal", LATE, LATE, shown, at_95=True
        ),
    ]


async def _window(service: Application) -> tuple[float, dict[int, float]]:
    """End jobs for a while; return the processor's share in percent, and the time of each end by its event's id."""
    backend = service.components.backend
    assert isinstance(backend, MemoryBackend)
    watched = (await service.components.world.holding()).values()
    rows = [row.id for row in watched if row.state == "running"]
    newest = await service.services.feed.newest()
    began, used, ended = time.monotonic(), time.process_time(), dict[str, float]()
    while (passed := time.monotonic() - began) < WINDOW:
        if len(ended) < min(passed, WINDOW - LAST) * ENDS:
            job = rows[len(ended) * 37 % len(rows)]
            ended[job] = time.time()
            backend.finish(job)
        else:
            await asyncio.sleep(1 / ENDS / 2)
    processor = 100 * (time.process_time() - used) / (time.monotonic() - began)
    return processor, await _events(service, newest, ended)


async def _events(service: Application, after: int, ended: dict[str, float]) -> dict[int, float]:
    """Return when jobs ended by the id of the first event that says so."""
    result = dict[str, int]()
    while batch := await service.services.feed.after(after):
        for event in batch:
            if event.workload in ended and event.data.get("state") == "succeeded":
                result.setdefault(event.workload, event.id)
        after = batch[-1].id
    return {id: ended[job] for job, id in result.items()}


def _lateness(panels: Sequence[Sequence[tuple[int, float]]], ends: dict[int, float]) -> list[float]:
    """Return after how many seconds the last panel showed each end."""
    result = []
    for id, at in ends.items():
        shown = [next((arrived for after, arrived in panel if after >= id), None) for panel in panels]
        result.append(max(float("inf") if arrived is None else arrived - at for arrived in shown))
    return result
