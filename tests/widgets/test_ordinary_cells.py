"""Ordinary cells give one result in a notebook, with `--local` and as jobs, or are refused at their submission."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from makeway_api.client import Client
from notebook import EngineView, Notebook

from .conftest import Portal, cleaned

FILE = Path(__file__).with_name("cells.md")
BLOCK = re.compile(r"```python (\w+)([^\n]*)\n(.*?)```\n", re.DOTALL)
FACT = re.compile(r"^(Result|Prints|Raises|Ends|Refused|Notebook): `(.*)`$", re.MULTILINE)
KEEP = "import makeway\n_jobs, _own = {}, set()\n_own |= set(globals())"
PATIENCE = 600.0
"""Seconds, much too long, for one cell."""
FORGET = "for _name in set(globals()) - _own:\n    del globals()[_name]"


@dataclass(frozen=True)
class OrdinaryCell:
    """A cell of the file: what its notebook has run before, its options, and what comes of it."""

    title: str
    source: str
    options: str = ""
    before: str = ""
    facts: dict[str, str] = field(default_factory=dict)


def read() -> list[OrdinaryCell]:
    result = []
    for part in re.split(r"^### ", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        blocks = {kind: (options.strip(), source) for kind, options, source in BLOCK.findall(part)}
        facts = {name: text.replace("``", "`") for name, text in FACT.findall(part)}
        options, source = blocks["job"]
        result.append(OrdinaryCell(part.splitlines()[0], source, options, blocks.get("notebook", ("", ""))[1], facts))
    return result


CELLS = read()


class Bench:
    """One kernel for all cells; the jobs are submitted before any result is awaited, so that they run meanwhile."""

    def __init__(self, notebook: Notebook, cells: list[OrdinaryCell]) -> None:
        self.notebook = notebook
        self.submitted: dict[str, EngineView] = {}
        notebook.run(KEEP)
        for cell in cells:
            self._prepare(cell)
            line = f"%%train --profile gpu1 --name {cell.title.replace(' ', '-')!r} {cell.options}"
            self.submitted[cell.title] = notebook.run(f"{line}\n{cell.source}")
            notebook.run(f"_jobs[{cell.title!r}] = _")

    def job(self, cell: OrdinaryCell) -> tuple[EngineView, str]:
        """Return the outcome of the job, and its log."""
        self.notebook.run(f"mine = _jobs[{cell.title!r}]\nmine.wait(quiet=True)", PATIENCE)
        log = self.notebook.run("print(mine.logs())").out
        return self.notebook.run("mine.result()"), log

    def local(self, cell: OrdinaryCell) -> EngineView:
        """Run the cell with `--local`."""
        self._prepare(cell)
        return self.notebook.run(f"%%train --local {cell.options}\n{cell.source}", PATIENCE)

    def plain(self, cell: OrdinaryCell) -> EngineView:
        """Run the cell as it is."""
        self._prepare(cell)
        return self.notebook.run(cell.source, PATIENCE)

    def _prepare(self, cell: OrdinaryCell) -> None:
        self.notebook.run(FORGET)
        if cell.before:
            shown = self.notebook.run(cell.before)
            assert shown.error is None, shown.trouble


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, portal: Portal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    wanted = [
        item.callspec.params["cell"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    with cleaned(portal, "ana"):
        notebook = Notebook(tmp_path_factory.mktemp("cells"), MAKEWAY_URL=portal.url, JUPYTERHUB_API_TOKEN="ana")
        try:
            assert notebook.run("%load_ext makeway").error is None
            yield Bench(notebook, wanted)
        finally:
            notebook.close()


def test_there_are_enough_cells_and_each_says_what_comes_of_it() -> None:
    assert len(CELLS) >= 60
    assert len({cell.title for cell in CELLS}) == len(CELLS)
    assert not [cell.title for cell in CELLS if not cell.facts]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.title.replace(" ", "-"))
def test_a_cell_is_the_same_program_everywhere(bench: Bench, service: Client, cell: OrdinaryCell) -> None:
    facts, submitted = cell.facts, bench.submitted[cell.title]
    if "Refused" in facts:
        assert bench.plain(cell).error is None
        for shown in (submitted, bench.local(cell)):
            assert shown.error is not None
            assert facts["Refused"] in shown.trouble
        return
    assert submitted.error is None, submitted.trouble
    local = bench.local(cell)
    plain = bench.plain(cell) if "Notebook" not in facts else None
    job, log = bench.job(cell)
    if plain is not None and "Ends" not in facts:
        assert plain.error is None or plain.error[0] == facts["Raises"], plain.trouble
        assert (plain.error is None) == ("Raises" not in facts)
    for shown in (local, job):
        if end := facts.get("Raises") or facts.get("Ends"):
            assert shown.error is not None
            assert shown.error[0] == "JobError"
            assert end in shown.trouble
        else:
            assert shown.error is None, f"{shown.trouble}\n{log}"
    if "Result" in facts:
        expected = "" if facts["Result"] == "None" else facts["Result"]
        assert [shown.text for shown in (plain or job, local, job)] == [expected] * 3
    elif not facts.keys() & {"Raises", "Ends"} and plain is not None:
        assert local.text == job.text
    if line := facts.get("Prints"):
        assert line in local.out
        assert line in log
        assert plain is None or line in plain.out + plain.err + plain.text + plain.trouble


@pytest.fixture
def service(portal: Portal) -> Iterator[Client]:
    with portal.client("ana") as client:
        yield client
