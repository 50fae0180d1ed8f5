"""Trainings over quota make way for an owner, through the whole service, and compute what undisturbed ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import training_jobs as jobs
from running import Running, running

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.covers("N12", "F20")]

SCRIPTS = {"state.py": {"WORKERS": "2"}, "language.py": {}}
BEFORE = 3
"""The step after which each training waits for the owner"""


async def started(trace: Path) -> bool:
    file = trace / "rank-0"
    return file.exists() and file.read_text().count(" step ") >= BEFORE


async def test_trainings_make_way_for_an_owner_and_resume(job: Callable[..., jobs.Job], tmp_path: Path) -> None:
    plain = {script: await asyncio.to_thread(job(script, env=env).run) for script, env in SCRIPTS.items()}
    library = tmp_path / "lib.zip"
    library.write_bytes(jobs._library())
    async with running(tmp_path / "state", MAKEWAY_TICK_SECONDS=0.2) as run:
        for profile in ("gpu3", "gpu2"):
            await run.job((await run.submit("ana", profile=profile)).id, "running")
        moved = {script: await borrowing(run, script, library, tmp_path / script) for script in SCRIPTS}
        for script in SCRIPTS:
            await run.until(lambda name=script: started(tmp_path / name), f"{script} trains", 300)
        owners = [await run.submit("bo", profile=profile) for profile in ("gpu3", "gpu2")]
        for owner in owners:
            await run.job(owner.id, "running", seconds=120)
        for id in moved.values():
            assert (await run.job(id, "pending", "queued", seconds=120)).preemptions == 1
        for owner in owners:
            await run.client("bo").cancel(owner.id)
        for script, id in moved.items():
            done = await run.job(id, "succeeded", "failed", seconds=600)
            assert [attempt.outcome for attempt in done.attempts] == ["preempted", "succeeded"]
            outcome = jobs.Outcome.of([], tmp_path / script)
            assert outcome.results == plain[script].results
            assert [step for _, *step in outcome.steps()] == [step for _, *step in plain[script].steps()]


async def borrowing(run: Running, script: str, library: Path, trace: Path) -> str:
    """Submit a training that runs over the team's quota; return its id."""
    trace.mkdir()
    env = {"PYTHONPATH": f"{jobs.TRAININGS}:{library}", "TRACE": str(trace), "HOLD": str(BEFORE), **jobs.QUIET}
    del env["CUDA_VISIBLE_DEVICES"]  # Makeway's own
    command = [str(jobs.PYTHON), str(jobs.TRAININGS / script)]
    submitted = await run.submit("ana", script, command, profile="gpu2", env=env | SCRIPTS[script])
    await run.job(submitted.id, "running")
    return str(submitted.id)
