"""How far a job is, on its page, on the panel and in the API: with its numbers in words, and for whom."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from makeway_api.models import JobRequest
from makeway_quota.store.errors import StoreError
from running import SAMPLE, running
from web.portal import API, PREFIX, Portal

REPORT: dict[str, Any] = {
    "step": 500,
    "total": 2000,
    "rate": 2.5,
    "stage": "",
    "at": 1.0,
    "metrics": {"loss": 0.25, "<b>accuracy": 0.9, "broken": None},
    "curve": {"name": "loss", "points": [[0, 2.0], [250, 0.5], [500, 0.25]]},
}


async def reported(web: Portal, report: dict[str, Any] = REPORT) -> str:
    id = await web.running_job("train")
    web.services.context.progress.note(id, 1, report)
    web.services.context.progress.write()
    return id


async def test_the_api_has_the_progress_of_a_job(web: Portal) -> None:
    id = await reported(web)
    job = (await web.as_("ana").get(f"{API}/jobs/{id}")).json()["progress"]
    assert (job["step"], job["total"], job["rate"], job["remaining_seconds"]) == (500, 2000, 2.5, 600.0)
    assert job["metrics"]["loss"] == 0.25
    assert job["curve"] == {"name": "loss", "points": [[0, 2.0], [250, 0.5], [500, 0.25]]}
    assert job["updated_at"]
    [line] = (await web.as_("ana").get(f"{API}/jobs")).json()["jobs"]
    assert (line["progress"]["step"], line["progress"]["curve"], line["progress"]["metrics"]) == (
        500,
        None,
        {"loss": 0.25},
    )


async def test_a_job_that_reported_nothing_has_none(web: Portal) -> None:
    id = await web.running_job("train")
    assert (await web.as_("ana").get(f"{API}/jobs/{id}")).json()["progress"] is None
    assert "mw-progress" not in (await web.as_("ana").get(f"{PREFIX}jobs/{id}")).text


async def test_the_page_of_a_job_has_its_bar_its_metrics_and_its_curve(web: Portal) -> None:
    id = await reported(web)
    text = (await web.as_("ana").get(f"{PREFIX}jobs/{id}")).text
    assert re.search(r'<progress class="mw-progress" max="100" value="25" aria-label="step 500 of 2,000">', text)
    assert "step 500 of 2,000, 10 min remaining" in re.sub(r"\s+", " ", text)
    assert "&lt;b&gt;accuracy" in text
    assert "not a number" in text
    label = "loss: 2 at step 0, 0.25 at step 500, between 0.25 and 2 at 3 points"
    assert f'<svg class="mw-curve" role="img" aria-label="{label}"' in text
    assert re.search(r'<polyline points="3.0,3.0 80.0,\d+\.\d 157.0,33.0">', text)


async def test_the_panel_shows_the_steps_but_not_the_metrics_of_a_job(web: Portal) -> None:
    await reported(web)
    text = (await web.as_("eve").get(PREFIX)).text
    assert "step 500 of 2,000, 10 min remaining" in re.sub(r"\s+", " ", text)
    assert "accuracy" not in text


async def test_metrics_are_for_those_who_may_read_the_job(web: Portal) -> None:
    id = await reported(web, {**REPORT, "stage": "secret-project"})
    job = (await web.as_("eve").get(f"{API}/jobs/{id}")).json()
    assert job["private"]
    assert (job["progress"]["step"], job["progress"]["metrics"], job["progress"]["curve"]) == (500, {}, None)
    page = (await web.as_("eve").get(f"{PREFIX}jobs/{id}")).text
    assert "secret-project" not in page
    assert "accuracy" not in page


async def test_a_job_without_steps_for_long_has_no_rate_and_the_page_says_since_when(web: Portal) -> None:
    id = await reported(web)
    store = web.services.context.store
    row = store.progress.of([id])[id]
    store.progress.write({id: (1, {**row.report, "step": 501})}, row.at - 3600)
    job = (await web.as_("ana").get(f"{API}/jobs/{id}")).json()["progress"]
    assert (job["rate"], job["remaining_seconds"]) == (None, None)
    text = re.sub(r"\s+", " ", (await web.as_("ana").get(f"{PREFIX}jobs/{id}")).text)
    assert "step 501 of 2,000, no step since" in text


async def test_a_resumed_job_says_how_far_it_was(web: Portal) -> None:
    id = await reported(web)
    web.services.context.progress.note(id, 2, {**REPORT, "step": 300})
    web.services.context.progress.write()
    job = (await web.as_("ana").get(f"{API}/jobs/{id}")).json()["progress"]
    assert (job["step"], job["reached"]) == (300, 500)
    text = (await web.as_("ana").get(f"{PREFIX}jobs/{id}")).text
    assert "step 300 of 2,000 (it had reached 500 before)" in text


async def test_a_save_that_takes_long_for_the_grace_is_told_while_the_job_runs(web: Portal) -> None:
    id = await reported(web, {**REPORT, "save_seconds": 50})
    grace = (await web.services.context.world.row(id)).grace  # type: ignore[union-attr]
    web.services.context.progress.note(id, 1, {**REPORT, "save_seconds": grace - 1})
    web.services.context.progress.write()
    job = (await web.as_("ana").get(f"{API}/jobs/{id}")).json()
    [warning] = job["warnings"]
    assert warning.startswith("Its last save took ")
    assert "more than half of the grace of " in warning
    assert warning.endswith(": save less or faster, or use a profile with a longer grace.")
    assert job["progress"]["step"] == 500, "a warning is no progress"
    [line] = (await web.as_("ana").get(f"{API}/jobs")).json()["jobs"]
    assert line["warnings"] == [warning]
    assert warning in (await web.as_("ana").get(f"{PREFIX}jobs/{id}")).text
    assert (await web.as_("eve").get(f"{API}/jobs/{id}")).json()["warnings"] == []
    await web.as_("ana").post(f"{API}/jobs/{id}/cancel")
    await web.run.job(id, "cancelled")
    assert (await web.as_("ana").get(f"{API}/jobs/{id}")).json()["warnings"] == [], "too late to act"


async def test_a_job_that_only_saves_has_a_warning_and_no_progress(web: Portal) -> None:
    id = await reported(web, {"save_seconds": 1e6})
    job = (await web.as_("ana").get(f"{API}/jobs/{id}")).json()
    assert job["progress"] is None
    assert "longer than the grace" in job["warnings"][0]
    web.services.context.progress.note(id, 2, {"step": 1})  # the next attempt has not saved yet
    web.services.context.progress.write()
    assert (await web.as_("ana").get(f"{API}/jobs/{id}")).json()["warnings"] == job["warnings"]
    web.services.context.progress.note(id, 2, {"step": 2, "save_seconds": 0.1})
    web.services.context.progress.write()
    assert (await web.as_("ana").get(f"{API}/jobs/{id}")).json()["warnings"] == []


async def test_a_save_that_was_killed_at_the_deadline_is_told_until_one_is_in_time(web: Portal) -> None:
    id = await reported(web, {"save_seconds": 3.0, "save_killed": True})
    job = (await web.as_("ana").get(f"{API}/jobs/{id}")).json()
    assert job["warnings"][0].startswith("Its last save was killed after 3 s, as the grace of 30 s was over: save less")
    for report, many in (({"step": 1}, 1), ({"save_seconds": 3.0}, 0)):
        web.services.context.progress.note(id, 2, report)
        web.services.context.progress.write()
        assert len((await web.as_("ana").get(f"{API}/jobs/{id}")).json()["warnings"]) == many


@pytest.mark.parametrize("seconds", [None, "90", True, -5, 1e400, [90], {"s": 90}, 0, 0.5])
async def test_what_is_no_long_save_is_no_warning(web: Portal, seconds: Any) -> None:
    id = await reported(web, {**REPORT, "save_seconds": seconds})
    assert (await web.as_("ana").get(f"{API}/jobs/{id}")).json()["warnings"] == []


async def test_the_next_submission_of_that_name_is_told_of_slow_saves(web: Portal) -> None:
    id = await reported(web, {"save_seconds": 1e6})
    ana = web.as_("ana")
    ask = {"name": "train", "profile": "gpu1", "command": ["true"]}
    dry = (await ana.post(f"{API}/jobs", json={**ask, "dry_run": True})).json()["notes"]
    submitted = (await ana.post(f"{API}/jobs", json=ask)).json()["notes"]
    for notes in (dry, submitted):
        [note] = notes
        assert note.startswith(f"Your previous job of this name, {id}, saved slowly: its last save took 11 d 13 h, ")
    assert (await ana.post(f"{API}/jobs", json={**ask, "name": "other"})).json()["notes"] == []
    assert (await ana.post(f"{API}/jobs", json={**ask, "name": ""})).json()["notes"] == []
    assert (await web.as_("bo").post(f"{API}/jobs", json=ask)).json()["notes"] == [], "another person's job"


async def test_a_signal_that_frameworks_catch_is_told_at_the_submission(tmp_path: Path) -> None:
    policy = SAMPLE.read_text(encoding="utf-8").replace("signal: SIGTERM", "signal: SIGUSR1", 1)
    file = {"path": "train.py", "data": base64.b64encode(b"from makeway import checkpoint").decode()}
    async with running(tmp_path, policy) as run:
        told = [
            (await run.client("ana").dry_run(JobRequest(command=["true"], profile=profile, **ask))).notes
            for profile, ask in (
                ("gpu1", {"source": "import lightning  # checkpoint"}),
                ("gpu1", {"source": "from makeway import checkpoint"}),
                ("gpu1", {"files": [file]}),
                ("gpu2", {"source": "import lightning"}),
            )
        ]
        assert [len(notes) for notes in told] == [1, 0, 0, 0]
        assert told[0][0].startswith(
            "Its profile sends the notice as SIGUSR1, which may not reach the job's code: NCCL, "
        )


async def test_a_job_that_has_ended_shows_its_last_step_from_the_first_moment(web: Portal) -> None:
    """Cards and pages that follow it end with the first state that is an end."""
    id = await reported(web)
    web.services.context.progress.note(id, 1, {**REPORT, "step": 2000, "at": 2.0})
    web.backend.finish(id, message="saved at step 2000")
    ended = await web.run.job(id, "succeeded")
    assert ended.progress is not None
    assert (ended.progress.step, ended.progress.total) == (2000, 2000)
    text = re.sub(r"\s+", " ", (await web.as_("ana").get(f"{PREFIX}jobs/{id}")).text)
    assert "exit 0 · saved at step 2000" in text


async def test_an_end_is_recorded_where_its_last_step_cannot_be_written(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = await reported(web)

    def fails(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(web.services.context.progress, "_write", fails)
    web.services.context.progress.note(id, 1, {**REPORT, "step": 2000, "at": 2.0})
    web.backend.finish(id)
    await web.run.job(id, "succeeded")
