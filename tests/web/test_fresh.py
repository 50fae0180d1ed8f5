"""A page says when it is out of date, comes back by itself, and leaves the focus where it was."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from playwright.async_api import Page, Route, expect
from web.portal import PEOPLE, PREFIX, Portal
from web.test_browser import page, url

__all__ = ["page", "url"]

pytestmark = pytest.mark.browser

STALE = re.compile(r"^stale: as of \d\d:\d\d:\d\d$")
ACTIVE = "document.activeElement.id || document.activeElement.textContent"


@pytest.mark.parametrize(
    "path", ["", "teams/rnd", "nodes/virtual-1", "jobs/{id}", "workloads", "nodes", "decisions", "policy"]
)
async def test_a_page_that_is_offline_says_what_time_it_shows_and_comes_back(
    web: Portal, url: str, page: Page, path: str
) -> None:
    id = await web.running_job()
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await page.goto(f"{url}{PREFIX}{path.format(id=id)}")
    pill = page.locator("#mw-live")
    fresh = re.compile(r"^(live|as of \d\d:\d\d:\d\d)$")
    await expect(pill).to_have_text(fresh)
    await page.clock.install()

    async def drop(route: Route) -> None:
        await route.abort("internetdisconnected")

    await page.route("**/*", drop)
    web.app.state.streams.close()
    await page.clock.run_for(12_000)
    await expect(pill).to_have_text(STALE)
    web.app.state.streams._closing.clear()
    await page.unroute("**/*")
    await page.clock.run_for(40_000)
    await expect(pill).to_have_text(fresh)


async def test_a_frozen_tab_does_not_say_that_it_is_live(web: Portal, url: str, page: Page) -> None:
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await expect(page.locator("#mw-live")).to_have_text("live")
    await page.evaluate("document.dispatchEvent(new Event('freeze'))")  # Chromium freezes hidden tabs only
    id = await web.running_job()
    await expect(page.locator("#mw-live")).to_have_text(re.compile(r"^paused: as of \d\d:\d\d:\d\d$"))
    await page.evaluate("document.dispatchEvent(new Event('resume'))")
    await expect(page.locator("#mw-live")).to_have_text("live")
    await expect(page.locator(f"a.mw-cell[data-w='{id}']")).to_have_count(3)


async def test_behind_a_proxy_that_keeps_the_stream_back_the_page_is_read_every_ten_seconds(
    web: Portal, url: str, page: Page
) -> None:
    async def silent(route: Route) -> None:
        """Answer nothing."""

    await page.clock.install()
    await page.route("**/api/v1/events?*", silent)
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await page.clock.run_for(13_000)
    id = await web.running_job()
    await page.clock.run_for(12_000)
    await expect(page.locator(f"a.mw-cell[data-w='{id}']")).to_have_count(3)
    await page.clock.run_for(2_000)
    await expect(page.locator("#mw-live")).to_have_text(re.compile(r"^updated every 10 s, as of \d\d:\d\d:\d\d$"))


async def test_pages_come_back_at_random_times_and_less_often_each_time(web: Portal, url: str, page: Page) -> None:
    """A hundred pages that lose their streams in one moment, as at a restart of the service, do not ask at once."""
    await page.add_init_script(
        "window.tries = []; const Real = EventSource;"
        "window.EventSource = class extends Real { constructor(url) { super(url); tries.push(Date.now()); } };"
    )

    async def drop(route: Route) -> None:
        await route.abort("internetdisconnected")

    await page.route("**/api/v1/events?*", drop)
    await page.clock.install()
    await page.goto(f"{url}{PREFIX}?login_token=root")
    for _ in range(240):
        await page.clock.run_for(500)
    tries = await page.evaluate("window.tries")
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert min(waits) >= 500
    assert len({round(wait, -2) for wait in waits}) > 1
    assert 4 <= len(tries) <= 30, "in two minutes"


async def test_a_button_that_becomes_another_loses_the_focus_to_its_heading(web: Portal, url: str, page: Page) -> None:
    id = await web.running_job()
    posted: list[str] = []
    page.on("request", lambda asked: posted.append(asked.url) if asked.method == "POST" else None)
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await page.goto(f"{url}{PREFIX}jobs/{id}")
    await expect(page.locator("#mw-live")).to_have_text("live")
    for name, end in (("Test preemption", lambda: web.backend.finish(id, 0)),):
        await page.get_by_role("button", name=name).focus()
        end()
        await expect(page.get_by_role("button", name="Resume")).to_be_visible()
        assert await page.evaluate(ACTIVE) == "h-state"
        await page.keyboard.press("Enter")
        await page.keyboard.press("Space")
        await page.wait_for_timeout(300)
        assert posted == []
        assert (await web.run.job(id, "succeeded")).state.value == "succeeded"


async def test_the_focus_stays_on_its_job_or_goes_to_the_heading(web: Portal, url: str, page: Page) -> None:
    """Jobs before and behind the one with the focus come and go; then it ends itself."""
    jobs = [await web.running_job(f"job {number}", profile="gpu1") for number in range(5)]
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await expect(page.locator("#mw-live")).to_have_text("live")
    link = page.locator(f"#running a[href$='{jobs[2]}']")
    await link.focus()
    where = "document.activeElement.getAttribute('href')"
    for number, other in enumerate((jobs[0], jobs[4])):
        await web.services.jobs.cancel(PEOPLE["root"], other)
        await web.running_job(f"new {number}", profile="gpu1")
        await expect(page.locator("#new-running")).to_have_text(f"{number + 1} new")
        assert (await page.evaluate(where)).endswith(jobs[2])
    await web.services.jobs.cancel(PEOPLE["root"], jobs[2])
    await expect(page.locator("#running .mw-gone")).to_have_count(3)
    assert (await page.evaluate(where)).endswith(jobs[2]), "the line is pale, and still about the same job"
    await page.get_by_role("button", name="2 new").nth(0).click()
    await expect(page.locator("#running tr")).to_have_count(4)
    assert await page.evaluate(ACTIVE) == "h-running"


async def test_a_cell_of_the_map_keeps_the_focus_but_never_opens_another_job(web: Portal, url: str, page: Page) -> None:
    await web.running_job("first", profile="gpu3")
    second = await web.running_job("second", profile="gpu1")
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await expect(page.locator("#mw-live")).to_have_text("live")
    cell = page.locator(f"a.mw-cell[data-w='{second}']")
    place = (await cell.get_attribute("data-tip") or "").split("\n")[0]
    await cell.focus()
    await web.services.jobs.cancel(PEOPLE["root"], second)
    await expect(page.get_by_role("tooltip")).to_contain_text("free")
    assert (await page.evaluate("document.activeElement.dataset.tip")).startswith(place)
    third = await web.running_job("third", profile="gpu1")
    await expect(page.locator(f"a.mw-cell[data-w='{third}']")).to_have_count(1)
    assert await page.evaluate("document.activeElement.getAttribute('href')") is None


async def test_lines_of_the_log_wait_and_stay_where_they_are(web: Portal, url: str, page: Page) -> None:
    await web.running_job("first", profile="gpu1")
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await expect(page.locator("#mw-live")).to_have_text("live")
    before = await page.locator("#log").inner_text()
    await web.running_job("second", profile="gpu1")
    button = page.locator("#new-log")
    await expect(button).to_have_text(re.compile(r"^\d+ new$"))
    assert await page.locator("#log").inner_text() == before
    await button.click()
    await expect(page.locator("#log")).to_contain_text("second")
    await expect(button).to_be_hidden()
