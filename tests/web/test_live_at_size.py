"""Open pages at a thousand nodes, with twenty changes a second: few bytes, no shift, nothing late, focus stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright, expect
from web.large import large_portal
from web.portal import PREFIX, Portal, serving
from web.test_browser import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SHIFTS = """
window.shifts = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifts += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
"""What the browser itself counts as layout shift, from the start of a page on"""


@asynccontextmanager
async def busy(large: Portal, ends: float = 5.0) -> AsyncIterator[None]:
    """End so many jobs a second, so that as many start: about twenty changes."""

    async def change() -> None:
        rows = [row for row in (await large.run.service.components.world.rows()).values() if row.state == "running"]
        random.Random(1).shuffle(rows)
        for row in rows:
            large.backend.finish(row.id, 0)
            await asyncio.sleep(1 / ends)

    task = asyncio.create_task(change())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def large(tmp_path: Path) -> AsyncIterator[Portal]:
    async with large_portal(tmp_path, running_jobs=3_000, waiting_jobs=3_000, teams=40, departments=6) as made:
        await made.run.converged()
        yield made


@asynccontextmanager
async def opened(url: str, height: int = 900) -> AsyncIterator[Page]:
    """A browser in which an administrator has logged in."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        page = await browser.new_page(viewport={"width": 1400, "height": height})
        await page.add_init_script(SHIFTS)
        await page.goto(f"{url}{PREFIX}?login_token=root")
        await expect(page.locator("#mw-live")).to_have_text("live")
        yield page
        await browser.close()


class Counted:
    """The app, with the bytes of the bodies that it sent, as they are on the wire."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.state = app.state
        self.sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counting(message: Any) -> None:
            self.sent += len(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, counting)


@pytest.mark.parametrize("path", ["", "teams/team07"])
async def test_an_open_page_takes_few_bytes_and_does_not_move(large: Portal, path: str) -> None:
    app = Counted(large.app)
    async with serving(app) as url, opened(url) as page, busy(large):
        if path:
            await page.goto(f"{url}{PREFIX}{path}")
            await expect(page.locator("#mw-live")).to_have_text("live")
        for place in ("0", "document.getElementById('h-queue').getBoundingClientRect().top + scrollY - 60"):
            await page.evaluate(f"scrollTo(0, {place})")
            await page.wait_for_timeout(2_000)
            seconds = 20
            shown = await page.evaluate("[document.body.innerText, scrollY]")
            await page.evaluate("window.shifts = 0")
            before = app.sent
            await page.wait_for_timeout(1000 * seconds)
            after = await page.evaluate("[document.body.innerText, scrollY]")
            shifts = await page.evaluate("window.shifts")
            print(path, place, (app.sent - before) / seconds / 1e3, "kB/s, shift a minute", shifts * 60 / seconds)
            assert after[0] != shown[0], "nothing changed: the page stood still"
            assert after[1] == shown[1]
            assert 0 < (app.sent - before) / seconds < 30_000
            assert shifts * 60 / seconds < 0.1


async def test_the_focus_stays_on_its_job_and_the_log_stands_still(large: Portal) -> None:
    async with serving(large.app) as url, opened(url) as page, busy(large):
        for link in ("#running tr:nth-child(3) a", "#queue tr:nth-child(2) a", "#log li:nth-child(4) a"):
            await page.locator(link).first.focus()
            focused = "[document.activeElement.getAttribute('href'), document.activeElement.closest('[id]').id]"
            text = "[...document.querySelectorAll('#log li')].map((line) => line.id).join()"
            before, log = await page.evaluate(focused), await page.evaluate(text)
            for _ in range(12):
                await page.wait_for_timeout(500)
                assert await page.evaluate(focused) == before
                assert await page.evaluate(text) == log
        await expect(page.locator("#new-log")).to_be_visible()
        await page.locator("#new-log").click()
        assert await page.evaluate(text) != log
