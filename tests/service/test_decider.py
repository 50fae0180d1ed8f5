"""The loop's engine stays on its feet, follows the books, and starts anew after trouble."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from makeway_quota.engine import schedule
from makeway_quota.engine.standing import Standing
from running import Running, running


@pytest.mark.covers("F13")
async def test_it_plans_what_a_fresh_look_at_the_same_world_plans(tmp_path: Path) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=60) as run:
        watch, decider, loop = run.service.watch, run.service.loop._decider, run.service.loop
        for at in range(4):
            job = await run.submit("ana", f"train {at}", profile="gpu3")
        await _rest(run)
        standing = decider._standing
        await run.client("ana").cancel(job.id)
        await _rest(run)
        rows, now = await watch.rows(), loop.clock()
        plan = await decider.plan(rows, now)
        assert plan == schedule(watch.snapshot(rows, now))
        assert standing is not None
        assert decider._standing is standing, "it was told what changed, not built anew"


async def test_after_a_decision_that_failed_it_looks_at_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.2) as run:
        decider = run.service.loop._decider
        await run.until(lambda: _stood(decider), "the loop decides")
        before = decider._standing

        def broken(self: Standing, now: float) -> None:
            raise RuntimeError("half way through")

        with monkeypatch.context() as patch:
            patch.setattr(Standing, "plan", broken)
            await run.until(lambda: run.service.watch.failure, "a turn fails")
        job = await run.submit("ana", "train", profile="gpu3")
        await run.job(job.id, "running")
        assert decider._standing is not before


async def _rest(run: Running) -> None:
    """Wait until the loop has nothing more to do."""
    before = -1
    while before != run.service.loop.turns:
        before = run.service.loop.turns
        await asyncio.sleep(1.0)


def _stood(decider: object) -> object:
    return decider._standing  # type: ignore[attr-defined]
