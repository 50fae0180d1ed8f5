"""Keep one live picture of the cluster, and the jobs that are followed, for all outputs of a kernel, on one thread.

The thread follows the service's event stream and reads what an event is about; without a stream it polls every few
seconds, and resumes the stream after the last event it saw. It runs while there is a listener, and takes a fresh client
when the address or the token has changed, and after the service has refused the token.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from makeway_api.client import AsyncClient
from makeway_api.errors import MakewayError
from makeway_api.models import Event, Job, Me, State

from . import connection
from .connection import async_client, explain
from .live import CELLS
from .teams import Picture

Listener = Callable[[Picture], None]

MIN_PAUSE = 1.0
"""Seconds between two fetches of the same, at least: a burst of events costs one."""
POLL = 5.0
"""Seconds between fetches while there is no stream."""
REST = 60.0
"""Seconds between fetches while the stream is silent."""
PROGRESS = 3.0
"""Seconds between two looks at the progress of a job that runs."""
SPACING = 0.5
"""Seconds for each job that is followed: 20 jobs are looked at every 10 seconds."""
MAX_PAUSE = 15.0
"""Seconds between attempts to resume the stream, or to reach a service that does not answer, at most."""
SILENT = "The quota service does not answer."
GONE = "The service has no such job any more."
WATCH = 1.0
"""Seconds between two looks whether address or token have changed."""


@dataclass(frozen=True)
class JobNews:
    """A job as the service knew it at `known_at`.

    `problem` says why nothing newer is known, `gone` that the job was deleted.
    """

    job: Job
    known_at: datetime
    problem: str = ""
    gone: bool = False


@dataclass
class _Followed:
    listeners: list[Callable[[JobNews], None]]
    news: JobNews
    due: float = 0.0
    read_at: float = field(default_factory=time.monotonic)


class Feed:
    """Calls its listeners with what is new; the first listener starts the thread, the last one ends it."""

    def __init__(
        self,
        connect: Callable[[], AsyncClient] = async_client,
        key: Callable[[], object] = connection.key,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`idle`: whether progress need not be looked at, as it is not shown."""
        self._connect = connect
        self._key = key
        self._idle = idle
        self._listeners: list[Listener] = []
        self._jobs: dict[str, _Followed] = {}
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], None] = lambda: None
        self._answered = threading.Event()
        self._live = False
        self.picture = Picture()

    # -- listeners ---------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every picture from now on."""
        with self._lock:
            self._listeners.append(listener)
            started = self._start()
        if not started and self.picture.usage is not None:
            listener(self.picture)
        self._wake()

    def leave(self, listener: Listener, wait: bool = True) -> None:
        """Stop calling `listener`; `wait` for the end of the thread if it was the last one."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
        self._end(wait)

    def first(self, patience: float) -> Picture:
        """Return the picture as soon as the service has answered at all, after `patience` seconds at the latest."""
        self._answered.wait(patience)
        return self.picture

    def follow(self, job: Job, listener: Callable[[JobNews], None], known_at: datetime) -> None:
        """Call `listener` with what is new of a job, until `unfollow`."""
        with self._lock:
            followed = self._jobs.setdefault(job.id, _Followed([], JobNews(job, known_at)))
            followed.listeners.append(listener)
            followed.due = time.monotonic() + MIN_PAUSE
            self._start()
        self._wake()

    def unfollow(self, id: str, listener: Callable[[JobNews], None], wait: bool = False) -> None:
        """Stop calling `listener` about a job."""
        with self._lock:
            followed = self._jobs.get(id)
            if followed is not None and listener in followed.listeners:
                followed.listeners.remove(listener)
                if not followed.listeners:
                    del self._jobs[id]
        self._end(wait)

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call on the feed's thread in some seconds, unless that has ended by then."""
        loop = self._loop
        if loop is not None and self.running:
            _call_soon(loop, lambda: loop.call_later(seconds, call))

    def learn(self, job: Job) -> None:
        """Take a job that this kernel has just read for another purpose: it is shown without another request."""
        with self._lock:
            followed = self._jobs.get(job.id)
        if followed is not None and job.version >= followed.news.job.version:
            self._deliver(followed, JobNews(job, datetime.now(UTC)))

    def news(self, id: str) -> JobNews | None:
        """Return what is known of a job that is followed."""
        with self._lock:
            followed = self._jobs.get(id)
        return None if followed is None else followed.news

    @property
    def running(self) -> bool:
        """Whether the background thread runs."""
        return self._thread is not None and self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Start the thread unless it runs; return whether it was started. A fork has no thread of its parent."""
        if self._thread is not None and self._thread.is_alive():
            return False
        ready = threading.Event()
        self._answered.clear()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True, name="makeway-feed")
        self._thread.start()
        ready.wait(5)
        return True

    def _end(self, wait: bool) -> None:
        with self._lock:
            if self._listeners or self._jobs or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._stop()
        if wait and thread is not threading.current_thread():
            thread.join(5)

    def _run(self, ready: threading.Event) -> None:
        async def work() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            if task is not None:
                self._stop = lambda: _call_soon(loop, task.cancel)
            self._loop = loop
            self._due = asyncio.Event()
            self._changed = asyncio.Event()
            ready.set()
            with suppress(asyncio.CancelledError):
                await self._work()

        asyncio.run(work())

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None and self.running:
            _call_soon(loop, self._due.set)
            _call_soon(loop, self._changed.set)

    async def _work(self) -> None:
        """Follow the service with one client after the other."""
        while True:
            key = self._key()
            try:
                service = self._connect()
            except MakewayError as error:
                self._report(error)
                await asyncio.sleep(POLL)
                continue
            async with service:
                await _first_of(
                    self._stream(service), self._fetch_pictures(service), self._fetch_jobs(service), self._watch(key)
                )

    async def _watch(self, key: object) -> None:
        """Return when address or token have changed."""
        while self._key() == key:  # noqa: ASYNC110 (an environment variable has no event)
            await asyncio.sleep(WATCH)

    async def _stream(self, service: AsyncClient) -> None:
        """Note what each event is about; after a break resume behind the last event seen."""
        last: int | None = None
        pause = 0.5

        def opened() -> None:
            nonlocal pause
            self._live, pause = True, 0.5
            self._all_due()

        while True:
            with suppress(MakewayError):
                async for event in service.events(last, opened):
                    last = event.id
                    self._heard(event)
            if self._live:
                self._live = False
                self._show(replace(self.picture, live=False))
                self._all_due()
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # kernels do not reconnect all at once
            pause = min(pause * 2, MAX_PAUSE)

    def _heard(self, event: Event) -> None:
        self._changed.set()
        id = str(event.data.get("workload") or event.data.get("id") or "")
        if event.kind in ("job", "decision") and id in self._jobs:
            self._jobs[id].due = 0.0
            self._due.set()
        elif event.kind in ("reset", "policy"):
            self._all_due()

    def _all_due(self) -> None:
        self._changed.set()
        for followed in list(self._jobs.values()):
            followed.due = 0.0
        self._due.set()

    async def _fetch_pictures(self, service: AsyncClient) -> None:
        """Read the picture after each change, while there is a listener; return when the token is refused."""
        me: Me | None = None
        self._changed.set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REST if self._live else POLL):
                    await self._changed.wait()
            self._changed.clear()
            if not self._listeners:
                continue
            refused = False
            try:
                if me is None:
                    me = await service.me()
                picture = replace(await _fetch(service, me), live=self._live)
            except MakewayError as error:
                picture = replace(self.picture, problem=_problem(error), live=self._live)
                refused = error.status == 401
            self._show(picture)
            self._answered.set()
            if refused:
                await asyncio.sleep(POLL)
                return
            await asyncio.sleep(MIN_PAUSE)

    async def _fetch_jobs(self, service: AsyncClient) -> None:
        """Read each job that is followed when it is due; return when the token is refused."""
        failures = 0
        while True:
            now = time.monotonic()
            soonest = min((self._due_at(job) for job in list(self._jobs.values())), default=now + REST)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(soonest - now, 0.02)):
                    await self._due.wait()
            self._due.clear()
            for id in [id for id, job in list(self._jobs.items()) if self._due_at(job) <= time.monotonic()]:
                error = await self._fetch_job(service, id)
                failures = 0 if error is None else failures + 1
                if error is None:
                    continue
                self._report_to_jobs(error)
                if error.status == 401:
                    await asyncio.sleep(POLL)
                    return
                await asyncio.sleep(min(2.0 ** min(failures, 8), MAX_PAUSE) * random.uniform(0.5, 1))
                break

    def _due_at(self, followed: _Followed) -> float:
        return max(followed.due, followed.read_at + MIN_PAUSE)

    async def _fetch_job(self, service: AsyncClient, id: str) -> MakewayError | None:
        if (followed := self._jobs.get(id)) is None:
            return None
        followed.due = time.monotonic() + REST  # an event from now on makes it due again
        began, failed = datetime.now(UTC), None
        try:
            news = JobNews(await service.job(id), datetime.now(UTC))
        except MakewayError as error:
            gone = error.status == 404
            if not gone:
                failed = error
            news = replace(followed.news, problem=GONE if gone else _problem(error), gone=gone)
        followed.read_at = time.monotonic()
        followed.due = min(followed.due, followed.read_at + self._pause(news)) if followed.due else 0.0
        overtaken = followed.news.known_at > began and followed.news.job.version > news.job.version
        if failed is None and not overtaken:
            self._deliver(followed, news)
        return failed

    def _pause(self, news: JobNews) -> float:
        """Return the seconds until the next look: progress is no event, and without a stream nothing is one."""
        spaced = SPACING * len(self._jobs)
        if news.job.state is State.RUNNING and not self._idle():
            return max(PROGRESS, spaced)
        return REST if self._live and not news.problem else max(POLL, spaced)

    # -- news --------------------------------------------------------------------------------------------------

    def _deliver(self, followed: _Followed, news: JobNews) -> None:
        with self._lock:
            followed.news = news
            listeners = tuple(followed.listeners)
        for listener in listeners:
            with suppress(Exception):
                listener(news)

    def _report(self, error: MakewayError) -> None:
        self._live = False
        self._show(replace(self.picture, problem=_problem(error), live=False))
        self._answered.set()
        self._report_to_jobs(error)

    def _report_to_jobs(self, error: MakewayError) -> None:
        for followed in list(self._jobs.values()):
            self._deliver(followed, replace(followed.news, problem=_problem(error)))

    def _show(self, picture: Picture) -> None:
        if picture == self.picture:
            self.picture = replace(self.picture, known_at=picture.known_at)
            return
        self.picture = picture
        for listener in tuple(self._listeners):
            # An output that cannot be drawn must not stop the others.
            with suppress(Exception):
                listener(picture)


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Run works side by side until one has ended; end the others, and raise what it raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


async def _fetch(service: AsyncClient, me: Me) -> Picture:
    usage, mine, waiting, sessions = await asyncio.gather(
        service.usage(), service.jobs(mine=True, limit=50), service.jobs(state="pending", limit=50), service.sessions()
    )
    now = datetime.now(UTC)
    return Picture(
        usage=usage,
        teams=tuple(me.teams),
        me=me.name,
        mine=tuple(job for job in mine.jobs if not job.state.ended),
        waiting=tuple(job for job in waiting.jobs if job.state is State.PENDING),
        sessions=tuple(s for s in sessions if s.user == me.name),
        at=now,
        known_at=now,
    )


def _problem(error: MakewayError) -> str:
    if error.code == "unreachable":  # in how many ways it does not answer is no news
        return SILENT
    text = explain(error).message
    return text[:1].upper() + text[1:]


FEED = Feed(idle=lambda: CELLS.idle)
"""The feed of this kernel"""
