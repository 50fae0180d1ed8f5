"""System users mode: the API shows no more of another user's job than the file system does."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_quota.services import Caller
from running import PEOPLE, READ, python, running

TEAM = PEOPLE | {
    "ada": Caller("ada", groups=frozenset({"rnd"}), scopes=READ),
    "lead": Caller("lead", groups=frozenset({"rnd"}), scopes=READ | {"custom:makeway:manage!group=rnd"}),
}
SAYS = python("import os; print('secret'); open(os.environ['MAKEWAY_RESULT_FILE'], 'w').write('secret')")


@pytest.mark.covers("N16", "N22")
@pytest.mark.parametrize("mode", ["demo", "system"])
async def test_a_teams_work_is_shared_in_the_demo_and_private_among_accounts(tmp_path: Path, mode: str) -> None:
    async with running(tmp_path, people=TEAM, MAKEWAY_MODE=mode) as run:
        job = await run.submit("ana", "j", SAYS, profile="gpu1", env={"TOKEN": "secret"}, source="secret")
        await run.job(job.id, "succeeded")
        for person in ("ana", "lead", "root"):
            client = run.client(person)
            assert (await client.logs(job.id)).text == "secret\n"
            assert await client.result(job.id) == b"secret"
            assert (await client.job(job.id)).source == "secret"
        ada = run.client("ada")
        seen = await ada.job(job.id)
        assert seen.private == (mode == "system")
        assert (seen.source, bool(seen.command)) == (("", False) if mode == "system" else ("secret", True))
        for call in (ada.logs, ada.result, ada.error, ada.clone):
            if mode == "system":
                with pytest.raises(MakewayError, match="ask ana for its log, result or files") as refused:
                    await call(job.id)
                assert refused.value.status == 403
            elif call != ada.error:
                await call(job.id)
