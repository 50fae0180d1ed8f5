"""One row that cannot be written, cancelled or deleted keeps no other of the same request, or of the same moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import StorageDelete
from makeway_quota.store.errors import RowRefused
from makeway_quota.store.storage.pruning import Pruning
from makeway_quota.store.store import Store
from running import Running, running

JOBS = [f"t{number}" for number in range(6)]


async def submitted(run: Running) -> dict[str, str]:
    """Submit jobs at the same moment; return their ids by name, without those that are refused."""
    result = await asyncio.gather(*(run.submit("ana", name, profile="gpu3") for name in JOBS), return_exceptions=True)
    return {job.name: job.id for job in result if not isinstance(job, BaseException)}


async def test_a_submission_that_the_database_refuses_keeps_no_other_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Store.add_workloads

    def added(self: Store, submissions: Any, **more: Any) -> Any:
        if any(submission.new.name == "t3" for submission in submissions):
            raise RowRefused("a number is too large")
        return add(self, submissions, **more)

    monkeypatch.setattr(Store, "add_workloads", added)
    async with running(tmp_path) as run:
        assert sorted(await submitted(run)) == [name for name in JOBS if name != "t3"]


async def test_a_job_that_cannot_be_cancelled_keeps_no_other_of_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=60) as run:
        jobs = await submitted(run)
        commit = Store.commit

        def committed(self: Store, changes: Any, *args: Any, **more: Any) -> Any:
            if more.get("term") is None and any(change.workload == jobs["t3"] for change in changes):
                raise RowRefused("odd")
            return commit(self, changes, *args, **more)

        monkeypatch.setattr(Store, "commit", committed)
        with pytest.raises(MakewayError, match="1 job could not be"):
            await run.client("root").cancel_all_of("ana")
        store = run.service.components.store
        remaining = [id for id in jobs.values() if not (await asyncio.to_thread(store.workload, id)).cancel_requested]
        states = {id: (await asyncio.to_thread(store.workload, id)).state for id in remaining}
        assert [id for id, state in states.items() if state != "cancelled"] == [jobs["t3"]]


async def test_a_job_that_cannot_be_deleted_keeps_no_other_of_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as run:
        jobs = await submitted(run)
        for id in jobs.values():
            await run.client("ana").cancel(id)
            await run.job(id, "cancelled")
        forget = Pruning.forget_ended

        def forgotten(self: Pruning, id: str, now: float) -> Any:
            if id == jobs["t3"]:
                raise RowRefused("odd")
            return forget(self, id, now)

        monkeypatch.setattr(Pruning, "forget_ended", forgotten)
        with pytest.raises(MakewayError, match="1 job could not be"):
            await run.client("root").delete_storage(StorageDelete(owner="ana"))
        store = run.service.components.store
        there = [id for id in jobs.values() if await asyncio.to_thread(store.workload, id) is not None]
        assert there == [jobs["t3"]]
