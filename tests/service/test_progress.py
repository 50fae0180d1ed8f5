"""The progress of jobs from their process to the API: on one machine, and from workers elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.models.attempts import WorkerReportIn
from makeway_quota.control.workers.channel import WorkerChannel
from makeway_quota.control.workers.tokens import AttemptTokens
from makeway_quota.store import open_store
from running import python, running

TRAIN = """
import time
from makeway import checkpoint
for step in checkpoint.loop(40, name="fit"):
    checkpoint.report(loss=1 / (step + 1))
checkpoint.done()
"""


@pytest.mark.slow
async def test_a_job_of_this_machine_shows_how_far_it_was(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        job = await run.submit("ana", "train", python(TRAIN), profile="gpu1")
        await run.job(job.id, "succeeded", seconds=120)
        result = await run.client("ana").job(job.id)
        assert result.progress is not None, "what follows a job ends with this state"
        assert (result.progress.step, result.progress.total, result.progress.stage) == (40, 40, "fit")
        assert result.progress.metrics == {"loss": 1 / 40}
        assert result.progress.rate is None


def test_the_progress_is_in_no_stored_report_of_a_worker(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/makeway.db")
    channel = WorkerChannel(store, AttemptTokens(b"x" * 32))
    one, other = (WorkerReportIn.model_validate({"progress": {"step": n}}) for n in (1, 2))
    assert channel.stored_report(one) == channel.stored_report(other)
    store.close()


@pytest.mark.parametrize("progress", ["x", [1], {"step": "no"}, {"metrics": {"a": "b"}}, None])
def test_a_report_is_taken_whatever_its_progress_is(progress: object) -> None:
    assert WorkerReportIn.model_validate({"step": 3, "progress": progress}).step == 3
