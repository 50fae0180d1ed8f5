"""The examples F19 to F21 of the feature list through the API, with real processes and exactly these numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Running, running


async def shown(run: Running) -> tuple[dict[str, float], list[str]]:
    """GPUs in use, and the jobs that run, by name."""
    await run.converged()
    states = await run.states()
    return await run.used(), sorted(name for name, state in states.items() if state == "running")


async def running_jobs(run: Running, count: int) -> None:
    async def there() -> bool:
        return sum(state == "running" for state in (await run.states()).values()) == count

    await run.until(there, f"{count} jobs run")


@pytest.mark.covers("F10", "F13", "F14", "F15", "F16", "F17", "F19", "F20", "F21", "F28", "F35", "F45", "F46")
async def test_example_of_the_founding_document(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        # F19: R&D submits five 3-GPU jobs: 3 run, 1 GPU is idle, 2 wait because of the limit.
        rnd = [await run.submit("ana", f"rnd{i}", profile="gpu3") for i in range(1, 6)]
        await running_jobs(run, 3)
        used, names = await shown(run)
        assert (used, names) == ({"rnd": 9, "devops": 0, "idle": 1}, ["rnd1", "rnd2", "rnd3"])
        for waiting in rnd[3:]:
            job = await run.client("ana").job(waiting.id)
            assert job.state == "pending"
            assert job.reason.code == "limit"
            assert job.reason.message == "R&D uses 9 of its limit of 9 GPUs; this job needs 3."

        # F20: DevOps submits a 3-GPU job: exactly the R&D job that started last makes way.
        await run.submit("bo", "devops3", profile="gpu3")
        await run.until(lambda: run_state(run, "devops3", "running"), "DevOps runs")
        used, names = await shown(run)
        assert (used, names) == ({"rnd": 6, "devops": 3, "idle": 1}, ["devops3", "rnd1", "rnd2"])
        victim = await run.client("ana").job(rnd[2].id)
        assert (victim.state, victim.preemptions, victim.failures) == ("pending", 1, 0)
        assert victim.attempts[0].outcome == "preempted"

        # F21: a 2-GPU job of DevOps: one more leaves though R&D falls below its own 5; then nothing changes.
        await run.submit("bo", "devops2", profile="gpu2")
        await run.until(lambda: run_state(run, "devops2", "running"), "the second DevOps job runs")
        used, names = await shown(run)
        assert (used, names) == ({"rnd": 3, "devops": 5, "idle": 2}, ["devops2", "devops3", "rnd1"])
        assert sum(state == "pending" for state in (await run.states("rnd")).values()) == 4

        decisions = await run.client("root").decisions(limit=1)
        assert not await run.service.loop.cycle()
        assert await run.client("root").decisions(limit=1) == decisions


async def run_state(run: Running, name: str, state: str) -> bool:
    return (await run.states()).get(name) == state
