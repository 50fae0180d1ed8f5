"""What the service runs all the time goes on after unexpected errors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from makeway_quota.backends.base import Observation
from makeway_quota.control.restarting_tasks import restarting
from running import running


async def test_a_task_that_fails_begins_again_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[BaseException] = [OSError("disk full"), asyncio.CancelledError()]

    async def run() -> None:
        if errors:
            raise errors.pop(0)

    await restarting("The feed", run, pause=0.0)
    assert [record.message for record in caplog.records] == ["The feed failed; it begins again"] * 2


async def test_a_task_that_is_cancelled_ends() -> None:
    began = asyncio.Event()

    async def run() -> None:
        began.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(restarting("The feed", run, pause=0.0))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_request_does_not_end_the_control_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [asyncio.CancelledError(), asyncio.CancelledError()]
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.1) as run:
        backend = run.service.components.backend
        observe = backend.observe

        async def breaks(since: int | None = None) -> Observation:
            if broken:
                raise broken.pop()
            return await observe(since)

        monkeypatch.setattr(backend, "observe", breaks)
        job = await run.submit("ana")
        await run.job(job.id, "running", "succeeded")
        assert not broken
