"""What a job runs and wrote is its owner's and the leads', unless the policy shares it in the team."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_quota.services import Caller
from makeway_quota.services.jobs.listing import line
from makeway_quota.store.records import NewWorkload
from makeway_quota.store.rows import initial_record
from makeway_quota.web.pages.figures.sharing import view_of
from makeway_quota.web.pages.panel import gather
from makeway_quota.web.settings import WebSettings
from makeway_quota.web.stream import Messages
from makeway_quota.wording.outcomes import failed_and_retried
from running import PEOPLE, READ, SAMPLE, python, running

TEAM = PEOPLE | {
    "ada": Caller("ada", groups=frozenset({"rnd"}), scopes=READ),
    "lead": Caller("lead", groups=frozenset({"rnd"}), scopes=READ | {"custom:makeway:manage!group=rnd"}),
}
SAYS = python("import os; print('secret'); open(os.environ['MAKEWAY_RESULT_FILE'], 'w').write('secret')")


SHARED = SAMPLE.read_text().replace("settings:", "settings:\n  work: team", 1)
ONE_TEAM = SAMPLE.read_text().replace("- name: rnd\n    title: R&D", "- name: rnd\n    work: team\n    title: R&D", 1)
FAILS = python("raise ValueError('secret')")


@pytest.mark.covers("N16", "N22")
@pytest.mark.parametrize(
    ("mode", "policy", "shared"),
    [
        ("demo", None, False),
        ("demo", SHARED, True),
        ("demo", ONE_TEAM, True),
        ("system", None, False),
        ("system", SHARED, False),
    ],
)
async def test_work_is_private_unless_the_policy_shares_it(
    tmp_path: Path, mode: str, policy: str | None, shared: bool
) -> None:
    assert policy is None or "work: team" in policy
    async with running(tmp_path, policy, people=TEAM, MAKEWAY_MODE=mode) as run:
        job = await run.submit("ana", "j", SAYS, profile="gpu1", env={"TOKEN": "secret"}, source="secret")
        await run.job(job.id, "succeeded")
        for person in ("ana", "lead", "root"):
            client = run.client(person)
            assert (await client.logs(job.id)).text == "secret\n"
            assert await client.result(job.id) == b"secret"
            assert (await client.job(job.id)).source == "secret"
        ada = run.client("ada")
        seen = await ada.job(job.id)
        assert seen.private is not shared
        assert (seen.source, bool(seen.command)) == (("secret", True) if shared else ("", False))
        for call in (ada.logs, ada.result, ada.error, ada.clone):
            if not shared:
                with pytest.raises(MakewayError, match="ask ana for its log, result or files") as refused:
                    await call(job.id)
                assert refused.value.status == 403
            elif call != ada.error:
                await call(job.id)


async def test_what_a_failed_job_wrote_last_is_in_no_colleagues_answer(tmp_path: Path) -> None:
    async with running(tmp_path, people=TEAM) as run:
        job = await run.submit("ana", "j", FAILS, profile="gpu1", max_failures=1)
        await run.job(job.id, "failed")
        assert "secret" in (await run.client("ana").job(job.id)).model_dump_json()
        ada, services = run.client("ada"), run.service.services
        answers = [await ada.job(job.id), *await ada.job_events(job.id), *await ada.decisions()]
        answers += (await ada.jobs()).jobs
        assert "secret" not in "".join(answer.model_dump_json() for answer in answers)
        for person, knows in ((TEAM["ada"], False), (TEAM["ana"], True)):
            batch = await anext(services.audit.batches(person, 0))
            assert ("secret" in Messages().of(batch.rows).decode()) is knows


async def test_pools_and_offers_name_no_person_of_another_team(tmp_path: Path) -> None:
    async with running(tmp_path, people=TEAM, gpus=10) as run:
        for name in ("confidential1", "confidential2", "confidential3"):
            job = await run.submit("ana", name, profile="gpu3", team="rnd")
            await run.job(job.id, "running")
        for person, knows in (("ana", True), ("ada", True), ("root", True), ("bo", False), ("guest", False)):
            result = "".join(pool.model_dump_json() for pool in await run.client(person).pools())
            assert ("confidential" in result) is knows
            assert ('"ana"' in result) is knows
            assert (job.id in result) is knows
            assert '"rnd"' in result
        offers = (await run.client("bo").offers()).model_dump_json()
        assert "rnd" in offers
        assert "confidential" not in offers
        assert "ana" not in offers
        owner = await run.submit("bo", "classified", profile="gpu3", team="devops")
        await run.job(owner.id, "running")
        told = [line.message for line in await run.client("ana").decisions() if line.verb in ("evict", "requeue")]
        assert any("DevOps's job needs 3 GPUs" in message for message in told)
        assert "classified" not in "".join(told)
        told = [line.message for line in await run.client("bo").decisions()]
        assert "confidential" not in "".join(told)


async def test_what_a_team_shares_on_a_page_does_not_depend_on_its_first_reader(tmp_path: Path) -> None:
    async with running(tmp_path, people=TEAM) as run:
        job = await run.submit("ana", "j", FAILS, profile="gpu1", max_failures=1)
        await run.job(job.id, "failed")
        services = run.service.services
        views = {view_of(services, TEAM[name]) for name in ("ana", "ada", "lead")}
        assert len(views) == 1, "they share one rendering"
        for first in ("ana", "ada", "lead"):
            panel = await gather(services, TEAM[first], WebSettings())
            assert "secret" not in repr(panel), f"{first} opened the panel"
        assert "secret" in repr(await gather(services, TEAM["root"], WebSettings()))
        assert "secret" in "".join(line.message for line in await run.client("ana").decisions())


def test_no_table_shows_what_a_job_that_is_tried_again_wrote_last() -> None:
    words = failed_and_retried("“j” of ana", "ValueError: secret", 1)
    row = initial_record(NewWorkload("j-1", "job", "rnd", "gpu1", "ana"), 0.0)
    shown = line(row._replace(reason_code="failed", reason_message=words))
    assert shown.reason is not None
    assert shown.reason.message == "“j” of ana failed."
