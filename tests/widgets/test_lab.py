"""Widget and outputs in a real JupyterLab, light and dark, in a real Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from browser import chromium
from lab_server import READY, lab_server, notebook_file
from makeway import blocks, teams, view
from makeway_api.client import Client
from makeway_api.models import JobRequest, Usage
from playwright.sync_api import Locator, Page, expect
from samples import NOW, job, team

from .conftest import Portal, cleaned

TRAIN = """%%train --profile gpu2 --name "<b>digits</b>"
import time
time.sleep(600)"""
CELLS = [
    "%load_ext makeway\nimport makeway\nmakeway.usage()",
    "%gpus",
    TRAIN,
    "%jobs -n 3",
    "%%train --profile gpu9\n1",
]


@pytest.fixture(scope="module")
def lab(portal: Portal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "story.ipynb").write_text(notebook_file(CELLS))
    with lab_server(folder, portal.url, "ana") as address:
        yield address


@pytest.fixture
def page(lab: str) -> Iterator[Page]:
    with chromium() as browser:
        shown = browser.new_page(viewport={"width": 1280, "height": 1500})
        shown.set_default_timeout(90_000)  # for the first load on a busy machine
        shown.goto(f"{lab}lab/tree/story.ipynb?token=t")
        yield shown


def choose_theme(page: Page, name: str) -> None:
    page.evaluate(f"window.jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {name}'}})")
    page.wait_for_function(f"document.body.dataset.jpThemeLight === '{str(name == 'Light').lower()}'")
    page.wait_for_function("!document.querySelector('#jupyterlab-splash')")


def run_all(page: Page) -> None:
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.covers("N13", "N10")
def test_widget_and_outputs_in_jupyterlab(page: Page, ana: Client, bo: Client, pictures: Path | None) -> None:
    for _ in range(2):
        bo.submit(JobRequest(name="bo's sweep", profile="gpu3", command=["sleep", "600"]))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    page.evaluate(READY)
    run_all(page)
    widget = page.locator(".jp-OutputArea").first  # of the first cell: all parts of its output
    expect(widget.get_by_text("<b>digits</b>").first).to_be_visible(timeout=120_000)
    error = page.locator(".jp-RenderedText pre")
    expect(error.filter(has_text="there is no profile 'gpu9'")).to_be_visible()
    assert page.locator("text=Traceback").count() == 0
    cell = "import time\ntime.sleep(600)"
    ana.submit(JobRequest(name="lr sweep", profile="gpu2", command=["sleep", "600"], source=cell))
    ana.submit(JobRequest(name="waits", profile="gpu8", command=["sleep", "600"]))
    ana.submit(JobRequest(name="came later", profile="gpu3", command=["sleep", "600"]))
    expect(widget.get_by_text("came later").first).to_be_visible(timeout=30_000)
    for theme in ("Light", "Dark"):
        choose_theme(page, theme)
        colour = colour_of(widget.locator(".makeway").first)
        assert brightness(colour) < 128 if theme == "Light" else brightness(colour) > 128
        page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
        if pictures:
            page.screenshot(path=pictures / f"widget-{theme.lower()}.png")


def colour_of(widget: Locator) -> str:
    """Return the colour of a widget's text; one that is drawn again in between has none."""
    for _ in range(50):
        colour: str = widget.evaluate("node => getComputedStyle(node).color")
        if colour:
            return colour
        widget.page.wait_for_timeout(100)
    raise AssertionError("the widget has no colour")


def brightness(colour: str) -> float:
    """Return the mean of rgb(…), 0 to 255."""
    parts = [float(x) for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(parts) / 3


CARD = """%%train --profile gpu1 --name "short one"
import time
time.sleep(1)"""


@pytest.fixture(scope="module")
def short(lab: str, portal: Portal) -> Iterator[str]:
    """Write a notebook with one card beside the others; return the address of the server."""
    cells = ["%load_ext makeway\nimport makeway", CARD, "makeway.usage()", "%jobs -n 1"]
    body = {"type": "notebook", "format": "json", "content": json.loads(notebook_file(cells))}
    httpx2.put(f"{lab}api/contents/short.ipynb?token=t", json=body).raise_for_status()
    with cleaned(portal, "ana"):
        yield lab


RUN_ALL = "window.jupyterapp.commands.execute('notebook:run-all-cells')"
RUN = {
    "lab": ("lab/workspaces/short/tree/short.ipynb", READY, RUN_ALL),
    "notebook 7": ("notebooks/short.ipynb", READY, RUN_ALL),
    "nbclassic": (
        "nbclassic/notebooks/short.ipynb",
        "async () => { while (!(window.Jupyter && Jupyter.notebook && Jupyter.notebook.kernel"
        " && Jupyter.notebook.kernel.is_connected())) await new Promise(done => setTimeout(done, 100)) }",
        "Jupyter.notebook.execute_all_cells()",
    ),
}


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.covers("N13", "N10")
@pytest.mark.parametrize("front_end", RUN)
def test_a_card_follows_its_job_in_a_browser(front_end: str, short: str, pictures: Path | None) -> None:
    path, ready, run = RUN[front_end]
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1200})
        page.goto(f"{short}{path}?token=t", timeout=120_000)
        page.wait_for_selector(".jp-Notebook .jp-Cell, #notebook-container .cell", timeout=120_000)
        page.evaluate(ready)
        page.evaluate(run)
        expect(page.get_by_text("Final state").first).to_be_visible(timeout=60_000)
        expect(page.get_by_text("short one").first).to_be_visible()
        assert page.get_by_text("succeeded").count() >= 1
        assert page.get_by_text("Connecting").count() == 0
        if pictures:
            page.screenshot(path=pictures / f"card-{front_end.replace(' ', '-')}.png")


@pytest.mark.slow
@pytest.mark.browser
def test_a_page_of_voila_shows_the_first_picture(short: str) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{short}voila/render/short.ipynb?token=t", timeout=120_000)
        expect(page.get_by_text("short one").first).to_be_visible(timeout=120_000)
        expect(page.get_by_text("R&D").first).to_be_visible()
        assert page.get_by_text("Connecting").count() == 0


@pytest.mark.slow
@pytest.mark.browser
def test_an_untrusted_notebook_reads_right(short: str, pictures: Path | None) -> None:
    """As another person gets it, and a second window opens it: nothing was run here, and nothing is trusted."""
    usage = teams.Picture(usage=Usage(at=NOW, teams=[team(free=1)], total=10, used=4, free=6), teams=("rnd",), at=NOW)
    shown = [*view.job_bundles(job(), NOW), *(blocks.bundle(part) for part in teams.live_parts(usage))]
    content = json.loads(notebook_file(["1"]))
    content["cells"][0]["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": data} for data in shown]
    body = {"type": "notebook", "format": "json", "content": content}
    httpx2.put(f"{short}api/contents/foreign.ipynb?token=t", json=body).raise_for_status()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto(f"{short}lab/workspaces/foreign/tree/foreign.ipynb?token=t", timeout=120_000)
        expect(page.get_by_text("mnist").first).to_be_visible(timeout=120_000)
        page.evaluate(READY)
        assert page.evaluate("window.jupyterapp.shell.currentWidget.content.model.cells.get(0).trusted") is False
        text = page.locator(".jp-OutputArea").first.inner_text()
        assert "▶ running" in text
        assert not re.search(r"free[.]?\d|RNDrnd", text)
        assert "font-family" not in text
        if pictures:
            page.screenshot(path=pictures / "untrusted.png")


REPORTING = """%%train --profile gpu1 --name "read me"
import time
from makeway import checkpoint
for step in checkpoint.loop(100_000):
    checkpoint.report(loss=1 / (step + 1))
    print("line", step)
    time.sleep(0.2)"""


@contextmanager
def opened(short: str, name: str, cells: list[str], width: int) -> Iterator[Page]:
    """Yield a window of JupyterLab of this width on a new notebook whose cells have been started."""
    body = {"type": "notebook", "format": "json", "content": json.loads(notebook_file(cells))}
    httpx2.put(f"{short}api/contents/{name}.ipynb?token=t", json=body).raise_for_status()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 1200})
        page.goto(f"{short}lab/workspaces/{name}/tree/{name}.ipynb?token=t", timeout=120_000)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        page.evaluate(READY)
        page.evaluate(f"void {RUN_ALL}")  # without waiting for its end
        yield page


def selected(page: Page) -> str:
    text: str = page.evaluate("getSelection().toString().trim()")
    return text


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.covers("N13")
def test_selected_text_of_a_card_stays_while_its_progress_changes(short: str) -> None:
    with opened(short, "selected", ["%load_ext makeway", REPORTING], 1280) as page:
        card = page.locator(".jp-CodeCell").nth(1).locator(".jp-OutputArea-output")
        expect(card.filter(has_text="▶ running")).to_be_visible(timeout=60_000)
        progress = card.get_by_text(re.compile(r"^Step \d+"))
        expect(progress).to_be_visible(timeout=60_000)
        card.get_by_text("owner ana").click(click_count=3)
        chosen = selected(page)
        assert "owner ana" in chosen
        for _ in range(3):
            before = progress.inner_text()
            expect(progress).not_to_have_text(before, timeout=60_000)
            assert selected(page) == chosen


CUT = """() => {
  const result = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    if (!node.parentElement.closest('.makeway') || !node.data.trim()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      for (let over = node.parentElement, right = box.right; over; over = over.parentElement) {
        const style = getComputedStyle(over), edge = over.getBoundingClientRect().right;
        if (right <= edge + 1) continue;
        if (['auto', 'scroll'].includes(style.overflowX)) right = edge;
        else if (['hidden', 'clip'].includes(style.overflowX) || over === document.body) {
          result.push(node.data.trim());
          break;
        }
      }
    }
  }
  return result;
}"""
"""Returns the texts of our outputs that are cut off and that no scroll bar brings into sight."""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.covers("N13")
def test_nothing_of_the_outputs_is_cut_off_in_a_window_620_pixels_wide(
    short: str, ana: Client, pictures: Path | None
) -> None:
    for n in range(2):
        name = f"a sweep with a long name of its own, number {n}"
        ana.submit(JobRequest(name=name, profile="gpu3", command=["true"]))
    cells = ["%load_ext makeway\nimport makeway\nmakeway.usage()", REPORTING, "%jobs -n 3", "%gpus"]
    with opened(short, "narrow", cells, 620) as page:
        expect(page.get_by_text(re.compile(r"^Step \d+")).first).to_be_visible(timeout=60_000)
        outputs = page.locator(".jp-CodeCell .makeway")
        for cell in range(4):
            output = page.locator(".jp-CodeCell").nth(cell).locator(".makeway").first
            output.scroll_into_view_if_needed()
            expect(output).to_be_visible()
        assert outputs.count() >= 5
        assert page.evaluate(CUT) == []
        wide = "nodes => nodes.filter(n => n.scrollWidth > n.clientWidth + 1 && !n.querySelector('table')).length"
        assert outputs.evaluate_all(wide) == 0, "text wraps"
        if pictures:
            page.screenshot(path=pictures / "narrow.png")
