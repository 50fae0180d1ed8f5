"""Names that are long, alike or read from the right, and many of them, on the pages."""

from __future__ import annotations

import time

import pytest
from makeway.blocks import Chip, Table, bundle
from makeway_quota.web.pages.render import sentence
from playwright.async_api import Page, expect
from web.portal import EVIL, PREFIX, Portal
from web.test_browser import page, url
from web.test_deployments import CLOUD, launch, saved
from web.test_pages import check, words

__all__ = ["page", "url"]

ARABIC = "مرحبا بكم"


def test_a_name_that_is_read_from_the_right_is_isolated_in_a_sentence_and_the_rest_is_escaped() -> None:
    assert sentence(f"ana submits {ARABIC}: 1 GPU") == f"ana submits <bdi>{ARABIC}</bdi>: 1 GPU"
    assert sentence(f"{ARABIC}<b>") == f"<bdi>{ARABIC}</bdi>&lt;b&gt;"
    assert sentence("R&D uses 9 GPUs") == "R&amp;D uses 9 GPUs"


async def test_deployments_with_the_same_title_are_told_apart_by_their_names(web: Portal) -> None:
    for name in ("cloud", "cloud-2"):
        await saved(web, CLOUD.replace("cloud", name) + f"title: {EVIL!r}\n".replace("\\'", "''"))
    browser = await web.browser("root")
    listed = words(check(await browser.get(f"{PREFIX}deployments")))
    assert f"{EVIL} cloud " in listed
    assert f"{EVIL} cloud-2 " in listed
    assert f"{EVIL} cloud-2 " in words(check(await browser.get(f"{PREFIX}deployments/cloud-2")))


@pytest.mark.browser
async def test_numbers_stay_behind_a_name_that_is_read_from_the_right(web: Portal, url: str, page: Page) -> None:
    await web.running_job(ARABIC)
    await page.goto(f"{url}{PREFIX}?login_token=root")
    at = """([text, part]) => {
      const element = [...document.querySelectorAll('.mw-log-text')].find((one) => one.textContent.startsWith(text));
      const nodes = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
      for (let node; (node = nodes.nextNode()); ) {
        const at = node.data.indexOf(part);
        if (at < 0) continue;
        const range = document.createRange();
        range.setStart(node, at);
        range.setEnd(node, at + part.length);
        return range.getBoundingClientRect().left;
      }
    }"""
    await expect(page.locator(".mw-log-text", has_text="ana submits")).to_be_visible()
    where = [await page.evaluate(at, ["ana submits", part]) for part in ("ana", "مرحبا", "3", "GPUs")]
    assert where == sorted(where), where


@pytest.mark.browser
async def test_fifty_deployments_and_two_hundred_machines_fit_a_wide_and_a_narrow_window(
    web: Portal, url: str, page: Page
) -> None:
    long = "n" * 63
    for name in (long, "cloud", *(f"d-{n}" for n in range(48))):
        await saved(web, CLOUD.replace("name: cloud ", f"name: {name} "))
    now = web.services.context.clock()
    ids = [f"m-{n:04}" for n in range(200)]
    launch(web, *ids, revision=1, type="gpu-2", state="booting", requested_at=now, state_since=now, price=3_100_000)
    await page.goto(f"{url}{PREFIX}?login_token=root")
    for path, rows in (("deployments", 50), ("deployments/cloud", 200)):
        began = time.monotonic()
        await page.goto(f"{url}{PREFIX}{path}")
        await expect(page.locator(".mw-table tbody tr")).to_have_count(rows)
        assert time.monotonic() - began < 5
        for width in (1280, 620):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            broken = """(wide) => [...document.querySelectorAll('td.text-end')].flatMap((cell) => {
              const nodes = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
              for (let node; (node = nodes.nextNode()); ) {
                const at = node.data.indexOf('EUR');
                if (at < 0) continue;
                const range = document.createRange();
                range.setStart(node, at);
                range.setEnd(node, at + 3);
                if (range.getClientRects().length > 1) return [cell.textContent.trim()];
              }
              return [];
            })"""
            assert await page.evaluate(broken) == []


@pytest.mark.browser
async def test_a_long_name_does_not_push_why_a_job_waits_out_of_a_notebook(page: Page) -> None:
    name = "x" * 60
    rows = [("j-1", name, Chip("waiting"), "1", f"“{name}” waits for a machine.")]
    output = bundle([Table(("ID", "Name", "State", "GPUs", "Why"), rows, frozenset({3}))])["text/html"]
    await page.set_content(f'<div id="cell" style="width:700px">{output}</div>')
    wide = "document.querySelector('#cell > *').scrollWidth"
    assert await page.evaluate(wide) <= 700
    state = await page.get_by_text("waiting", exact=True).bounding_box()
    assert state is not None
    assert state["height"] < 30, "a short word stays whole"
