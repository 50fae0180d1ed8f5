"""Trainings over quota make way for an owner, through the whole service, and compute what undisturbed ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import training_jobs as jobs
from running import Running, running

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.covers("N12", "F20")]

BEFORE = 3
"""The step after which each training waits for the owner"""


@dataclass(frozen=True)
class Training:
    """A script of `trainings/`, its variables, and how many workers of a job run it, or torchrun in its only one."""

    script: str
    env: dict[str, str] = field(default_factory=dict)
    workers: int = 1
    torchrun: bool = False

    def command(self, port: str) -> list[str]:
        """Return the command; the ranks of torchrun meet at the port."""
        started = (*jobs.TORCHRUN, port) if self.torchrun else ()
        return [str(jobs.PYTHON), *started, str(jobs.TRAININGS / self.script)]


TRAININGS = {
    "loop": Training("loop.py"),
    "torch": Training("state.py", {"WORKERS": "2"}),
    "lightning": Training("fit.py"),
    "lightning DDP": Training("fit.py", {"RANKS": "2"}),
    "transformers": Training("language.py"),
    "accelerate": Training("accelerated.py", {"ACCUMULATE": "2"}),
    "torchrun": Training("distributed.py", torchrun=True),
    "gang": Training("distributed.py", workers=2),
}
PAIRS = [
    pytest.param(("torch", "transformers")),
    pytest.param(("lightning", "accelerate"), marks=pytest.mark.long),
    pytest.param(("lightning DDP", "loop"), marks=pytest.mark.long),
    pytest.param(("torchrun", "gang"), marks=pytest.mark.long),
]
"""Two at a time have room; in `make test` the first two, in `make test-frameworks` all"""


async def started(trace: Path) -> bool:
    file = trace / "rank-0"
    return file.exists() and file.read_text().count(" step ") >= BEFORE


def undisturbed(make: Callable[..., jobs.Job], training: Training, port: str) -> jobs.Outcome:
    """Run a training as a job of its own."""
    *before, script = training.command(port)[1:]
    workers = jobs.gang(port) if training.workers > 1 else ()
    return make(Path(script), *before, env=training.env, workers=workers).run()


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
async def test_trainings_make_way_for_an_owner_and_resume(
    names: tuple[str, str], job: Callable[..., jobs.Job], port: str, tmp_path: Path
) -> None:
    plain = {name: await asyncio.to_thread(undisturbed, job, TRAININGS[name], port) for name in names}
    library = tmp_path / "lib.zip"
    library.write_bytes(jobs._library())
    async with running(tmp_path / "state", MAKEWAY_TICK_SECONDS=0.2) as run:
        for profile in ("gpu3", "gpu2"):
            await run.job((await run.submit("ana", profile=profile)).id, "running")
        moved = {name: await borrowing(run, TRAININGS[name], port, library, tmp_path / name) for name in names}
        for name in names:
            await run.until(lambda name=name: started(tmp_path / name), f"{name} trains", 300)
        owners = [await run.submit("bo", profile=profile) for profile in ("gpu3", "gpu2")]
        for owner in owners:
            await run.job(owner.id, "running", seconds=120)
        for id in moved.values():
            assert (await run.job(id, "pending", "queued", seconds=120)).preemptions == 1
        for owner in owners:
            await run.client("bo").cancel(owner.id)
        for name, id in moved.items():
            done = await run.job(id, "succeeded", "failed", seconds=600)
            assert [attempt.outcome for attempt in done.attempts] == ["preempted", "succeeded"]
            outcome = jobs.Outcome.of([], tmp_path / name)
            assert outcome.results == plain[name].results
            for rank in plain[name].notes:
                assert [step for _, *step in outcome.steps(rank)] == [step for _, *step in plain[name].steps(rank)]


async def borrowing(run: Running, training: Training, port: str, library: Path, trace: Path) -> str:
    """Submit a training that runs over the team's quota, on two GPUs; return its id."""
    trace.mkdir()
    env = {"PYTHONPATH": f"{jobs.TRAININGS}:{library}", "TRACE": str(trace), "HOLD": str(BEFORE), **jobs.QUIET}
    del env["CUDA_VISIBLE_DEVICES"]  # Makeway's own
    ask = {"profile": "gpu1", "workers": training.workers} if training.workers > 1 else {"profile": "gpu2"}
    submitted = await run.submit("ana", trace.name, training.command(port), env=env | training.env, **ask)
    await run.job(submitted.id, "running")
    return str(submitted.id)
