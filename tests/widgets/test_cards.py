"""The card of a job stays up to date until its job ends, whatever becomes of the service, the token and the cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from makeway import cards, view
from makeway.feed import Feed, JobNews
from makeway.live import CELLS, Cells
from makeway_api.client import AsyncClient
from makeway_api.models import Job, Reason, State
from notebook import Notebook
from samples import NOW, ago, job

from .conftest import Portal, cleaned
from .wire import Wire

FIRST = "%load_ext makeway\nimport makeway, os, threading, time"


@pytest.fixture(scope="module")
def wire(portal: Portal) -> Iterator[Wire]:
    made = Wire(portal.url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def kernel(wire: Wire, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    started = Notebook(tmp_path_factory.mktemp("cards"), MAKEWAY_URL=wire.url, MAKEWAY_TOKEN="ana")
    assert started.run(FIRST).error is None
    yield started
    started.close()


@pytest.fixture
def notebook(kernel: Notebook, portal: Portal) -> Iterator[Notebook]:
    with cleaned(portal, "ana"):
        kernel.displays.clear()
        kernel.updated_at.clear()
        yield kernel


def train(notebook: Notebook, cell: str, options: str = "--profile gpu1", cell_id: str = "") -> list[str]:
    """Submit a cell; return the ids of the displays of its card."""
    before = set(notebook.displays)
    shown = notebook.run(f"%%train {options}\n{cell}", cell_id=cell_id)
    assert shown.error is None, shown.trouble
    return [id for id in notebook.displays if id not in before]


def until(notebook: Notebook, card: list[str], *words: str) -> None:
    notebook.until_shown(lambda: all(word in notebook.text(*card) for word in words))


@pytest.mark.covers("N10", "N13")
def test_a_card_follows_its_job_to_the_end(notebook: Notebook, portal: Portal) -> None:
    card = train(notebook, "input_file = 'go'\nimport os, time\nwhile not os.path.exists(input_file): time.sleep(0.05)")
    notebook.run("made = _; del made, _")  # nothing else holds the job
    until(notebook, card, "running", "Attempt")
    with portal.client("ana") as service:
        (running,) = (listed for listed in service.jobs(mine=True).jobs if not listed.state.ended)
        service.cancel(running.id)
    until(notebook, card, "cancelled", "Final state")
    for data in (notebook.displays[id] for id in card):
        assert set(data) == {"text/plain", "text/html", "text/markdown", "text/latex"}
    assert "cancelled" in notebook.displays[card[0]]["text/html"]


def test_a_card_changes_while_another_cell_runs_and_that_cell_shows_nothing_of_it(notebook: Notebook) -> None:
    card = train(notebook, "1 + 1")
    notebook.kinds.clear()
    busy = notebook.begin("while not os.path.exists('stop'): time.sleep(0.1)\nprint('done')")
    until(notebook, card, "succeeded", "Final state")
    Path(notebook.folder, "stop").touch()
    shown = notebook.finish(busy, time.monotonic() + 60)
    Path(notebook.folder, "stop").unlink()
    assert shown.html == ""
    assert shown.out == "done\n"
    assert set(notebook.kinds) <= {"status", "execute_input", "update_display_data"}


def test_a_captured_cell_takes_no_update_of_another_card(notebook: Notebook) -> None:
    card = train(notebook, "1 + 1")
    notebook.run("%%capture seen\nwhile not makeway.jobs()[0].done: time.sleep(0.1)\ntime.sleep(1.5)")
    until(notebook, card, "succeeded")
    assert notebook.run("print(len(seen.outputs))").out == "0\n"


def test_a_card_says_that_the_service_is_silent_and_goes_on_when_it_is_back(notebook: Notebook, wire: Wire) -> None:
    card = train(notebook, "import time\ntime.sleep(600)")
    until(notebook, card, "running")
    wire.cut()
    try:
        until(notebook, card, "The quota service does not answer", "State of")
    finally:
        wire.mend()
    notebook.until_shown(lambda: "does not answer" not in notebook.text(*card))
    notebook.run("made = makeway.jobs()[0]; made.cancel()")
    until(notebook, card, "cancelled")


@pytest.mark.parametrize(
    "fresh", ["os.environ['MAKEWAY_TOKEN'] = 'ana'", "makeway.connect(os.environ['MAKEWAY_URL'], 'ana')"]
)
def test_a_fresh_token_heals_the_cards_that_are_shown(notebook: Notebook, portal: Portal, fresh: str) -> None:
    card = train(notebook, "import time\ntime.sleep(600)")
    until(notebook, card, "running")
    notebook.run("os.environ['MAKEWAY_TOKEN'] = 'expired'")
    until(notebook, card, "get a new token")
    notebook.run(fresh)
    notebook.until_shown(lambda: "get a new token" not in notebook.text(*card))
    notebook.run("from makeway.connection import disconnect; disconnect(); os.environ['MAKEWAY_TOKEN'] = 'ana'")


def test_a_cell_that_is_run_again_gives_up_its_old_card(notebook: Notebook) -> None:
    old = train(notebook, "import time\ntime.sleep(600)", cell_id="one")
    other = train(notebook, "import time\ntime.sleep(600)", cell_id="two")
    new = train(notebook, "import time\ntime.sleep(600)", cell_id="one")
    until(notebook, new, "running")
    until(notebook, other, "running")
    notebook.updated_at.clear()
    notebook.run("[each.cancel() for each in makeway.jobs(limit=3)]; None")
    until(notebook, new + other, "cancelled")
    assert not set(old) & set(notebook.updated_at)
    assert notebook.run("print('makeway-feed' in [t.name for t in threading.enumerate()])").out == "False\n"


def test_twenty_cards_are_updated_once_a_second_at_most(notebook: Notebook) -> None:
    submit = "makeway.submit('import time\\ntime.sleep(0.2)', name=f'n{n}', profile='gpu1')"
    cell = f"for n in range(20):\n    display({submit})"
    assert notebook.run(cell).error is None
    ids = list(notebook.displays)
    assert len(ids) == 40
    notebook.until_shown(lambda: notebook.text(*ids).count("Final state") == 20, 120)
    for times in notebook.updated_at.values():
        steps = sorted(later - earlier for earlier, later in pairwise(times[:-1]))  # the last one comes at once
        assert not steps or steps[0] > timedelta(seconds=0.8)
    assert notebook.run("print(len(makeway.cards._CARDS))").out == "0\n"


@pytest.mark.covers("N10")
def test_waiting_shows_the_end_before_the_cell_ends(notebook: Notebook) -> None:
    """Programs that run notebooks, such as papermill, save what a cell has shown by then."""
    card = train(notebook, "6 * 7")
    notebook.run("makeway.jobs()[0].wait(quiet=True); None")
    assert "succeeded" in notebook.text(*card)


# -- without a kernel ----------------------------------------------------------------------------------------------


class Output:
    """A twin of LiveOutput that keeps what is shown."""

    updatable = True

    def __init__(self, parts: list[dict[str, str]]) -> None:
        self.shown = [parts]

    def update(self, parts: list[dict[str, str]]) -> bool:
        self.shown.append(parts)
        return True

    def repeat_missed(self) -> None:
        pass

    @property
    def text(self) -> str:
        return "\n".join(part["text/plain"] for part in self.shown[-1])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[cards.Card, Output, list[float]]]]:
    """Make a card with a clock, which nothing follows; the time without a cell is that of the clock, too."""

    def make(shown: Job) -> tuple[cards.Card, Output, list[float]]:
        now = [0.0]
        monkeypatch.setattr(cards, "LiveOutput", Output)
        monkeypatch.setattr(cards, "CELLS", Cells(lambda: now[0]))
        feed = Feed(lambda: AsyncClient("http://127.0.0.1:9", "ana"))
        monkeypatch.setattr(feed, "_start", lambda: False)
        card = cards.Card(shown, NOW, feed, lambda: now[0])
        made_cards.append(card)
        output: Any = card._output
        return card, output, now

    made_cards: list[cards.Card] = []
    yield make
    for card in made_cards:
        card.close()
    assert cards._CARDS == []
    assert CELLS is not None


def test_a_card_is_drawn_only_where_it_says_something_new(made: Any) -> None:
    card, output, now = made(job())
    for second in range(1, 5):
        now[0] = second
        card.show(JobNews(job(), NOW + timedelta(seconds=second)))
    assert len(output.shown) == 1
    card.show(JobNews(job(State.CHECKPOINTING), NOW))
    assert len(output.shown) == 2


def test_an_hour_after_the_last_cell_only_states_are_shown(made: Any) -> None:
    """Each update is activity of the kernel, and would keep an idle server from being culled for days."""
    waits = job(State.PENDING, placement=[], reason=Reason(code="limit", message="R&D uses 9 of its limit of 9 GPUs."))
    card, output, now = made(waits)
    now[0] = 3601.0
    fewer = waits.model_copy(update={"reason": Reason(code="limit", message="R&D uses 8 of its limit of 9 GPUs.")})
    card.show(JobNews(fewer, NOW))
    assert len(output.shown) == 1
    card.show(JobNews(job(), NOW))
    assert "running" in output.text
    assert "run any cell to go on" in output.text
    cards.CELLS.begin()
    card.redraw()
    assert "run any cell" not in output.text
    card.show(JobNews(job(State.SUCCEEDED, ended_at=NOW), NOW))
    assert "Final state" in output.text


def test_a_problem_says_of_which_time_the_state_is(made: Any) -> None:
    card, output, now = made(job())
    now[0] = 5.0
    card.show(JobNews(job(), ago(3600), "The quota service does not answer."))
    assert "The quota service does not answer. State of 2026-01-01 11:00:00" in output.text


def test_a_deleted_job_ends_its_card(made: Any) -> None:
    card, output, now = made(job())
    now[0] = 5.0
    card.show(JobNews(job(), NOW, "The service has no such job any more.", gone=True))
    assert "no such job any more" in output.text
    assert cards._CARDS == []


def test_only_so_many_cards_are_kept(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "MAX_CARDS", 2)
    kept = [made(job(id=f"j-{n}"))[0] for n in range(3)]
    assert kept[1:] == cards._CARDS


# -- tables of jobs ------------------------------------------------------------------------------------------------


def listed(notebook: Notebook, cell_id: str = "") -> list[str]:
    """Run `%jobs`; return the ids of the displays of its table."""
    before = set(notebook.displays)
    shown = notebook.run("%jobs", cell_id=cell_id)
    assert shown.error is None, shown.trouble
    return [id for id in notebook.displays if id not in before]


def test_a_table_of_jobs_follows_them_until_the_last_has_ended(notebook: Notebook) -> None:
    for name in ("one", "two"):
        notebook.run(f"{name} = makeway.submit('import time; time.sleep(600)', name='{name}', profile='gpu1')")
    table = listed(notebook)
    until(notebook, table, "one", "two", "running", "after a reload %jobs follows them again")
    notebook.run("one.cancel(); None")
    until(notebook, table, "cancelled", "running")
    notebook.run("two.cancel(); None")
    until(notebook, table, "Final states, read at")
    assert set(notebook.displays[table[0]]) == {"text/plain", "text/html", "text/markdown", "text/latex"}
    assert notebook.run("print('makeway-feed' in [t.name for t in threading.enumerate()])").out == "False\n"
    assert "cancelled" in notebook.run("%jobs").html, "what has ended is a plain value of its cell"


def test_only_the_newest_table_is_kept_up_to_date(notebook: Notebook) -> None:
    notebook.run("one = makeway.submit('import time; time.sleep(600)', name='one', profile='gpu1')")
    old = listed(notebook)
    new = listed(notebook)
    until(notebook, new, "running")
    notebook.updated_at.clear()
    notebook.run("one.cancel(); None")
    until(notebook, new, "Final states")
    assert not set(old) & set(notebook.updated_at)


@pytest.fixture
def tabled(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., tuple[cards.JobTable, Output, list[float], list]]]:
    """Make a table with a clock, which nothing follows; what it does later is kept."""
    tables: list[cards.JobTable] = []

    def make(*jobs: Job, updatable: bool = True) -> tuple[cards.JobTable, Output, list[float], list[Any]]:
        now: list[float] = [0.0]
        later: list[tuple[float, Any]] = []
        monkeypatch.setattr(Output, "updatable", updatable)
        monkeypatch.setattr(cards, "LiveOutput", Output)
        monkeypatch.setattr(cards, "CELLS", Cells(lambda: now[0]))
        feed = Feed(lambda: AsyncClient("http://127.0.0.1:9", "ana"))
        monkeypatch.setattr(feed, "_start", lambda: False)
        monkeypatch.setattr(feed, "later", lambda seconds, call: later.append((now[0] + seconds, call)))
        tables.append(cards.JobTable(jobs, NOW, feed=feed, clock=lambda: now[0]))
        output: Any = tables[-1]._output
        return tables[-1], output, now, later

    yield make
    for table in tables:
        table.close()
    assert cards._TABLES == []


def test_news_of_many_jobs_at_once_are_one_update_and_none_is_lost(tabled: Any) -> None:
    table, output, now, later = tabled(*[job(State.PENDING, id=f"j-{n}", placement=[]) for n in range(20)])
    now[0] = 0.5
    for n in range(20):
        table.show(JobNews(job(id=f"j-{n}"), NOW))
    assert (len(output.shown), len(later)) == (1, 1)
    due, draw = later.pop()
    assert due == pytest.approx(cards.APART)
    now[0] = due
    draw()
    assert output.text.count("running") == 20
    table.show(JobNews(job(id="j-3"), NOW))
    now[0], draw = later.pop()
    draw()
    assert len(output.shown) == 2, "nothing new"


def test_a_table_ends_with_its_jobs_or_an_hour_after_the_last_cell(tabled: Any) -> None:
    table, output, *_ = tabled(job(id="j-1"), job(id="j-2"))
    table.show(JobNews(job(State.SUCCEEDED, id="j-1", ended_at=NOW), NOW))
    table.show(JobNews(job(id="j-2"), NOW, "The service has no such job any more.", gone=True))
    assert "no such job any more" in output.text
    assert cards._TABLES == []
    table, output, now, _ = tabled(job(id="j-1"))
    now[0] = 3601.0
    table.show(JobNews(job(State.CHECKPOINTING, id="j-1"), NOW))
    assert "making way" in output.text
    assert cards._TABLES == []
    table.show(JobNews(job(State.SUCCEEDED, id="j-1", ended_at=NOW), NOW))
    assert "making way" in output.text, "it is closed"


def test_a_table_that_cannot_be_updated_or_is_too_long_is_not_followed(tabled: Any) -> None:
    for updatable, many in ((False, 1), (True, cards.MAX_ROWS + 1)):
        tabled(*[job(id=f"j-{n}") for n in range(many)], updatable=updatable)
        assert cards._TABLES == []


FOLLOWED, NOT_FOLLOWED = "after a reload", "to follow"


@pytest.fixture
def in_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a front end that takes updates."""
    monkeypatch.setattr(Cells, "publisher", lambda self: object())


def test_an_output_that_nothing_follows_says_how_to_follow_the_jobs(
    made: Any, tabled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cells, "publisher", lambda self: None)
    monkeypatch.setattr(Output, "updatable", False)
    assert NOT_FOLLOWED in made(job())[1].text
    assert NOT_FOLLOWED in tabled(job(), updatable=False)[1].text
    assert all(FOLLOWED not in part["text/plain"] for part in view.job_bundles(job(), NOW))


def test_a_table_of_too_many_jobs_says_that_nothing_follows_it(tabled: Any, in_kernel: None) -> None:
    assert FOLLOWED in tabled(*[job(id=f"j-{n}") for n in range(cards.MAX_ROWS)])[1].text
    assert NOT_FOLLOWED in tabled(*[job(id=f"j-{n}") for n in range(cards.MAX_ROWS + 1)])[1].text


def test_a_table_that_another_one_replaces_says_so_at_its_last_state(tabled: Any, in_kernel: None) -> None:
    pending = job(State.PENDING, placement=[])
    table, output, *_ = tabled(pending)
    table.show(JobNews(job(), NOW))  # too soon to be drawn
    assert FOLLOWED in output.text
    newer = tabled(job())[1]
    assert (NOT_FOLLOWED in output.text, FOLLOWED in newer.text) == (True, True)
    assert "running" in output.text
    before, *_ = tabled(job())
    tabled(*[job(id=f"j-{n}") for n in range(cards.MAX_ROWS + 1)])
    assert NOT_FOLLOWED in before._output.text


def test_a_table_says_so_when_it_ends_an_hour_after_the_last_cell(tabled: Any, in_kernel: None) -> None:
    table, output, now, _ = tabled(job())
    now[0] = 3601.0
    table.show(JobNews(job(), NOW))
    assert NOT_FOLLOWED in output.text


def test_a_card_beyond_those_that_are_kept_says_so(made: Any, in_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "MAX_CARDS", 2)
    outputs = [made(job(id=f"j-{n}"))[1] for n in range(3)]
    assert [NOT_FOLLOWED in output.text for output in outputs] == [True, False, False]
    assert [FOLLOWED in output.text for output in outputs] == [False, True, True]
