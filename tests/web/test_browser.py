"""In a real Chromium: the panel follows what happens without a reload, nothing is refused by the content policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Page, Route, async_playwright, expect
from web.portal import EVIL, PEOPLE, PREFIX, Portal, serving

expect.set_options(timeout=30_000)  # news comes within a second, but not on a machine that runs other tests beside

pytestmark = pytest.mark.browser

VENDOR = Path(__file__).parents[2] / "quota_service/makeway_quota/web/static/vendor/htmx.min.js"
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture
async def url(web: Portal) -> AsyncIterator[str]:
    assert VENDOR.exists(), "run `make setup`: the page's scripts are missing"
    async with serving(web.app) as address:
        yield address


@pytest.fixture
async def page(url: str) -> AsyncIterator[Page]:
    """A page that fails the test when the browser complains or asks anybody else."""
    complaints: list[str] = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        page = await browser.new_page()
        page.set_default_timeout(90_000)  # a machine that runs other tests beside
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith((url, "data:")) else complaints.append(asked.url))
        yield page
        await browser.close()
    # the Hub with its logo is not there in this test, and a page that refuses something says so in its status
    allowed = ("responded with a status of 4", "ERR_INTERNET_DISCONNECTED")
    assert [text for text in complaints if not any(known in text for known in allowed)] == []


async def test_a_refused_event_stream_is_opened_again(url: str, page: Page) -> None:
    refused: list[str] = []

    async def answer(route: Route) -> None:
        if refused:
            await route.continue_()
        else:
            refused.append(route.request.url)
            await route.fulfill(status=429, body="")

    await page.route("**/api/v1/events?*", answer)
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await expect(page.locator("#mw-live")).to_have_text("reconnecting")
    await expect(page.locator("#mw-live")).to_have_text("live")
    assert len(refused) == 1


@pytest.mark.parametrize("path", ["", "teams/rnd", "nodes/virtual-1", "jobs/{id}"])
async def test_what_happens_before_the_stream_opens_is_shown(web: Portal, url: str, page: Page, path: str) -> None:
    """The job ends after the page was rendered, while its event stream is not open yet."""
    id = await web.running_job()
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await expect(page.locator("#mw-live")).to_have_text("live")
    opened: list[str] = []

    async def end_the_job(route: Route) -> None:
        if not opened:
            await web.services.jobs.cancel(PEOPLE["root"], id)
            await web.run.job(id, "cancelled")
        opened.append(route.request.url)
        await route.continue_()

    await page.route("**/api/v1/events?*", end_the_job)
    await page.goto(f"{url}{PREFIX}{path.format(id=id)}")
    if path.startswith("jobs/"):
        await expect(page.locator("#h-state")).to_contain_text("cancelled")
    else:
        await expect(page.locator("#h-running")).to_have_text("Running 0")
    assert len(opened) == 1


async def test_a_refresh_keeps_focus_tooltip_and_marks(web: Portal, url: str, page: Page) -> None:
    id = await web.running_job("train")
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await expect(page.locator("#mw-live")).to_have_text("live")
    await page.locator(f"a.mw-cell[data-w='{id}']").first.focus()
    await expect(page.locator(".mw-cell.same")).to_have_count(3)
    other = await web.running_job("other", profile="gpu1")
    await expect(page.locator(f"a.mw-cell[data-w='{other}']")).to_have_count(1)
    await expect(page.get_by_role("tooltip")).to_contain_text("R&D · ana: job train, running, in quota")
    await expect(page.locator(".mw-cell.same")).to_have_count(3)
    assert await page.evaluate("document.activeElement.dataset.w") == id

    await web.services.jobs.cancel(PEOPLE["root"], id)
    await expect(page.locator(f".mw-cell[data-w='{id}']")).to_have_count(0)
    await expect(page.locator(".mw-cell:focus")).to_have_count(1)
    await expect(page.get_by_role("tooltip")).to_contain_text("free")
    await expect(page.locator(".mw-cell.same")).to_have_count(0)


@pytest.mark.covers("F40", "N15")
async def test_the_panel_follows_without_a_reload(web: Portal, url: str, page: Page) -> None:
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await expect(page.locator("#mw-live")).to_have_text("live")
    await page.evaluate("window.same = true")
    await expect(page.locator("#h-queue")).to_have_text("Queue 0")
    first = await web.running_job(EVIL)
    await expect(page.locator(f"a.mw-cell[data-w='{first}']")).to_have_count(3)
    for number in range(3):
        await web.run.submit("ana", f"more {number}", profile="gpu3")
    await expect(page.locator("#h-queue")).to_have_text("Queue 1")
    await expect(page.locator(".mw-why")).to_contain_text("R&D uses 9 of its limit of 9 GPUs; this job needs 3.")
    await expect(page.locator(".mw-cell .over")).to_have_count(6)
    assert await page.evaluate("window.same")


async def test_cells_are_reached_by_keyboard_and_tell_their_story(web: Portal, url: str, page: Page) -> None:
    id = await web.running_job("train")
    await page.goto(f"{url}{PREFIX}?login_token=ana")
    await page.locator("a.mw-cell").first.focus()
    await expect(page.get_by_role("tooltip")).to_contain_text("R&D · ana: job train, running, in quota")
    await expect(page.locator(".mw-cell.same")).to_have_count(3)
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("tooltip")).to_be_hidden()
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(f"{url}{PREFIX}jobs/{id}")
    await expect(page.get_by_role("heading", level=1)).to_have_text("train")


async def test_the_output_of_a_job_is_followed(web: Portal, url: str, page: Page) -> None:
    id = await web.running_job("train")
    log = web.backend.attempts[(id, 1)].log
    log.extend(b"epoch 1\n")
    await page.goto(f"{url}{PREFIX}?login_token=ana")
    await page.goto(f"{url}{PREFIX}jobs/{id}")
    await expect(page.locator("#mw-output")).to_have_text("epoch 1\n")
    log.extend(f"epoch 2 {EVIL}\n".encode())
    await expect(page.locator("#mw-output")).to_contain_text(f"epoch 2 {EVIL}")
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.locator(".alert")).to_contain_text("The job is being cancelled.")
    await expect(page.locator("#h-state")).to_contain_text("cancelled")


async def test_dark_mode_and_a_narrow_screen(web: Portal, url: str, page: Page) -> None:
    await web.running_job("a-name-without-any-space-" * 6)
    await page.set_viewport_size({"width": 360, "height": 700})
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await page.get_by_role("button", name="Toggle navigation").click()
    toggle = page.get_by_role("button", name="Toggle dark mode")
    await toggle.click()
    theme = await page.evaluate("document.documentElement.dataset.bsTheme")
    await toggle.click()
    assert {theme, await page.evaluate("document.documentElement.dataset.bsTheme")} == {"dark", "light"}
    assert await page.evaluate("document.documentElement.scrollWidth") <= 360


async def test_a_mistake_in_the_policy_is_found_by_its_line(web: Portal, url: str, page: Page) -> None:
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await page.get_by_role("link", name="Policy").click()
    editor = page.get_by_label("The policy document, as YAML")
    text = await editor.input_value()
    await editor.fill(text.replace("reserved: 5", "reserved: 500", 1))
    await page.get_by_role("button", name="Preview").click()
    await page.locator("a[data-line]").first.click()
    chosen = await editor.evaluate("e => e.value.slice(e.selectionStart, e.selectionEnd)")
    assert "reserved: 500" in chosen


async def test_the_progress_of_a_job_is_followed_and_fits_a_telephone(web: Portal, url: str, page: Page) -> None:
    def report(step: int) -> None:
        points = [[n * 20, 2.0 / (n + 1)] for n in range(step // 20 + 1)]
        metrics = {"loss": points[-1][1], "validation/accuracy_of_the_ensemble": 0.91}
        given = {
            "step": step,
            "total": 2000,
            "rate": 2.5,
            "metrics": metrics,
            "curve": {"name": "loss", "points": points},
        }
        web.services.context.progress.note(id, 1, given)
        web.services.context.progress.write()

    id = await web.running_job("train")
    report(500)
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.goto(f"{url}{PREFIX}jobs/{id}?login_token=root")
    await expect(page.locator(".mw-steps")).to_contain_text("step 500 of 2,000, 10 min remaining")
    await page.evaluate("window.same = true")
    report(1000)
    await expect(page.locator(".mw-steps")).to_contain_text("step 1,000 of 2,000, 6 min 40 s remaining")
    await expect(page.locator(".mw-curve title")).to_contain_text("at step 1,000")
    assert await page.evaluate("window.same")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    await page.goto(f"{url}{PREFIX}")
    await expect(page.locator("#running .mw-steps")).to_contain_text("step 1,000 of 2,000")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
