"""A lead of one group manages that group's teams and no other: on every route that a lead may call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from makeway_quota.services import Caller
from makeway_quota.web.login.auth import may, may_for_some
from web.portal import API, PREFIX, Portal, caller, portal

SECRET_WORDS = ("devops", "DevOps", "bo", "secret-job")
"""Words that only the other team's policy and jobs have"""


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[Portal]:
    """A portal where the lead of rnd is in no group, and both teams have running and pending jobs."""
    async with portal(tmp_path) as made:
        tokens = made.app.state.authenticator.directory.tokens
        tokens["boss"] = caller("boss", "read", "manage!group=rnd")
        tokens["chief"] = caller("chief", "read", "manage")
        tokens["other"] = caller("other", "read", "manage!group=elsewhere", "submit!group=rnd", groups=("rnd",))
        await made.running_job(owner="ana", name="rnd-job")
        await made.running_job(owner="bo", name="secret-job", profile="gpu1")
        yield made


async def foreign(web: Portal) -> str:
    """The id of the other team's job."""
    page = await web.run.client("root").jobs(team="devops")
    return page.jobs[0].id


def hidden(answer: httpx2.Response) -> None:
    text = answer.text
    for word in SECRET_WORDS:
        assert f'"{word}"' not in text, (word, text[:400])
        assert f"name: {word}" not in text, (word, text[:400])
    assert "secret-job" not in text


async def test_a_lead_sees_the_teams_of_the_group_and_no_others(web: Portal) -> None:
    boss = web.as_("boss")
    for path in ("policies", "usage", "jobs", "decisions", "sessions?all=1", "policy", "policy/versions/1"):
        answer = await boss.get(f"{API}/{path}")
        assert answer.status_code == 200, path
        hidden(answer)
    assert [policy["name"] for policy in (await boss.get(f"{API}/policies")).json()] == ["rnd"]
    assert [job["name"] for job in (await boss.get(f"{API}/jobs")).json()["jobs"]] == ["rnd-job"]
    for path in ("jobs?team=devops", "decisions?team=devops"):
        assert (await boss.get(f"{API}/{path}")).status_code == 403
    id = await foreign(web)
    for path in (f"jobs/{id}", f"jobs/{id}/events", f"jobs/{id}/logs", f"jobs/{id}/result", f"jobs/{id}/error"):
        assert (await boss.get(f"{API}/{path}")).status_code == 404
    for action in ("cancel", "resume", "preempt-test"):
        assert (await boss.post(f"{API}/jobs/{id}/{action}")).status_code == 404
    assert (await boss.get(f"{API}/offers?user=bo")).status_code == 403


async def test_a_lead_reads_a_valid_document_of_the_own_teams(web: Portal) -> None:
    document = (await web.as_("boss").get(f"{API}/policy")).json()["document"]
    assert document.startswith("# Only the policies of your teams: 1 of 2.\n")
    assert "name: rnd" in document
    check = await web.as_("boss").post(f"{API}/policy/validate", json={"document": document})
    assert check.json()["ok"] is True
    assert check.json()["changes"] == []
    whole = (await web.as_("root").get(f"{API}/policy")).json()["document"]
    assert "devops" in whole
    assert (await web.as_("chief").get(f"{API}/policy")).json()["document"] == whole


async def test_a_lead_gets_no_authors_and_comments_of_versions(web: Portal) -> None:
    document = (await web.as_("root").get(f"{API}/policy")).json()["document"]
    change = {"document": document.replace("limit: 9", "limit: 8"), "comment": "for DevOps", "base": 1}
    assert (await web.as_("root").put(f"{API}/policy", json=change)).status_code == 200
    for path in ("policy", "policy/history", "policy/versions/2"):
        assert "for DevOps" in (await web.as_("chief").get(f"{API}/{path}")).text
        answer = await web.as_("boss").get(f"{API}/{path}")
        assert answer.status_code == 200
        assert "for DevOps" not in answer.text
        assert '"root"' not in answer.text


async def test_an_unfiltered_manager_sees_all_teams(web: Portal) -> None:
    chief = web.as_("chief")
    assert [policy["name"] for policy in (await chief.get(f"{API}/policies")).json()] == ["rnd", "devops"]
    id = await foreign(web)
    assert (await chief.get(f"{API}/jobs/{id}")).status_code == 200
    assert (await chief.post(f"{API}/jobs/{id}/cancel")).status_code == 200


async def test_validating_and_previewing_tell_a_lead_nothing_of_other_teams(web: Portal) -> None:
    whole = (await web.as_("root").get(f"{API}/policy")).json()["document"]
    changed = whole.replace("reserved: 5", "reserved: 0").replace("limit: 9", "limit: 0")
    assert changed != whole
    boss, root = web.as_("boss"), web.as_("root")
    for path in ("policy/validate", "policy/preview"):
        answer = await boss.post(f"{API}/{path}", json={"document": changed})
        assert answer.status_code == 200
        hidden(answer)
    everything = (await root.post(f"{API}/policy/validate", json={"document": changed})).json()["changes"]
    assert any("DevOps" in change or "devops" in change for change in everything), "there was something to hide"
    assert (await boss.put(f"{API}/policy", json={"document": changed})).status_code == 403


async def test_preview_effects_are_those_of_the_own_teams(web: Portal) -> None:
    """Without any quota everything leaves: a lead hears of the own team's jobs only."""
    whole = (await web.as_("root").get(f"{API}/policy")).json()["document"]
    closed = whole.replace("weight:", "paused: true\n    weight:") if "paused" in whole else whole
    closed = closed.replace("reserved: 5", "reserved: 0")
    mine: dict[str, Any] = (await web.as_("boss").post(f"{API}/policy/preview", json={"document": closed})).json()
    assert {effect["team"] for kind in mine.values() for effect in kind} <= {"rnd"}


async def test_a_lead_changes_jobs_of_the_own_team(web: Portal) -> None:
    page = await web.run.client("root").jobs(team="rnd")
    answer = await web.as_("boss").post(f"{API}/jobs/{page.jobs[0].id}/cancel")
    assert answer.status_code == 200


async def test_scopes_for_another_group_open_nothing(web: Portal) -> None:
    other = web.as_("other")
    page = await web.run.client("root").jobs(team="rnd")
    assert (await other.post(f"{API}/jobs/{page.jobs[0].id}/cancel")).status_code == 403
    assert (await other.post(f"{API}/jobs", json={"command": ["true"]})).status_code == 403
    assert (await other.get(f"{API}/policy")).json()["document"].startswith("# Only the policies of your teams: 1 of 2")
    assert (await web.as_("ana").get(f"{API}/policy")).status_code == 403


async def test_pages_are_filtered_for_a_lead(web: Portal) -> None:
    browser = await web.browser("boss")
    assert (await browser.get(f"{PREFIX}policy")).status_code == 403
    assert (await browser.get(f"{PREFIX}teams/devops")).status_code == 403
    assert "secret-job" not in (await browser.get(f"{PREFIX}decisions")).text


def test_filters_of_scopes_are_kept() -> None:
    def holder(*scopes: str) -> Caller:
        return Caller("ana", scopes=frozenset(f"custom:makeway:{scope}" for scope in scopes))

    assert may(holder("read"), "read")
    assert may(holder("submit!user=ana"), "submit")
    for filtered in ("submit!user=bo", "submit!group=rnd", "submit!server=ana/", "submit!user=ana2"):
        assert not may(holder(filtered), "submit")
    assert not may(holder("manage!group=rnd"), "manage")
    assert may_for_some(holder("manage!group=rnd"), "manage")
    assert not may_for_some(holder("manage!user=bo"), "manage")
    assert holder("manage!group=rnd").manages(("rnd",))
    assert not holder("manage!group=rnd").manages(("devops",))
    assert holder("manage").manages(())
