"""Requests beside a cycle: reads wait for its end, health checks do not, renderings pause between their parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from makeway_quota.backends.base import Observation
from web.portal import API, PREFIX, Portal

PATIENCE = 30.0
"""Seconds until which something must happen"""


@asynccontextmanager
async def cycle_under_way(web: Portal, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Keep a cycle waiting for the backend until the end of the block."""
    service, began, go_on = web.run.service, asyncio.Event(), asyncio.Event()
    observe = web.backend.observe

    async def slow(since: int | None = None) -> Observation:
        began.set()
        await go_on.wait()
        return await observe(since)

    monkeypatch.setattr(service.loop.gate, "max_wait", 3600.0)
    monkeypatch.setattr(web.backend, "observe", slow)
    service.loop.wake()
    await asyncio.wait_for(began.wait(), PATIENCE)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.covers("N26")
@pytest.mark.parametrize("path", [PREFIX, f"{PREFIX}live/panel", f"{API}/usage", f"{API}/offers"])
async def test_reads_wait_for_the_end_of_a_cycle(web: Portal, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    ana = web.as_("ana")
    async with cycle_under_way(web, monkeypatch):
        reading = asyncio.ensure_future(ana.get(path))
        health = await asyncio.wait_for(web.as_(None).get("/healthz"), PATIENCE)
        ready = await asyncio.wait_for(web.as_(None).get(f"{PREFIX}readyz"), PATIENCE)
        assert health.status_code == 200
        assert ready.json()["checks"]["loop"]
        assert not reading.done()
    assert (await asyncio.wait_for(reading, PATIENCE)).status_code == 200


async def test_a_rendering_lets_a_cycle_go_first_between_its_parts(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked = web.services.context.gate, list[bool]()
    monkeypatch.setattr(type(gate), "wait_in_thread", lambda self: asked.append(self.is_open))
    assert (await web.as_("ana").get(PREFIX)).status_code == 200
    assert len(asked) > 20
