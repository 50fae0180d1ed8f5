"""What a person sees of the bytes that are kept for them, and what they may delete, with real jobs on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from running import Running, python, running

WRITES = """
import os, pathlib
print("l" * 100_000)
pathlib.Path(os.environ["MAKEWAY_RESULT_FILE"]).write_bytes(b"r" * 50_000)
pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"], "state").write_bytes(b"c" * 2_000_000)
"""


async def wrote(run: Running, owner: str, name: str) -> str:
    """Run a job that leaves a log, a result and a checkpoint, and return its id."""
    id = (await run.submit(owner, name, team="rnd", profile="gpu1", command=python(WRITES))).id
    await run.job(id, "succeeded")
    return id


@pytest.mark.covers("N25")
async def test_a_person_sees_what_is_kept_and_deletes_the_output_of_an_attempt(tmp_path: Path) -> None:
    async with running(tmp_path, MAKEWAY_MAX_KEPT_TEAM_MB=100) as run:
        ana, lea, root = (run.client(name) for name in ("ana", "lea", "root"))
        first, other = await wrote(run, "ana", "one"), await wrote(run, "lea", "other")
        waits = await run.submit("ana", "waits", profile="gpu8", workers=50)
        kept = await ana.job_storage(first)
        [attempt] = kept.attempts
        assert (attempt.attempt, attempt.log, attempt.result, attempt.ended) == (1, 100_001, 50_000, True)
        assert kept.kinds["folders"] > 2_150_000
        assert kept.bytes == sum(kept.kinds.values())
        await run.service.retention.sweep()
        mine = await ana.storage()
        assert mine.mine == sum(mine.mine_kinds.values())
        assert mine.mine_kinds["queue"] >= 6000, "the job that waits"
        assert mine.mine_kinds["folders"] == kept.kinds["folders"]
        assert [(job.id, job.bytes) for job in mine.largest] == [(first, kept.bytes)]
        [rnd] = mine.teams
        assert (rnd.team, rnd.mine, rnd.limit, rnd.share_limit) == ("rnd", mine.mine, 100_000_000, 50_000_000)
        everybody = await root.storage()
        assert everybody.whole == mine.whole == sum(account.bytes for account in everybody.accounts)
        assert rnd.bytes == sum(account.bytes for account in everybody.accounts if account.team == "rnd")
        assert {account.owner for account in mine.accounts} == {"ana"}, "nothing of others"
        for person, id in ((lea, first), (ana, other)):
            with pytest.raises(MakewayError) as refused:
                await person.delete_output(id, 1)
            assert refused.value.status in (403, 404)
            with pytest.raises(MakewayError):
                await person.job_storage(id)
        with pytest.raises(MakewayError) as refused:
            await ana.delete_output(waits.id, 1)
        assert refused.value.status == 404, "it has no attempt"
        assert (await ana.delete_output(first, 1)).bytes == 150_001
        less = await ana.job_storage(first)
        assert (less.attempts[0].log, less.attempts[0].result) == (0, 0)
        assert kept.kinds["folders"] - less.kinds["folders"] >= 150_000
        assert less.kinds["folders"] > 2_000_000, "the checkpoint stays"
        assert (await ana.logs(first)).text == ""
        with pytest.raises(MakewayError, match="has left no result"):
            await ana.result(first)
        assert (await ana.delete_job(first)).bytes == less.bytes
        assert (await ana.storage()).mine_kinds == {"queue": mine.mine_kinds["queue"]}
