"""Several tabs of one browser: one event stream for all, handed over, closed when hidden, not shared by logins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from playwright.async_api import BrowserContext, Page, async_playwright, expect
from web.portal import API, PEOPLE, PREFIX, Portal, serving
from web.test_browser import QUIET

expect.set_options(timeout=30_000)

pytestmark = pytest.mark.browser

HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
"""What a browser does to a tab in the background; Playwright shows all of them"""
FREEZE = "document.dispatchEvent(new Event('freeze'))"
REQUEST = """async (url) => {
  const began = performance.now();
  await fetch(url, { headers: { "X-XSRFToken": document.querySelector("meta[name=makeway-xsrf]").content } });
  return performance.now() - began;
}"""

STREAMS = """{
  const Own = EventSource;
  const streams = (window.streams = new Set());
  window.EventSource = class extends Own {
    constructor(...all) { super(...all); streams.add(this); }
    close() { super.close(); streams.delete(this); }
  };
}"""
"""Keep the streams that a page has opened and not closed"""
HAS_STREAM = "[...window.streams].some((stream) => stream.readyState !== EventSource.CLOSED)"


@pytest.fixture
async def url(web: Portal) -> AsyncIterator[str]:
    async with serving(web.app) as address:
        yield address


@pytest.fixture
async def browser(url: str) -> AsyncIterator[BrowserContext]:
    """A browser in which root has logged in."""
    async with async_playwright() as driver:
        started = await driver.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        context = await started.new_context()
        await context.add_init_script(STREAMS)
        page = await context.new_page()
        await page.goto(f"{url}{PREFIX}?login_token=root")
        await page.close()
        yield context
        await started.close()


async def until(found: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def opened(browser: BrowserContext, url: str, *paths: str) -> list[Page]:
    """Open a tab for each path, and wait until each says that it is kept fresh."""
    pages = []
    for path in paths:
        page = await browser.new_page()
        await page.goto(f"{url}{PREFIX}{path}")
        pages.append(page)
    for page in pages:
        await expect(page.locator("#mw-live[data-state=on], #mw-live[data-state=list]")).to_have_count(1)
    return pages


async def with_the_stream(web: Portal, pages: list[Page], when: str) -> Page:
    """Return the only tab that has a stream, once no other one has it: for a moment two may lead."""
    deadline = time.monotonic() + 30.0
    while True:
        having = [page for page in pages if await page.evaluate(HAS_STREAM)]
        if len(having) == 1 and web.app.state.streams.open == 1:
            return having[0]
        assert time.monotonic() < deadline, f"{when}: {len(having)} of {len(pages)} tabs have a stream"
        await asyncio.sleep(0.05)


async def test_six_tabs_share_one_stream_and_block_no_request(web: Portal, url: str, browser: BrowserContext) -> None:
    id = await web.running_job("train")
    paths = ("", "", f"jobs/{id}", "teams/rnd", "nodes/virtual-1", "workloads?state=running")
    pages = await opened(browser, url, *paths)
    streams = web.app.state.streams
    await until(lambda: streams.open == 1, "one stream for all tabs")
    other = await web.running_job("other", profile="gpu1")
    for page in pages[:2]:
        await expect(page.locator(f"a.mw-cell[data-w='{other}']")).to_have_count(1)
    for page in pages:
        assert await page.evaluate(REQUEST, f"{url}{API}/me") < 1_000
    await web.services.jobs.cancel(PEOPLE["root"], id)
    await expect(pages[2].locator("#h-state")).to_contain_text("cancelled")
    await expect(pages[3].locator("#h-running")).to_have_text("Running 1")
    await expect(pages[4].locator("#h-running")).to_have_text("Running 1")
    assert streams.open == 1


async def test_another_tab_takes_over_from_one_that_closes_is_hidden_or_frozen(
    web: Portal, url: str, browser: BrowserContext
) -> None:
    pages = await opened(browser, url, "", "", "", "")
    for number, way in enumerate(("close", "hide", "freeze")):
        page = await with_the_stream(web, pages, f"before {way}")
        pages.remove(page)
        if way == "close":
            await page.close()
        elif way == "hide":
            await page.evaluate(HIDE, True)
        else:
            await page.evaluate(FREEZE)
        id = await web.running_job(f"job {number}", profile="gpu1")
        for other in pages:
            await expect(other.locator(f"a.mw-cell[data-w='{id}']")).to_have_count(1)
        if way != "close":
            assert not await page.evaluate(HAS_STREAM), f"after {way}"
        await with_the_stream(web, pages, f"after {way}")


async def test_hidden_tabs_have_no_stream_and_catch_up(web: Portal, url: str, browser: BrowserContext) -> None:
    pages = await opened(browser, url, "", "")
    for page in pages:
        await page.evaluate(HIDE, True)
    await until(lambda: web.app.state.streams.open == 0, "no stream for hidden tabs")
    id = await web.running_job("meanwhile")
    await pages[0].wait_for_timeout(1_500)
    assert await pages[0].locator(f"a.mw-cell[data-w='{id}']").count() == 0
    await pages[0].evaluate(HIDE, False)
    await expect(pages[0].locator(f"a.mw-cell[data-w='{id}']")).to_have_count(3)
    await expect(pages[0].locator("#mw-live")).to_have_text("live")


async def test_another_login_in_the_same_browser_hears_nothing_of_the_first(
    web: Portal, url: str, browser: BrowserContext
) -> None:
    """A tab of the administrator stays open while a member logs in: neither has the other's stream."""
    [first] = await opened(browser, url, "")
    second = await browser.new_page()
    await second.goto(f"{url}{PREFIX}?login_token=bo")
    await browser.clear_cookies()
    await second.goto(f"{url}{PREFIX}?login_token=bo")
    await expect(second.locator("#mw-live")).to_have_text("live")
    await until(lambda: web.app.state.streams.open == 2, "a stream for each login")
    assert await first.evaluate("document.querySelector('meta[name=makeway-xsrf]').content") != await second.evaluate(
        "document.querySelector('meta[name=makeway-xsrf]').content"
    )
    await web.running_job("of rnd")
    await expect(first.locator("#h-running")).to_have_text("Running 1")
    await second.wait_for_timeout(1_000)
    await expect(second.locator("#h-running")).to_have_text("Running 0")
    assert await second.locator("#log, #running").count() == 0
