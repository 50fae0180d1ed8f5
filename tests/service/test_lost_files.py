"""A job whose files are lost fails with a sentence, and hinders no other job."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import FileIn
from running import python, running

BIG = FileIn(path="weights.bin", data=base64.b64encode(b"w" * 300_000).decode())
SIZE = python("import os; print(os.path.getsize('weights.bin'))")


async def test_a_job_whose_large_file_is_lost_fails_with_its_name(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        first = await run.submit("ana", "first", profile="gpu1", command=SIZE, files=[BIG])
        assert (await run.job(first.id, "succeeded", "failed")).state.value == "succeeded"
        [content] = list((tmp_path / "artifacts").glob("??/*"))
        content.write_bytes(b"damaged")
        [copy] = await run.client("ana").clone(first.id)
        failed = await run.job(copy.id, "failed")
        assert "“weights.bin” of the job is lost (its content is damaged)" in failed.message
        assert "Submit the job again" in failed.message
        again = await run.submit("ana", "again", profile="gpu1", command=SIZE, files=[BIG])
        assert (await run.job(again.id, "succeeded", "failed")).state.value == "succeeded"
        assert run.service.components.world.failure is None


async def test_a_job_whose_files_are_away_starts_when_they_are_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "artifacts"
    with caplog.at_level(logging.WARNING, "makeway.actuate"):
        async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.1) as run:
            first = await run.submit("ana", "first", profile="gpu1", command=SIZE, files=[BIG])
            assert (await run.job(first.id, "succeeded", "failed")).state.value == "succeeded"
            store, loop = run.service.components.store, run.service.loop
            folder.rename(tmp_path / "away")
            [copy] = await run.client("ana").clone(first.id)
            other = await run.submit("ana", "other", profile="gpu1", command=python("print(1)"))
            assert (await run.job(other.id, "succeeded", "failed")).state.value == "succeeded", "it hinders no other"
            cycles = loop.cycles
            await run.until(lambda: loop.cycles > cycles + 2, "more cycles try again")
            assert (await run.job(copy.id)).state.value == "starting"
            store.contents.probe()
            health = await run.service.services.audit.ready()
            assert health.checks["files"] == "unavailable"
            assert health.ok, "it fails for every replica: none would be left to say so"
            assert 'makeway_part_works{part="files"} 0.0' in (await run.service.services.usage.metrics()).decode()
            (tmp_path / "away").rename(folder)
            store.contents.probe()
            assert (await run.service.services.audit.ready()).checks["files"] == "available"
            assert (await run.job(copy.id, "succeeded", "failed")).state.value == "succeeded"
            assert run.service.components.world.failure is None
    message = [r.getMessage() for r in caplog.records if "is started later" in r.getMessage()]
    assert len(message) == 1, "a cycle that tries again in vain does not say so again"


@pytest.mark.parametrize("what", ["limit", "clone_of"])
async def test_a_submission_that_is_refused_writes_no_file(tmp_path: Path, what: str) -> None:
    async with running(tmp_path, MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE="1") as run:
        await run.submit("ana", "first", profile="gpu1", command=SIZE)
        more = {"clone_of": "j-00000000"} if what == "clone_of" else {}
        with pytest.raises(MakewayError) as refused:
            await run.submit("ana", "second", profile="gpu1", command=SIZE, files=[BIG], **more)
        assert refused.value.status == (404 if more else 429)
        assert list((tmp_path / "artifacts").glob("??/*")) == []
