"""Actions on a job that another request changes at the same moment are refused, not answered as done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from makeway_api.errors import MakewayError
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services import Caller
from makeway_quota.services.jobs.jobs import cancellation
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
        with pytest.raises(MakewayError, match="is failed") as refused:
            await run.client("ana").preempt_test(job.id)
        assert refused.value.status == 409


async def test_a_job_that_is_cancelled_while_it_is_requeued_never_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would make way for it, and where none do it would wait for ever."""
    async with running(
        tmp_path, backend=MemoryBackend([NodeStatus("n1", "gpu", tuple(range(10)))], real_time=True)
    ) as run:
        job = await run.submit("ana", "train", profile="gpu3")
        await run.job(job.id, "running")
        store = run.service.components.store
        commit = store.commit

        def commit_after_cancel(changes: Sequence[Change], *rest: Any, **options: Any) -> Any:
            if any(change.fields.get("state") == "pending" for change in changes):
                monkeypatch.undo()
                row = store.workload(job.id)
                assert row is not None
                cancelled = cancellation(row, "ana", row.submitted_at)
                assert commit([cancelled.change], cancelled.decisions, now=row.submitted_at) == {job.id}
            return commit(changes, *rest, **options)

        monkeypatch.setattr(store, "commit", commit_after_cancel)
        await run.client("ana").preempt_test(job.id)
        ended = await run.job(job.id, "cancelled")
        assert ended.attempt == 1
        assert [decision.verb for decision in store.decisions(job.id)].count("start") == 1
