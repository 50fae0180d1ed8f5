"""Measure what open panels of administrators cost the service, at 1,000 nodes with twenty changes a second."""

from __future__ import annotations

import asyncio
import json
import time
from statistics import median

from makeway_quota.application import Application
from makeway_quota.store.records import Change
from makeway_quota.web.server.http_server import run

from .measure import Measured
from .request_load import ADMINISTRATORS, large_service
from .requests import clients, decided, serving

NODES, JOBS, SIZE = 1000, 6000, 2
RUNNING = NODES * 8 // SIZE
PANELS = ADMINISTRATORS
CHANGES = 20
"""a second"""
WINDOW = 20.0
ROUNDS = 2
GOAL = 15.0


def measure() -> list[Measured]:
    """Measure windows without and with the panels, one after the other."""
    return run(_measure())


async def _measure() -> list[Measured]:
    without, beside, parts = list[float](), list[float](), 0
    async with large_service(NODES, RUNNING, JOBS - RUNNING, SIZE) as (service, app, _client):
        await decided(service, RUNNING)
        async with serving(app) as url:
            for _ in range(ROUNDS):
                without.append(await _processor(service))
                async with clients("administrators", url, 0, PANELS) as process:
                    assert process.stdout is not None
                    await process.stdout.readline()
                    beside.append(await _processor(service))
                    output = (await process.communicate(b""))[0]
                parts += int(json.loads(output)["parts"])
    base = median(without)
    note = (
        f"{NODES:,} nodes, {JOBS:,} jobs, {CHANGES} changes a second; the service alone takes {base:.1f} % of a core. "
        f"{parts} new versions of panels were sent."
    )
    costs = [max(0.0, each - base) for each in beside]
    return [Measured(f"{PANELS} open panels of administrators", "% of a core", costs, "without", base, GOAL, note)]


async def _processor(service: Application) -> float:
    """Return the share of a core that this process takes for a while, in percent, while jobs change."""
    rows = [row for row in (await service.components.world.watched()).values() if row.state == "running"]
    began, used, changes = time.monotonic(), time.process_time(), 0
    while (passed := time.monotonic() - began) < WINDOW:
        if changes < passed * CHANGES:
            row, step = rows[changes * 37 % len(rows)], round(1000 * began) + changes
            change = Change(row.id, {"checkpoint_step": step})
            await asyncio.to_thread(service.components.store.commit, [change], now=service.components.clock())
            service.loop.wake()
            changes += 1
        else:
            await asyncio.sleep(1 / CHANGES)
    return 100 * (time.process_time() - used) / (time.monotonic() - began)
