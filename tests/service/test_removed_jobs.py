"""Jobs that retention has removed: 410 for those who could see them, 404 for all others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from running import Running, running


async def removed_job(run: Running) -> str:
    """Submit a job, end it and remove it as retention would."""
    job = await run.submit("ana", "train", profile="gpu1")
    await run.client("ana").cancel(job.id)
    await run.job(job.id, "cancelled")
    assert await asyncio.to_thread(run.service.components.store.pruning.forget_workloads, 1e12, 10) == 1
    return job.id


@pytest.mark.parametrize("person", ["ana", "lea", "root"])
async def test_a_removed_job_is_told_as_such(tmp_path: Path, person: str) -> None:
    async with running(tmp_path) as run:
        id = await removed_job(run)
        client = run.client(person)
        for question in (client.job(id), client.logs(id), client.result(id), client.error(id), client.job_events(id)):
            with pytest.raises(MakewayError, match="was removed 90 days after its end, with its log") as refused:
                await question
            assert (refused.value.code, refused.value.status) == ("removed", 410)
            assert id in refused.value.message
        for change in (client.cancel(id), client.resume(id), client.clone(id)):
            with pytest.raises(MakewayError) as refused:
                await change
            assert refused.value.status == 410
        assert (await client.jobs()).jobs == []


async def test_a_removed_job_does_not_exist_for_others_and_after_a_while(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        id = await removed_job(run)
        for person, unknown in (("bo", id), ("ana", "j-never")):
            with pytest.raises(MakewayError, match="no job") as refused:
                await run.client(person).job(unknown)
            assert refused.value.status == 404
        store = run.service.components.store
        assert await asyncio.to_thread(store.pruning.forget_removals, 1e12, 10) == 0, "not before its time"
        assert await asyncio.to_thread(store.pruning.forget_removals, 2e12, 10) == 0, "its folder is not purged"
        await asyncio.to_thread(store.pruning.purged, [id])
        assert await asyncio.to_thread(store.pruning.forget_removals, 2e12, 10) == 1
        with pytest.raises(MakewayError) as refused:
            await run.client("ana").job(id)
        assert refused.value.status == 404


async def test_a_removed_session_is_over(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        session = await run.session("ana", "gpu1", "rnd")
        await run.granted(session.id)
        await run.client("spawner").release(session.id)
        await asyncio.to_thread(run.service.components.store.pruning.forget_workloads, 1e12, 10)
        for question in (run.client("spawner").session(session.id), run.client("spawner").renew(session.id)):
            with pytest.raises(MakewayError, match="is over") as refused:
                await question
            assert refused.value.status == 410
