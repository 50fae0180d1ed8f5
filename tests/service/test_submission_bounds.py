"""What a profile bounds is refused or said at submission: workers, and the time limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import DryRun, Job, JobRequest
from running import running

POLICY = """
version: 1
pools: [{name: gpu, nodes: {local: {gpus: all}}}]
profiles:
  - {name: gpu1, gpus: 1, policies: [rnd], time_limit: 12h}
  - {name: cpu, title: CPU only, gpus: 0, policies: [rnd]}
  - {name: few, gpus: 0, workers: 2, max_workers: 4, policies: [rnd]}
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 2}]}]
"""


@pytest.mark.parametrize(("profile", "most"), [("cpu", 100), ("few", 4)])
async def test_a_job_without_gpus_has_a_bounded_number_of_workers(tmp_path: Path, profile: str, most: int) -> None:
    async with running(tmp_path, policy=POLICY) as run:
        ana = run.client("ana")
        for dry in (True, False):
            with pytest.raises(MakewayError) as refused:
                await ana.submit(JobRequest(command=["true"], profile=profile, workers=most + 1, dry_run=dry))
            assert (refused.value.status, refused.value.code) == (422, "too_many_workers")
            assert f"may have {most} workers, and this one asks for {most + 1}" in refused.value.message
        job = await ana.submit(JobRequest(command=["true"], profile=profile, workers=most))
        assert isinstance(job, Job)
        with pytest.raises(MakewayError) as refused:
            await ana.clone(job.id, 2, {"workers": most + 1})
        assert refused.value.code == "too_many_workers"


async def test_a_time_limit_that_is_cut_is_said_in_the_answer_and_the_dry_run(tmp_path: Path) -> None:
    says = "Its time limit is 12 h, the most that its profile allows; 3 d was asked for."
    async with running(tmp_path, policy=POLICY) as run:
        ana = run.client("ana")
        asked = {"command": ["true"], "profile": "gpu1"}
        dry = await ana.dry_run(JobRequest(**asked, time_limit=72 * 3600))
        assert isinstance(dry, DryRun)
        assert says in dry.notes
        job = await ana.submit(JobRequest(**asked, time_limit=72 * 3600))
        assert isinstance(job, Job)
        assert says in job.notes
        assert job.time_limit == 12 * 3600
        for limit in (None, 3600, 12 * 3600):
            fits = await ana.submit(JobRequest(**asked, time_limit=limit))
            assert isinstance(fits, Job)
            assert fits.notes == []
