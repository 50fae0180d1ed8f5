"""Pages at a thousand nodes and thousands of workloads: small, with true counts, and a map that leads to a node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import async_playwright, expect
from web.large import NODES, large_portal
from web.portal import PREFIX, Portal, serving

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture
async def large(tmp_path: Path) -> AsyncIterator[Portal]:
    async with large_portal(tmp_path) as made:
        await made.run.converged()
        yield made


@pytest.mark.covers("N27")
async def test_the_panel_of_a_thousand_nodes(large: Portal) -> None:
    rows = (await large.run.service.components.world.rows()).values()
    waiting = sum(row.state == "pending" for row in rows)
    assert waiting > 6_000
    async with serving(large.app) as url, async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-background-networking"]
        )
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        answer = await page.goto(f"{url}{PREFIX}?login_token=root")
        assert answer is not None
        assert len(await answer.body()) < 200 * 1024
        assert await page.evaluate("document.querySelectorAll('*').length") < 2_500
        await expect(page.locator("#h-queue")).to_have_text(f"Queue {waiting:,}")

        heat = page.locator(".mw-heat")
        names = (await heat.get_attribute("data-nodes") or "").splitlines()
        assert len(names) == NODES
        columns, wide, tall = [
            int(await heat.get_attribute(f"data-{name}") or 0) for name in ("columns", "wide", "tall")
        ]
        scale = (await heat.bounding_box() or {})["width"] / (columns * wide)
        at = 2 * columns + 3
        place = {"x": (3 * wide + 4) * scale, "y": (2 * tall + 3) * scale}
        await heat.hover(position=place)
        await expect(page.locator("#mw-tip")).to_have_text(names[at])
        await heat.click(position=place)
        await expect(page.locator("h1")).to_have_text(names[at].split(" ")[0])

        await page.goto(f"{url}{PREFIX}")
        await heat.focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
            await page.keyboard.press(key)
        await expect(page.locator("h1")).to_have_text(names[columns + 1].split(" ")[0])

        await page.goto(f"{url}{PREFIX}")
        await page.get_by_role("link", name=f"All {waiting:,} waiting workloads").click()
        await page.get_by_label("Team").select_option("team07")
        await page.get_by_role("button", name="Filter").click()
        expected = sum(row.state == "pending" and row.team == "team07" for row in rows)
        await expect(page.locator("h1")).to_contain_text(f"Queue {expected:,}")
        await browser.close()
