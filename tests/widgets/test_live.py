"""The live widget: one stream for all, every change shown, resumed after a break, silent once closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway import feed as feed_module
from makeway import live as live_module
from makeway.blocks import text_of
from makeway.feed import Feed
from makeway.live import Cells, LiveOutput
from makeway.team_usage import LiveUsage
from makeway.teams import Picture, banners, live, live_parts
from makeway.words import full_clock
from makeway_api.client import STREAM_TIMEOUT, AsyncClient, Client
from makeway_api.models import JobRequest, State
from notebook import Notebook

from .conftest import Portal
from .wire import Wire

SLEEP = ["sleep", "60"]


class Watcher:
    """Keeps the pictures of a feed."""

    def __init__(self) -> None:
        self.pictures: list[Picture] = []
        self._news = threading.Condition()

    def __call__(self, picture: Picture) -> None:
        with self._news:
            self.pictures.append(picture)
            self._news.notify_all()

    def until(self, good: Callable[[Picture], bool], seconds: float = 45) -> Picture:
        with self._news:
            result = self._news.wait_for(lambda: self.pictures and good(self.pictures[-1]), seconds)
            assert result, self.pictures[-1:]
            return self.pictures[-1]


@pytest.fixture
def wire(portal: Portal) -> Iterator[Wire]:
    made = Wire(portal.url)
    yield made
    made.close()


@pytest.fixture
def feed(wire: Wire) -> Feed:
    return Feed(lambda: AsyncClient(wire.url, "ana"))


def names(picture: Picture) -> list[str]:
    return [job.name for job in picture.mine]


@pytest.mark.covers("N13")
def test_changes_arrive_without_polling(feed: Feed, ana: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "POLL", 3600.0)
    monkeypatch.setattr(feed_module, "REST", 3600.0)
    watcher, other = Watcher(), Watcher()
    feed.listen(watcher)
    watcher.until(lambda p: p.live and p.usage is not None)
    feed.listen(other)
    assert other.pictures[-1].usage is not None
    job = ana.submit(JobRequest(name="seen", command=SLEEP, profile="gpu3"))
    picture = watcher.until(lambda p: "seen" in names(p) and p.usage is not None and p.usage.used >= 3)
    other.until(lambda p: "seen" in names(p) and p.usage == picture.usage)
    assert [t.name for t in threading.enumerate()].count("makeway-feed") == 1
    ana.cancel(job.id)
    watcher.until(lambda p: "seen" not in names(p))
    feed.leave(watcher)
    assert feed.running
    feed.leave(other)
    assert not feed.running
    assert "makeway-feed" not in [t.name for t in threading.enumerate()]


def test_the_stream_comes_back_after_a_break(
    feed: Feed, wire: Wire, ana: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "POLL", 0.5)
    monkeypatch.setattr(feed_module, "REST", 0.5)
    watcher = Watcher()
    feed.listen(watcher)
    watcher.until(lambda p: p.live)
    wire.cut()
    away = watcher.until(lambda p: bool(p.problem) and not p.live)
    assert "does not answer" in away.problem
    assert away.usage is not None
    ana.submit(JobRequest(name="meanwhile", command=SLEEP, profile="gpu1"))
    wire.mend()
    back = watcher.until(lambda p: p.live and "meanwhile" in names(p))
    assert back.problem == ""
    feed.leave(watcher)
    assert not feed.running


def test_without_a_stream_it_polls(feed: Feed, ana: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "POLL", 0.3)

    async def broken(self: AsyncClient, *_: object):  # type: ignore[no-untyped-def]
        raise feed_module.MakewayError("no stream here")
        yield

    monkeypatch.setattr(AsyncClient, "events", broken)
    watcher = Watcher()
    feed.listen(watcher)
    watcher.until(lambda p: p.usage is not None)
    ana.submit(JobRequest(name="polled", command=SLEEP, profile="gpu1"))
    assert not watcher.until(lambda p: "polled" in names(p)).live
    feed.leave(watcher)


@pytest.mark.covers("N13")
def test_the_live_usage_in_a_kernel(portal: Portal, ana: Client, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path, MAKEWAY_URL=portal.url, JUPYTERHUB_API_TOKEN="ana")
    try:
        notebook.run("%load_ext makeway\nimport makeway, threading")
        shown = notebook.run("w = makeway.usage(); w", cell_id="one")
        assert shown.error is None, shown.trouble
        assert shown.widgets == []
        assert "R&amp;D" in shown.html, "the first picture is there before the cell has ended"
        assert "Connecting" not in shown.html + shown.text
        ids = list(notebook.displays)
        head = notebook.displays[ids[0]]
        ana.submit(JobRequest(name="live one", command=SLEEP, profile="gpu2"))
        notebook.until_shown(lambda: "live one" in notebook.text(*ids) and "mw-in_quota" in html_of(notebook, ids))
        assert notebook.displays[ids[0]] is head, "a part that says the same is not sent again"
        again = notebook.run("v = makeway.usage(); v", cell_id="one")
        assert "live one" in again.text
        count = "print([t.name for t in threading.enumerate()].count('makeway-feed'))"
        assert notebook.run(count).out == "1\n"
        assert "Stopped. State of" in notebook.text(*ids)
        ended = "[thread.join(30) for thread in threading.enumerate() if thread.name == 'makeway-feed']"
        assert notebook.run(f"v.close()\n{ended}\n{count}").out == "0\n"
    finally:
        notebook.close()


def html_of(notebook: Notebook, ids: list[str]) -> str:
    return "".join(notebook.displays[id]["text/html"] for id in ids)


SAVES_SLOWLY = ["sh", "-c", "trap 'sleep 1.5; exit 75' TERM; while :; do sleep 0.1; done"]


@pytest.mark.covers("N14", "F40", "N13")
def test_both_sides_of_a_reclaim_are_shown(portal: Portal, feed: Feed, ana: Client, bo: Client) -> None:
    for n in range(3):
        ana.submit(JobRequest(name=f"sweep {n}", profile="gpu3", command=SAVES_SLOWLY))
    mine, theirs = Watcher(), Watcher()
    other = Feed(lambda: AsyncClient(portal.url, "bo"))
    feed.listen(mine)
    other.listen(theirs)
    mine.until(lambda p: [job.state for job in p.mine].count(State.RUNNING) == 3)
    bo.submit(JobRequest(name="urgent", profile="gpu3", command=SLEEP))
    try:
        leaving = mine.until(lambda p: "makes way for DevOps" in banners(p))
        assert banners(leaving).count('role="status"') == 1
        assert "Your job sweep" in banners(leaving)
        coming = theirs.until(lambda p: "GPUs are on their way to your job urgent" in banners(p))
        assert "R&amp;D" in banners(coming)
        done = theirs.until(lambda p: any(j.state is State.RUNNING for j in p.mine))
        assert banners(done) == ""
        back = mine.until(lambda p: banners(p) == "" and any(j.preemptions for j in p.mine))
        assert live(back).count("waiting again") >= 1
    finally:
        other.leave(theirs)
        feed.leave(mine)


def test_a_live_output_sends_nothing_while_nothing_changes(portal: Portal, ana: Client, tmp_path: Path) -> None:
    """A message of the kernel is activity, which keeps the Hub from ending an idle server: time alone sends none."""
    ana.submit(JobRequest(name="long", command=SLEEP, profile="gpu1"))
    notebook = Notebook(tmp_path, MAKEWAY_URL=portal.url, JUPYTERHUB_API_TOKEN="ana")
    try:
        notebook.run("import makeway.feed\nmakeway.feed.REST = makeway.feed.POLL = makeway.feed.MIN_PAUSE = 0.2")
        notebook.run("%load_ext makeway\nimport makeway\nw = makeway.usage(); w")
        notebook.run("makeway.jobs()[0]")
        notebook.until_shown(lambda: notebook.text().count("in quota") >= 2)
        notebook.updated(2.0)
        notebook.updated_at.clear()
        notebook.updated(4.0)
        assert notebook.updated_at == {}
    finally:
        notebook.close()


def test_a_live_output_pauses_an_hour_after_the_last_cell() -> None:
    now = [0.0]
    feed = Feed(lambda: AsyncClient("http://127.0.0.1:9", "ana"))
    listening: list[object] = []
    feed.listen = listening.append  # type: ignore[method-assign, assignment]
    feed.leave = lambda listener, wait=True: listening.remove(listener)  # type: ignore[method-assign, assignment]
    cells, output = Cells(lambda: now[0]), Kept()
    shown = LiveUsage(feed, cells)
    shown._output = output  # type: ignore[assignment]
    shown._listen()
    for number, (at, drawn) in enumerate(((3599.0, True), (3601.0, True), (7199.0, True), (7300.0, False))):
        now[0] = at
        if number == 1:
            cells.begin()
            cells.end()
        shown.show(Picture(problem=f"problem {number}"))
        assert (f"problem {number}" in output.text) is drawn
    assert listening == []
    cells.keep(shown)
    cells.begin()
    assert listening == [shown.show]
    shown.show(Picture(problem="again"))
    assert "again" in output.text


class Kept:
    """A twin of LiveOutput that keeps what it shows as text."""

    text = ""

    def update(self, parts: list[dict[str, str]]) -> bool:
        self.text = "\n".join(part["text/plain"] for part in parts)
        return True

    def repeat_missed(self) -> None:
        pass


def test_a_state_is_not_called_live_once_the_service_is_silent(feed: Feed, wire: Wire, ana: Client) -> None:
    watcher = Watcher()
    feed.listen(watcher)
    known = watcher.until(lambda p: p.live and p.usage is not None)
    wire.cut()
    lost = watcher.until(lambda p: bool(p.problem))
    feed.leave(watcher)
    assert not lost.live
    assert lost.usage == known.usage
    parts = text_of([block for part in live_parts(lost) for block in part])
    assert f"The quota service does not answer. State of {full_clock(lost.known_at)}." in parts


@pytest.mark.parametrize(
    ("installed", "outputs"), [("jupyter_server_ydoc", 1), ("jupyter_collaboration", 1), ("jupyterlab", 2)]
)
def test_an_output_is_one_beside_each_release_of_jupyter_collaboration(
    monkeypatch: pytest.MonkeyPatch, installed: str, outputs: int
) -> None:
    """Before release 3 it was one package of its own name; since then that is empty and needs others."""
    monkeypatch.setattr(live_module, "find_spec", lambda name: object() if name == installed else None)
    shown = []
    monkeypatch.setattr(live_module, "display", lambda *_, display_id, **__: shown.append(display_id))
    LiveOutput([{"text/plain": "state"}, {"text/plain": "progress"}])
    assert len(shown) == outputs


class Published:
    """A front end: what it was sent to show, and the updates by display id."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []
        self.updates: list[tuple[str, str]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: str) -> None:
        self.shown.append((display_id, data["text/plain"]))

    def publish(self, data: dict[str, str], _: object, transient: dict[str, str], update: bool) -> None:
        self.updates.append((transient["display_id"], data["text/plain"]))


@pytest.fixture
def collaborative(monkeypatch: pytest.MonkeyPatch) -> tuple[Cells, Published]:
    """Return the cells of a kernel beside jupyter-collaboration, and its front end."""
    cells, front_end = Cells(), Published()
    monkeypatch.setattr(cells, "publisher", lambda: front_end)
    monkeypatch.setattr(live_module, "CELLS", cells)
    monkeypatch.setattr(live_module, "find_spec", lambda name: object())
    monkeypatch.setattr(live_module, "display", front_end.display)
    return cells, front_end


def state(text: str) -> list[dict[str, str]]:
    return [{"text/plain": text, "text/html": f"<p>{text}</p>"}]


def test_live_outputs_of_a_collaborative_session_are_one_output_at_the_end_of_their_cell(
    collaborative: tuple[Cells, Published],
) -> None:
    cells, front_end = collaborative
    cells.begin()
    first, second = LiveOutput(state("first waits")), LiveOutput(state("second waits"))
    first.update(state("first starts"))
    assert (front_end.shown, front_end.updates) == ([], []), "the cell may still print below it"
    cells.end()
    ((id, text),) = front_end.shown
    assert text == "first starts\nsecond waits"
    second.update(state("second starts"))
    cells.begin()
    LiveOutput(state("of another cell"))
    first.update(state("first runs"))
    assert front_end.updates == [(id, "first starts\nsecond starts"), (id, "first runs\nsecond starts")]
    cells.end()
    assert [text for _, text in front_end.shown] == ["first starts\nsecond waits", "of another cell"]
    assert len({id for id, _ in front_end.shown}) == 2
    cells.end()  # of a cell without live outputs
    assert len(front_end.shown) == 2


def test_a_live_output_of_a_collaborative_session_that_no_cell_makes_is_shown_at_once(
    collaborative: tuple[Cells, Published],
) -> None:
    """As one that a thread makes between two cells."""
    _, front_end = collaborative
    output = LiveOutput(state("waits"))
    output.update(state("runs"))
    assert [text for _, text in front_end.shown + front_end.updates] == ["waits", "runs"]


def test_two_missed_heartbeats_end_a_live_stream() -> None:
    assert STREAM_TIMEOUT.read is not None
    assert 2 * 15 < STREAM_TIMEOUT.read < 3 * 15
