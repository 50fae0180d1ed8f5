"""Keep cards and tables of jobs up to date until the jobs end: progress, state, reason, who they make way for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from makeway_api.models import Job

from . import view
from .feed import FEED, Feed, JobNews
from .live import CELLS, Bundle, LiveOutput
from .words import full_clock

MAX_CARDS = 100
"""Cards of one kernel that are kept up to date; beyond that the oldest stays as it is"""
APART = 0.9
"""Seconds between two updates of one card at least, but for its last one; the feed reads a job once a second"""
MAX_ROWS = 50
"""Jobs of a table that are followed; a table of more is not kept up to date"""


class Card:
    """The card of one job, below the cell that showed it. It needs no other reference to stay up to date."""

    def __init__(
        self, job: Job, known_at: datetime, feed: Feed = FEED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._feed = feed
        self._clock = clock
        self._news = JobNews(job, known_at)
        self._drawn = self._news
        self._is_followed = CELLS.publisher() is not None
        self._text = self._content(idle=False)
        self._drawn_at = clock()
        self._lock = threading.RLock()
        self._output = LiveOutput(self._bundles(idle=False))
        if job.state.ended or not self._output.updatable:
            return
        CELLS.keep(self)
        _CARDS.append(self)
        if len(_CARDS) > MAX_CARDS:
            _CARDS[0].leave()
        feed.follow(job, self.show, known_at)

    def show(self, news: JobNews) -> None:
        """Show what is new; called by any thread."""
        with self._lock:
            self._news = news
            if news.job.state.ended or news.gone:
                self._draw()
                self.close()
            elif self._clock() - self._drawn_at >= APART and not (CELLS.idle and _alike(news, self._drawn)):
                self._draw()

    def redraw(self) -> None:
        """Show the newest state that is known, and what was missed between two cells."""
        with self._lock:
            if not self._draw():
                self._output.repeat_missed()

    def leave(self) -> None:
        """Stop updating, and say so."""
        with self._lock:
            self._is_followed = False
            self._draw()
            self.close()

    def close(self) -> None:
        """Stop updating; the last state stays visible."""
        CELLS.drop(self)
        if self in _CARDS:
            _CARDS.remove(self)
        self._feed.unfollow(self._news.job.id, self.show)

    def _draw(self) -> bool:
        news, idle = self._news, CELLS.idle
        if (text := self._content(idle)) == self._text:
            return False
        self._drawn, self._text, self._drawn_at = news, text, self._clock()
        return self._output.update(self._bundles(idle))

    def _bundles(self, idle: bool) -> Sequence[Bundle]:
        return view.job_bundles(self._news.job, self._news.known_at, self._news.problem, idle, self._is_followed)

    def _content(self, idle: bool) -> str:
        """Return what the card says, but for the time at which the service said so."""
        texts = [bundle["text/plain"] for bundle in self._bundles(idle)]
        return "\n".join(texts).replace(full_clock(self._news.known_at), "")


_CARDS: list[Card] = []


class JobTable:
    """A table of jobs, below the cell that showed it, until all have ended or an hour has passed without a cell.

    Only the newest table of a kernel is kept up to date.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        known_at: datetime,
        more: bool = False,
        owner: bool = False,
        feed: Feed = FEED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._news = {job.id: JobNews(job, known_at) for job in jobs}
        self._more, self._owner, self._feed, self._clock = more, owner, feed, clock
        self._drawn_at = self._due_at = clock()
        self._lock = threading.RLock()
        self._followed = {job.id for job in jobs if not job.state.ended}
        self._is_followed = len(self._followed) <= MAX_ROWS and CELLS.publisher() is not None
        self._output = LiveOutput(self._bundles())
        self._text = self._content()
        before = _TABLES[:]
        if len(self._followed) > MAX_ROWS or not self._output.updatable:
            self._followed.clear()
        else:
            CELLS.keep(self)
            _TABLES.append(self)
        for id in sorted(self._followed):
            feed.follow(self._news[id].job, self.show, known_at)
        for table in before:  # after the new one follows, so that the feed's thread goes on
            table.leave()

    def show(self, news: JobNews) -> None:
        """Show what is new of a job; called by any thread."""
        with self._lock:
            id = news.job.id
            if id not in self._followed:
                return
            self._news[id] = news
            if news.job.state.ended or news.gone:
                self._unfollow(id)
            if not self._followed or CELLS.idle:
                self.leave()
            elif (now := self._clock()) >= self._drawn_at + APART:
                self._draw()
            elif now >= self._due_at:  # else the others will be drawn with it
                self._due_at = self._drawn_at + APART
                self._feed.later(self._due_at - now, self._draw_due)

    def redraw(self) -> None:
        """Show the newest states that are known, and what was missed between two cells."""
        with self._lock:
            if not self._draw():
                self._output.repeat_missed()

    def leave(self) -> None:
        """Stop updating, and say so."""
        with self._lock:
            self._is_followed = False
            self._draw()
            self.close()

    def close(self) -> None:
        """Stop updating; the last states stay visible."""
        with self._lock:
            CELLS.drop(self)
            if self in _TABLES:
                _TABLES.remove(self)
            for id in list(self._followed):
                self._unfollow(id)

    def _unfollow(self, id: str) -> None:
        self._followed.discard(id)
        self._feed.unfollow(id, self.show)

    def _draw_due(self) -> None:
        with self._lock:
            if self in _TABLES:
                self._draw()

    def _draw(self) -> bool:
        if (text := self._content()) == self._text:
            return False
        self._text, self._drawn_at = text, self._clock()
        return self._output.update(self._bundles())

    @property
    def _known_at(self) -> datetime:
        """Return when the oldest state was read that may have changed since; once all have ended, the newest."""
        live = [news.known_at for news in self._news.values() if not news.job.state.ended]
        return min(live) if live else max(news.known_at for news in self._news.values())

    def _bundles(self) -> list[dict[str, str]]:
        problem = next((news.problem for news in self._news.values() if news.problem), "")
        jobs = [news.job for news in self._news.values()]
        return view.jobs_bundles(jobs, self._known_at, self._more, self._owner, problem, self._is_followed)

    def _content(self) -> str:
        texts = [bundle["text/plain"] for bundle in self._bundles()]
        return "\n".join(texts).replace(full_clock(self._known_at), "")


_TABLES: list[JobTable] = []


def _alike(news: JobNews, other: JobNews) -> bool:
    """Whether only numbers differ: no state, no attempt, no reason."""

    def facts(item: JobNews) -> tuple[object, ...]:
        job = item.job
        return job.state, job.attempt, job.preemptions, job.reason and job.reason.code, bool(item.problem)

    return facts(news) == facts(other)
