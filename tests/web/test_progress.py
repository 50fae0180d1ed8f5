"""How far a job is, on its page, on the panel and in the API: with its numbers in words, and for whom."""

from __future__ import annotations

import re
from typing import Any

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
