"""Keep the cards of jobs up to date until the jobs end: progress, state, reason, who they make way for."""

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

MOST_CARDS = 100
"""Cards of one kernel that are kept up to date; beyond that the oldest stays as it is"""
APART = 0.9
"""Seconds between two updates of one card at least, but for its last one; the feed reads a job once a second"""


class Card:
    """The card of one job, below the cell that showed it. It needs no other reference to stay up to date."""

    def __init__(
        self, job: Job, known_at: datetime, feed: Feed = FEED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._feed = feed
        self._clock = clock
        self._news = JobNews(job, known_at)
        self._drawn = self._news
        self._text = _text(self._news, idle=False)
        self._drawn_at = clock()
        self._lock = threading.RLock()
        self._output = LiveOutput(_bundles(self._news, idle=False))
        if job.state.ended or not self._output.updatable:
            return
        CELLS.keep(self)
        _CARDS.append(self)
        if len(_CARDS) > MOST_CARDS:
            _CARDS[0].close()
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

    def close(self) -> None:
        """Stop updating; the last state stays visible."""
        CELLS.drop(self)
        if self in _CARDS:
            _CARDS.remove(self)
        self._feed.unfollow(self._news.job.id, self.show)

    def _draw(self) -> bool:
        news, idle = self._news, CELLS.idle
        if (text := _text(news, idle)) == self._text:
            return False
        self._drawn, self._text, self._drawn_at = news, text, self._clock()
        return self._output.update(_bundles(news, idle))


_CARDS: list[Card] = []


def _bundles(news: JobNews, idle: bool) -> Sequence[Bundle]:
    return view.job_bundles(news.job, news.known_at, news.problem, idle)


def _text(news: JobNews, idle: bool) -> str:
    """Return what a card says, but for the time at which the service said so."""
    texts = [each["text/plain"] for each in _bundles(news, idle)]
    return "\n".join(texts).replace(full_clock(news.known_at), "")


def _alike(news: JobNews, other: JobNews) -> bool:
    """Whether only numbers differ: no state, no attempt, no reason."""

    def facts(each: JobNews) -> tuple[object, ...]:
        job = each.job
        return job.state, job.attempt, job.preemptions, job.reason and job.reason.code, bool(each.problem)

    return facts(news) == facts(other)
