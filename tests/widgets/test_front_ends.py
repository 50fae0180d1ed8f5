"""What outputs become in every front end that needs no browser; those with one are in test_lab.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert.exporters import Exporter, HTMLExporter, LatexExporter, MarkdownExporter, ScriptExporter
from nbconvert.preprocessors.sanitize import SanitizeHTML
from nbformat import NotebookNode
from traitlets.config import Config

from .conftest import Portal, cleaned

CELLS = [
    "%load_ext makeway\nimport makeway",
    "%%train --profile gpu1 --name 'digits of R&D'\n6 * 7",
    "usage = makeway.usage()\nusage",
    "makeway.jobs()[0].wait(quiet=True); None",
    "%gpus",
    "%jobs -n 3",
    "%quota",
]
SHOWN = ("succeeded", "digits of R&D", "team R&D", "My jobs", "You keep")
"""What a reader has to find of these cells"""
STYLE = re.compile(r"font-family|opacity:|[.#]mw-|\bpx;|\{\s*color")


@pytest.fixture(scope="module")
def environment(portal: Portal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKEWAY_", "JUPYTERHUB_", "PYTEST_"))}
    folder = str(tmp_path_factory.mktemp("front-ends"))
    with cleaned(portal, "ana"):
        yield {**clean, "MAKEWAY_URL": portal.url, "MAKEWAY_TOKEN": "ana", "IPYTHONDIR": folder}


@pytest.fixture(scope="module")
def saved(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """Return a notebook as nbclient, and so papermill, saves it after the last cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    folder = str(tmp_path_factory.mktemp("saved"))
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": folder}})
    return client.execute(env=environment)


def visible(html: str) -> str:
    """Return the text that a reader sees, without that of the page's own style sheets and scripts."""
    body = re.sub(r"(?s)<(style|script|head)\b.*?</\1>", "", html)
    return re.sub(r"[ \t]+", " ", unescape(re.sub(r"<[^>]*>", "", body)))


def exported(exporter: Exporter, notebook: NotebookNode) -> str:
    text, _ = exporter.from_notebook_node(notebook.copy())
    return str(text)


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.outputs]


def test_a_program_that_runs_notebooks_saves_the_last_state_of_a_card(saved: NotebookNode) -> None:
    """Such as nbclient, papermill and `nbconvert --execute`."""
    card = "".join(output.data["text/html"] for output in saved.cells[1].outputs)
    assert "succeeded" in card
    assert "Final state" in card
    assert "starting" not in card


def test_no_output_needs_a_widget_manager_or_says_that_it_connects(saved: NotebookNode) -> None:
    assert not [name for output in outputs(saved) for name in output.get("data", {}) if "widget" in name]
    assert "widgets" not in saved.metadata
    assert "Connecting" not in nbformat.writes(saved)


@pytest.mark.parametrize(
    "exporter",
    [
        pytest.param(HTMLExporter(), id="html"),
        pytest.param(HTMLExporter(template_name="classic"), id="classic html"),
        pytest.param(HTMLExporter(sanitize_html=True), id="sanitized html"),
        pytest.param(MarkdownExporter(), id="markdown"),
        pytest.param(LatexExporter(), id="latex"),
    ],
)
def test_an_export_says_everything_and_shows_no_styles(exporter: Exporter, saved: NotebookNode) -> None:
    text = exported(exporter, saved)
    if isinstance(exporter, LatexExporter):
        assert "\\begin{verbatim}\nJob j-" in text
        shown = text
    else:
        shown = visible(text).replace("<tbody>", "").replace("</tbody>", "")
    for words in SHOWN:
        assert words in shown, words
    assert "Connecting" not in shown
    if not isinstance(exporter, LatexExporter):
        assert not STYLE.search(shown.split("You keep")[0])
        assert "<div" not in shown, "no markup as text"


def test_a_notebook_that_is_stripped_of_markup_still_says_everything(saved: NotebookNode) -> None:
    notebook, _ = SanitizeHTML(enabled=True, strip=True).preprocess(saved.copy(), {})
    shown = visible("\n".join(output.data.get("text/html", "") for output in outputs(notebook)))
    for words in SHOWN[:3]:
        assert words in shown
    assert not STYLE.search(shown)
    assert not re.search(r"free[.]?\d|R&Drnd|Whyj-", shown), "words run together"


def test_a_script_has_the_cells_alone(saved: NotebookNode) -> None:
    text = exported(ScriptExporter(config=Config()), saved)
    assert "run_cell_magic('train'" in text
    assert "makeway-" not in text


def test_a_terminal_shows_text(environment: dict[str, str], tmp_path: Path) -> None:
    cells = "\n".join([
        "%load_ext makeway", "import makeway", "makeway.submit('1', profile='gpu1', name='typed')", "%gpus",
        "%jobs -n 1", "%quota", "makeway.usage()",
    ])  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "IPython",
        "--colors=NoColor",
        "--no-banner",
        "--simple-prompt",
        "--no-confirm-exit",
    ]
    done = subprocess.run(
        command, input=cells, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert "Job j-" in done.stdout
    assert "'typed': " in done.stdout
    assert "RESERVED" in done.stdout
    assert "My jobs" in done.stdout
    assert "This front end cannot update an output." in done.stdout
    assert not STYLE.search(done.stdout)
    assert "<div" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
