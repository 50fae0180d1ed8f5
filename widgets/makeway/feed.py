"""Keep one live picture of the cluster for all widgets of a kernel, on one background thread.

The thread follows the service's event stream and fetches the state after each event; without a stream it polls every
few seconds, and resumes the stream after the last event it saw. It runs while there is a listener.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from makeway_api.client import AsyncClient
from makeway_api.errors import MakewayError
from makeway_api.models import Me, State

from .connection import async_client, explain
from .teams import Picture

Listener = Callable[[Picture], None]

CALM = 0.25
"""Seconds between fetches at least: a burst of events costs one."""
POLL = 5.0
"""Seconds between fetches while there is no stream."""
REST = 60.0
"""Seconds between fetches while the stream is silent."""
LONGEST_PAUSE = 15.0
"""Seconds between attempts to resume the stream, at most."""


class Feed:
    """Calls its listeners with each new picture; the first listener starts the thread, the last one ends it."""

    def __init__(self, connect: Callable[[], AsyncClient] = async_client) -> None:
        self._connect = connect
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], None] = lambda: None
        self._live = False
        self.picture = Picture()

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every picture from now on."""
        with self._lock:
            self._listeners.append(listener)
            if self._thread is None:
                ready = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True, name="makeway-feed")
                self._thread.start()
                ready.wait(5)
            elif self.picture.usage is not None:
                listener(self.picture)

    def leave(self, listener: Listener) -> None:
        """Stop calling `listener`."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if self._listeners or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._stop()
        if thread is not threading.current_thread():
            thread.join(5)

    @property
    def running(self) -> bool:
        """Whether the background thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, ready: threading.Event) -> None:
        async def work() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            if task is not None:
                self._stop = lambda: _call_soon(loop, task)
            ready.set()
            with suppress(asyncio.CancelledError):
                await self._work()

        asyncio.run(work())

    async def _work(self) -> None:
        async with self._connect() as service:
            changed = asyncio.Event()
            changed.set()
            streaming = asyncio.create_task(self._stream(service, changed))
            try:
                await self._fetch_changes(service, changed)
            finally:
                streaming.cancel()
                with suppress(asyncio.CancelledError):
                    await streaming

    async def _stream(self, service: AsyncClient, changed: asyncio.Event) -> None:
        """Set `changed` at each event; after a break resume behind the last event seen."""
        last: int | None = None
        pause = 0.5

        def opened() -> None:
            nonlocal pause
            self._live, pause = True, 0.5
            changed.set()

        while True:
            with suppress(MakewayError):
                async for event in service.events(last, opened):
                    last = event.id
                    changed.set()
            self._live = False
            changed.set()
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # kernels do not reconnect all at once
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _fetch_changes(self, service: AsyncClient, changed: asyncio.Event) -> None:
        me: Me | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REST if self._live else POLL):
                    await changed.wait()
            changed.clear()
            try:
                if me is None:
                    me = await service.me()
                picture = replace(await _fetch(service, me), live=self._live)
            except MakewayError as error:
                picture = replace(self.picture, problem=_problem(error), live=self._live)
            if replace(picture, at=self.picture.at) != self.picture:
                self.picture = picture
                self._notify()
            await asyncio.sleep(CALM)

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            # A widget that cannot draw must not stop the others.
            with suppress(Exception):
                listener(self.picture)


def _call_soon(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(task.cancel)


async def _fetch(service: AsyncClient, me: Me) -> Picture:
    usage, mine, waiting, sessions = await asyncio.gather(
        service.usage(), service.jobs(mine=True, limit=50), service.jobs(state="pending", limit=50), service.sessions()
    )
    return Picture(
        usage=usage,
        teams=tuple(me.teams),
        me=me.name,
        mine=tuple(job for job in mine.jobs if not job.state.ended),
        waiting=tuple(job for job in waiting.jobs if job.state is State.PENDING),
        sessions=tuple(s for s in sessions if s.user == me.name),
        at=datetime.now(UTC),
    )


def _problem(error: MakewayError) -> str:
    text = explain(error).message
    return text[:1].upper() + text[1:]


FEED = Feed()
