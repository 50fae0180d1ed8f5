"""Actions on a job that another request changes at the same moment are refused, not answered as done."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_quota.services import Caller
from makeway_quota.store.records import Change, Workload
from running import Running, running


def change_after_reading(run: Running, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]) -> None:
    """Commit a change of the job between the moment an action reads it and the moment the action writes."""
    access = run.service.services.jobs._access
    read = access.changeable

    async def changeable(caller: Caller, id: str, action: str) -> Workload:
        row = await read(caller, id, action)
        run.service.components.store.commit([Change(id, fields)], now=row.submitted_at)
        return row

    monkeypatch.setattr(access, "changeable", changeable)


async def test_a_resume_of_a_job_that_changed_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as run:
        job = await run.submit("ana", profile="gpu1", command=["true"])
        await run.job(job.id, "succeeded")
        change_after_reading(run, monkeypatch, {"message": "changed"})
        with pytest.raises(MakewayError, match="changed meanwhile") as refused:
            await run.client("ana").resume(job.id)
        assert refused.value.status == 409
        assert (await run.client("ana").job(job.id)).state == "succeeded"


async def test_a_preemption_test_of_a_job_that_ended_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as run:
        job = await run.submit("ana", profile="gpu1")
        await run.job(job.id, "running")
        change_after_reading(run, monkeypatch, {"state": "failed", "placement": ()})
        with pytest.raises(MakewayError, match="runs no longer") as refused:
            await run.client("ana").preempt_test(job.id)
        assert refused.value.status == 409
