"""Two windows of a collaborative session, with jupyter-collaboration, show the same card."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import set_up
from browser import chromium
from lab_server import READY, lab_server, notebook_file
from playwright.sync_api import Browser, Page, expect

from .conftest import Portal, cleaned

PROJECT = Path("tests/widgets/collaboration")
WAIT = """import pathlib, time
while not pathlib.Path({go!r}).exists():
    time.sleep(0.05)"""
CARD = f"""%%train --profile gpu1 --name "shared one"
{WAIT}"""

CARDS_ABOVE_TEXT = """for name in ("first of two", "second of two"):
    display(makeway.submit({wait!r}, name=name, profile="gpu1"))
print("below the cards")"""


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the Python of an environment with jupyter-collaboration; skip without it, with CI set fail."""
    setup = set_up.SetUp(set_up.ROOT)
    try:
        with setup.one_at_a_time():
            return setup.other_environment(PROJECT, "collaboration")
    except set_up.SetUpProblem as problem:
        pytest.fail(str(problem)) if os.environ.get("CI") else pytest.skip(str(problem))


@pytest.fixture
def lab(portal: Portal, python: Path, tmp_path: Path) -> Iterator[str]:
    go = str(tmp_path / "go")
    for name, cell in {
        "shared": CARD.format(go=go),
        "above": CARDS_ABOVE_TEXT.format(wait=WAIT.format(go=go)),
    }.items():
        (tmp_path / f"{name}.ipynb").write_text(notebook_file(["%load_ext makeway\nimport makeway", cell]))
    (located,) = python.parents[1].glob("lib/python3*/site-packages/jupyter_server_ydoc")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / located.name).symlink_to(located)  # the kernel is expected to have it, too
    modules = str(tmp_path / "modules")
    with cleaned(portal, "ana"), lab_server(tmp_path, portal.url, "ana", python, PYTHONPATH=modules) as address:
        yield address


def window(browser: Browser, lab: str, name: str = "shared") -> Page:
    """Open a notebook as another person."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.set_default_timeout(90_000)  # for the first load of JupyterLab on a busy machine
    page.goto(f"{lab}lab/workspaces/{name}/tree/{name}.ipynb?token=t")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    page.evaluate(READY)
    return page


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.covers("N13")
def test_a_second_window_of_a_collaborative_session_follows_the_card(
    lab: str, tmp_path: Path, pictures: Path | None
) -> None:
    with chromium() as browser:
        first, second = window(browser, lab), window(browser, lab)
        first.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        for page in (first, second):
            expect(page.get_by_text("shared one").first).to_be_visible(timeout=60_000)
            expect(page.get_by_text("▶ running").first).to_be_visible(timeout=60_000)
        (tmp_path / "go").touch()
        for page in (first, second):
            expect(page.get_by_text("Final state")).to_have_count(1, timeout=60_000)
            expect(page.get_by_text("succeeded").first).to_be_visible()
            assert page.get_by_text("Connecting").count() == 0
        late = window(browser, lab)
        expect(late.get_by_text("Final state")).to_have_count(1, timeout=60_000)
        if pictures:
            second.screenshot(path=pictures / "collaboration.png")


def order(page: Page) -> list[str]:
    """Return what stands below the last cell, from the top."""
    text = page.locator(".jp-CodeCell").last.locator(".jp-OutputArea").first.inner_text()
    words = ("first of two", "second of two", "below the cards")
    located = [(place.start(), word) for word in words for place in re.finditer(f"(?m)^.{{0,3}}{word}", text)]
    return [word for _, word in sorted(located)]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.covers("N13")
def test_cards_that_are_not_the_last_output_of_their_cell_keep_their_order_in_all_windows(
    lab: str, tmp_path: Path, pictures: Path | None
) -> None:
    """An output that is updated is moved to the end of its cell there, and the next update replaces another one."""
    with chromium() as browser:
        first, second = window(browser, lab, "above"), window(browser, lab, "above")
        first.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        for page in (first, second):
            expect(page.get_by_text("▶ running")).to_have_count(2, timeout=60_000)
        (tmp_path / "go").touch()
        for page in (first, second):
            expect(page.get_by_text("Final state")).to_have_count(2, timeout=60_000)
        if pictures:
            second.screenshot(path=pictures / "collaboration-order.png")
        assert sorted(order(first)) == ["below the cards", "first of two", "second of two"]
        assert order(second) == order(first)
        late = window(browser, lab, "above")
        expect(late.get_by_text("Final state")).to_have_count(2, timeout=60_000)
        assert order(late) == order(first)
