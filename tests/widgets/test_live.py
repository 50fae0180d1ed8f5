"""The live widget: one stream for all, every change shown, resumed after a break, silent once closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway import feed as feed_module
from makeway.feed import Feed
from makeway.teams import Picture, banners, live
from makeway.widgets import TeamUsage
from makeway_api.client import AsyncClient, Client
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
            found = self._news.wait_for(lambda: self.pictures and good(self.pictures[-1]), seconds)
            assert found, self.pictures[-1:]
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
def test_the_widget_in_a_kernel(portal: Portal, ana: Client, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path, MAKEWAY_URL=portal.url, JUPYTERHUB_API_TOKEN="ana")
    try:
        notebook.run("%load_ext makeway\nimport makeway, threading")
        shown = notebook.run("w = makeway.usage(); w")
        assert shown.error is None, shown.trouble
        assert len(shown.widgets) == 1
        assert "makeway" in shown.html
        notebook.run("v = makeway.usage()")
        ana.submit(JobRequest(name="live one", command=SLEEP, profile="gpu2"))
        html, deadline = "", time.monotonic() + 60
        while "live one" not in html or "mw-in_quota" not in html:
            assert time.monotonic() < deadline, html
            html = next((u["value"] for u in reversed(notebook.updated(0.5)) if "value" in u), html)
        count = "print([t.name for t in threading.enumerate()].count('makeway-feed'))"
        assert notebook.run(count).out == "1\n"
        assert notebook.run(f"w.close(); v.close()\n{count}").out == "0\n"
    finally:
        notebook.close()


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
        leaving = mine.until(lambda p: "makes way for devops;" in banners(p))
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


def test_a_widget_sends_nothing_while_nothing_changes(portal: Portal, ana: Client, tmp_path: Path) -> None:
    """A message of the kernel is activity, which keeps the Hub from ending an idle server: time alone sends none."""
    ana.submit(JobRequest(name="long", command=SLEEP, profile="gpu1"))
    notebook = Notebook(tmp_path, MAKEWAY_URL=portal.url, JUPYTERHUB_API_TOKEN="ana")
    try:
        notebook.run("import makeway.feed\nmakeway.feed.REST = makeway.feed.POLL = 0.2")
        notebook.run("%load_ext makeway\nimport makeway\nw = makeway.usage(); w")
        deadline = time.monotonic() + 60
        while "in quota" not in notebook.run("print(w.html.value)").out:
            assert time.monotonic() < deadline
        notebook.updated(2.0)
        assert notebook.updated(4.0) == []
    finally:
        notebook.close()


def test_a_widget_stops_an_hour_after_the_last_cell() -> None:
    now = [0.0]
    feed = Feed(lambda: AsyncClient("http://127.0.0.1:9", "ana"))
    listening: list[object] = []
    feed.listen = listening.append  # type: ignore[method-assign, assignment]
    feed.leave = listening.remove  # type: ignore[method-assign, assignment]
    widget = TeamUsage(feed, lambda: now[0])
    for number, (at, shown) in enumerate(((3599.0, True), (3601.0, True), (7199.0, True), (7300.0, False))):
        now[0] = at
        if number == 1:
            widget.used()  # a cell
        widget.show(Picture(problem=f"problem {number}"))
        assert (f"problem {number}" in widget.html.value) is shown
    assert listening == []
    widget._stop.click()
    assert listening == [widget.show]
    widget.show(Picture(problem="again"))
    assert "again" in widget.html.value
