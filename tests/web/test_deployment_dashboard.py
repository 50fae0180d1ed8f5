"""In a real Chromium: the dashboard of a deployment shows each change within five seconds, to everybody."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autoscale.fleet import machine
from axe import AXE
from makeway_quota.autoscale.step import MachineChanges
from playwright.async_api import Locator, Page, expect
from web.portal import PREFIX, Portal
from web.test_browser import page, url
from web.test_deployments import launch, saved, store_of

__all__ = ["page", "url"]

pytestmark = pytest.mark.browser

PROMISED = 5.0
"""Seconds within which a change is on the page"""
PANELS = ("idle", "queues", "running", "lines", "log")


def change(web: Portal, id: str, **values: Any) -> None:
    """Commit another state of a machine, as the leader does."""
    [row] = [one for one in store_of(web).machines.live() if one.id == id]
    now = web.services.context.clock()
    changed = replace(row, **({"state_since": now} if "state" in values else {}) | values)
    term = web.run.service.components.leader.term or 0
    assert store_of(web).machines.commit("cloud", term, MachineChanges(changed=(changed,)))


async def dashboard(web: Portal, url: str, page: Page) -> None:
    await saved(web)
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await page.goto(f"{url}{PREFIX}deployments/cloud")
    await expect(page.locator("#mw-live")).to_have_text("live", timeout=60_000)
    await page.evaluate("window.same = true")


def started(web: Portal, *ids: str, **values: Any) -> None:
    now = web.services.context.clock()
    launch(web, *ids, revision=1, type="gpu-2", requested_at=now, state_since=now, **values)


@pytest.mark.covers("F56")
async def test_each_panel_shows_a_change_within_five_seconds(web: Portal, url: str, page: Page) -> None:
    await dashboard(web, url, page)
    panel = {name: page.locator(f"section[aria-labelledby=h-{name}]") for name in PANELS}
    waits: dict[str, float] = {}

    async def shown(what: str, act: Callable[[], Awaitable[Any]], where: Locator, text: str) -> None:
        began = time.monotonic()
        await act()
        await expect(where).to_contain_text(re.compile(text, re.DOTALL), timeout=20_000)
        waits[what] = time.monotonic() - began

    async def commit(id: str, **values: Any) -> None:
        change(web, id, **values)

    async def request() -> None:
        started(web, "m-1")

    await shown("a launch", request, panel["running"], r"Running machines\s+1\s.*m-1")
    await expect(panel["log"]).to_contain_text("gpu-2, a, on demand")
    await shown("a boot", lambda: commit("m-1", state="booting", instance="i-7"), panel["log"], r"instance i-7")
    await shown("idleness", lambda: commit("m-1", state="ready", attempts=0), panel["idle"], r"machines\s+1\s.*m-1")
    await shown("work", lambda: commit("m-1", attempts=1), panel["running"], r"machines\s+1\s.*m-1")
    for name in ("patient", "queued"):
        submitted = lambda name=name: web.run.submit("ana", name, profile="gpu3", workers=4)  # noqa: E731
        await shown(f"the task {name}", submitted, panel["queues"], rf"R&D / 3 GPUs\s+.*{name}")
    await expect(panel["queues"]).to_contain_text(re.compile(r"2 waiting"))
    ended = lambda: commit("m-1", state="terminating", reason="idle")  # noqa: E731
    await shown("an end", ended, panel["log"], "It had no work for the whole of idle_timeout")
    gone = lambda: commit("m-1", state="gone")  # noqa: E731
    await shown("that it is gone", gone, panel["running"], r"machines\s+0")
    # The lines are sampled: they may miss a machine that was there for less than a step.
    chart = page.get_by_role("img", name=re.compile("state: no machines; 2 jobs and notebooks wait now, [01] at most"))
    await expect(chart).to_be_visible()
    assert await page.evaluate("window.same"), "the page was never loaded again"
    assert {what: wait for what, wait in waits.items() if wait >= PROMISED} == {}, waits


@pytest.mark.covers("F56")
async def test_the_panels_have_their_places_on_wide_and_narrow_screens(web: Portal, url: str, page: Page) -> None:
    await dashboard(web, url, page)
    started(web, "m-idle", state="ready", attempts=0)
    started(web, "m-busy", state="ready", attempts=2)
    await expect(page.locator("#h-idle")).to_have_text("Idle machines 1")

    async def places() -> dict[str, tuple[float, float]]:
        boxes = {name: await page.locator(f"section[aria-labelledby=h-{name}]").bounding_box() for name in PANELS}
        return {name: (round(box["x"]), round(box["y"])) for name, box in boxes.items() if box}

    await page.set_viewport_size({"width": 1280, "height": 900})
    wide = await places()
    assert wide["idle"][1] == wide["queues"][1]
    assert wide["idle"][0] < wide["queues"][0], "idle machines at the top left"
    assert wide["idle"][1] < wide["running"][1] < wide["lines"][1] < wide["log"][1], "running in the middle, log last"
    await page.set_viewport_size({"width": 390, "height": 900})
    narrow = await places()
    assert len({x for x, _ in narrow.values()}) == 1
    assert sorted(PANELS, key=lambda name: narrow[name][1]) == list(PANELS)
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    charts = page.locator("#mw-chart canvas")
    await expect(charts).to_have_count(2)
    assert await charts.evaluate_all("all => all.every(one => one.getBoundingClientRect().right <= innerWidth)")


@pytest.mark.covers("F56")
async def test_the_lines_are_read_with_the_keyboard_and_survive_a_refresh_and_a_change_of_theme(
    web: Portal, url: str, page: Page, tmp_path: Path
) -> None:
    await dashboard(web, url, page)
    started(web, "m-1", state="ready", attempts=0)
    chart = page.get_by_role("img", name=re.compile("Machines by state: 1 ready"))
    await expect(chart).to_be_visible()
    await page.locator("#h-lines").scroll_into_view_if_needed()
    await chart.focus()
    told = page.locator("#mw-chart").get_by_role("status")
    await page.keyboard.press("End")
    await expect(told).to_have_text(re.compile(r"^\d\d:\d\d:\d\d: 1 ready; 0 jobs and notebooks wait$"))
    await page.keyboard.press("Home")
    await expect(told).to_have_text(re.compile(r": no machines$"))
    started(web, "m-2", state="ready", attempts=0)
    await expect(page.get_by_role("img", name=re.compile("2 ready"))).to_be_focused()
    await expect(told).to_have_text(re.compile(r": no machines$"))
    before = await page.locator("#mw-chart canvas").first.screenshot()
    await page.locator("#dark-theme-toggle").click()
    await expect(page.locator("html")).to_have_attribute("data-bs-theme", "dark")
    await expect(page.locator("#mw-chart canvas")).to_have_count(2)
    assert before != await page.locator("#mw-chart canvas").first.screenshot()


@pytest.mark.covers("F56")
async def test_a_screen_reader_meets_no_obstacle_in_either_theme(
    web: Portal, url: str, page: Page, tmp_path: Path
) -> None:
    await dashboard(web, url, page)
    now = web.services.context.clock()
    for number in range(6):
        row = machine(id=f"m-{number}", deployment="cloud", type="gpu-2", price=3_100_000, requested_at=now - 3000)
        states = ("requested", "booting", "joining", "ready", "draining", "terminating")[: number + 1]
        term = web.run.service.components.leader.term or 0
        for step, state in enumerate(states):
            row = replace(row, state=state, state_since=now - 3000 + 400 * step + 60 * number)
            new = MachineChanges((row,), revision=1) if not step else MachineChanges(changed=(row,))
            assert store_of(web).machines.commit("cloud", term, new)
            [row] = [one for one in store_of(web).machines.live() if one.id == row.id]
    started(web, "m-idle", state="ready", attempts=0)
    for name in ("patient", "sweep 1", "sweep 2", "sweep 3", "sweep 4"):
        await web.run.submit("ana", name, profile="gpu3", workers=4)
    await expect(page.locator("#h-queues")).to_contain_text("5 waiting")
    assert page.context.browser is not None
    for theme in ("light", "dark"):
        for width in (1280, 390):
            other = await page.context.browser.new_page(color_scheme=theme, viewport={"width": width, "height": 900})
            await other.goto(f"{url}{PREFIX}?login_token=root")
            await other.goto(f"{url}{PREFIX}deployments/cloud")
            await expect(other.locator("html")).to_have_attribute("data-bs-theme", theme)
            await expect(other.locator("#mw-chart canvas")).to_have_count(2)
            await other.screenshot(path=tmp_path / f"{theme}-{width}.png", full_page=True)
            await other.evaluate(AXE.read_text(encoding="utf-8"))
            result = await other.evaluate("() => axe.run(document.querySelector('main'))")
            assert [(rule["id"], [one["html"][:120] for one in rule["nodes"]]) for rule in result["violations"]] == []
            await other.close()
