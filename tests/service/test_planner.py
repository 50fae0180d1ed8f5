"""The loop keeps one engine, follows the store with it, and rebuilds it after a failure."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.control.loop import MAX_REST_SECONDS
from makeway_quota.engine import schedule
from makeway_quota.engine.incremental import IncrementalEngine
from running import Running, running


@pytest.mark.covers("F13")
async def test_the_kept_engine_plans_as_a_new_one(tmp_path: Path) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=60) as run:
        world, planner, loop = run.service.components.world, run.service.loop._planner, run.service.loop
        for at in range(4):
            job = await run.submit("ana", f"train {at}", profile="gpu3")
        await _rest(run)
        incremental = planner._incremental
        await run.client("ana").cancel(job.id)
        await _rest(run)
        rows, now = await world.rows(), loop.clock()
        plan = await planner.plan(rows, now)
        assert plan == schedule(world.snapshot(rows, now))
        assert incremental is not None
        assert planner._incremental is incremental, "it was told what changed, not built anew"


async def test_after_a_failed_decision_the_engine_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.2) as run:
        planner = run.service.loop._planner
        await run.until(lambda: _stood(planner), "the loop decides")
        before = planner._incremental

        def broken(self: IncrementalEngine, now: float, why: bool = True) -> None:
            raise RuntimeError("half way through")

        with monkeypatch.context() as patch:
            patch.setattr(IncrementalEngine, "plan", broken)
            await run.until(lambda: run.service.components.world.failure, "a cycle fails")
        job = await run.submit("ana", "train", profile="gpu3")
        await run.job(job.id, "running")
        assert planner._incremental is not before


async def test_a_reason_that_a_cycle_leaves_out_is_written_without_another_change(tmp_path: Path) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=60) as run:
        for at in range(3):
            await run.submit("ana", f"train {at}", profile="gpu3")
        await _rest(run)
        run.service.loop._explaining.done(3600.0)  # as after a plan that took an hour
        job = await run.submit("ana", "the next", profile="gpu3")
        shown = await run.job(job.id, seconds=30.0)
        assert shown.state.value == "pending"
        assert shown.reason is not None


async def test_a_long_cycle_is_followed_by_a_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=60) as run:
        loop = run.service.loop
        plan = loop._planner.plan

        async def slowly(*args: Any) -> object:
            await asyncio.sleep(2 * MAX_REST_SECONDS)
            return await plan(*args)

        await _rest(run)
        monkeypatch.setattr(loop._planner, "plan", slowly)
        before = loop.cycles
        loop.wake()
        await run.until(lambda: loop.cycles > before, "a cycle ends")
        assert loop.last_cycle_at is not None
        assert loop._not_before - loop.last_cycle_at == pytest.approx(MAX_REST_SECONDS)


async def test_a_session_does_not_wait_for_the_rest_after_a_long_cycle(tmp_path: Path) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=60) as run:
        loop = run.service.loop
        await _rest(run)
        loop._not_before = time.monotonic() + 3600.0  # as after a cycle that took long
        before = loop.cycles
        loop.wake()
        await asyncio.sleep(0.3)
        assert loop.cycles == before, "other requests wait"
        await run.session("ana", "gpu1", "rnd")
        await run.until(lambda: loop.cycles > before, "a cycle for the session")


async def _rest(run: Running) -> None:
    """Wait until the loop has nothing more to do."""
    before = -1
    while before != run.service.loop.cycles:
        before = run.service.loop.cycles
        await asyncio.sleep(1.0)


def _stood(planner: object) -> object:
    return planner._incremental  # type: ignore[attr-defined]
