"""A job whose files are lost fails with a sentence, and hinders no other job."""

from __future__ import annotations

import base64
from pathlib import Path

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
        assert run.service.world.failure is None
