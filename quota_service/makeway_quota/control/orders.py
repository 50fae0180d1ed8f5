"""Send the orders of several backends side by side, and repeat those that one refused: the attempt stays.

Used by `Actuator`, and by the loop, which runs a cycle when the next try is due. Orders that go to the same backends
keep their order: they have one lane. A lane that is not done after a moment ends what is under way while the cycle goes
on and later ones run; what it had not sent yet is left to them, as every order follows from the store and may be given
again. Another process starts anew.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple

from ..backends.base import Key

FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
"""Seconds between two tries of one attempt, which double from the first to the longest."""
DIGITS = re.compile(r"\d+")


class OrderRetries:
    """When each attempt that was refused is tried again; another process begins anew."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._refused: dict[Key, tuple[float, float]] = {}
        """the monotonic time of the next try of an attempt, and the seconds before it"""

    def wait(self, key: Key) -> bool:
        """Whether an attempt was refused too recently to be tried again."""
        return key in self._refused and self._monotonic() < self._refused[key][0]

    def refused(self, key: Key) -> None:
        """Postpone the next try of an attempt, twice as long as the last time."""
        pause = min(MAX_PAUSE, 2.0 * self._refused[key][1]) if key in self._refused else FIRST_PAUSE
        self._refused[key] = self._monotonic() + pause, pause

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all other attempts."""
        self._refused = {key: times for key, times in self._refused.items() if key in keys}

    def due(self) -> float | None:
        """Return the seconds until the next try of any attempt, at least FIRST_PAUSE; None where none was refused."""
        if not self._refused:
            return None
        return max(FIRST_PAUSE, min(at for at, _ in self._refused.values()) - self._monotonic())


def alike(item: str | None, other: str) -> bool:
    """Whether two reasons differ in nothing but numbers, such as the port of a connection."""
    return item is not None and DIGITS.sub("#", item) == DIGITS.sub("#", other)


def sentence(error: Exception) -> str:
    """Return an error as a sentence for people: of a system error only its text and the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__


PATIENCE = 1.0
"""Seconds that a cycle waits for the lanes, where there are several."""
MAX_LATE = 1000
"""Attempts of one lane that come after others"""

Route = tuple[str, ...]
"""The names of the backends that an order goes to."""


class Order(NamedTuple):
    """An order about an attempt, as far as one is needed when its time comes."""

    key: Key
    route: Route
    send: Callable[[], Awaitable[None]]


class Lane:
    """The orders of one route. `late` are the attempts that a cycle waited for in vain: they come after all others."""

    def __init__(self) -> None:
        self.late: dict[Key, None] = {}
        self.task: asyncio.Task[None] | None = None
        """sends the orders of a cycle, perhaps of an earlier one"""
        self._closed = False
        self._under_way: dict[Key, None] = {}

    @property
    def busy(self) -> bool:
        """Whether something of an earlier cycle is under way."""
        return self.task is not None and not self.task.done()

    def begin(self, orders: Sequence[Order], at_once: int, done: set[Key]) -> asyncio.Task[None]:
        """Begin to send orders, as `send` does; raise the error of the last ones if no cycle has seen it."""
        self.take_error()
        self.task = asyncio.create_task(self.send(orders, at_once, done))
        return self.task

    async def send(self, orders: Sequence[Order], at_once: int, done: set[Key]) -> None:
        """Send orders, `at_once` at a time, until one fails; its error is raised once those under way have ended."""
        self._closed, errors = False, list[Exception]()
        rank = {key: number for number, key in enumerate(self.late, 1)}
        room = asyncio.Semaphore(at_once)

        async def send_one(order: Order) -> None:
            async with room:
                if errors or self._closed:
                    return
                self._under_way[order.key] = None
                try:
                    await order.send()
                except Exception as error:
                    errors.append(error)
                finally:
                    self._under_way.pop(order.key, None)
                done.add(order.key)
                if not self._closed:
                    self.late.pop(order.key, None)

        ordered = sorted(orders, key=lambda order: rank.get(order.key, 0))
        if at_once == 1:
            for order in ordered:
                await send_one(order)
        else:
            await asyncio.gather(*(send_one(order) for order in ordered))
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Begin no further order; what is under way comes after all others from now on."""
        self._closed = True
        for key in self._under_way:
            self.late.pop(key, None)
            self.late[key] = None
        for key in list(self.late)[:-MAX_LATE]:
            del self.late[key]

    def take_error(self) -> None:
        """Raise the error with which the last orders ended, once."""
        task, self.task = self.task, None
        if task is not None and not task.cancelled() and (error := task.exception()) is not None:
            raise error


class OrderLanes:
    """One lane for each route. For one event loop."""

    def __init__(self, patience: float | None, wake: Callable[[], None] = lambda: None) -> None:
        """`patience` None: all is waited for; `wake` is called when something is done that no cycle waits for."""
        self.patience, self.wake = patience, wake
        self._lanes: dict[Route, Lane] = {}

    async def send(self, orders: Sequence[Order], at_once: Callable[[Route], int]) -> set[Key]:
        """Send orders, `at_once(route)` of a lane at a time; return the attempts of those that are not done yet."""
        done, by_route = set[Key](), dict[Route, list[Order]]()
        for order in orders:
            by_route.setdefault(order.route, []).append(order)
        if self.patience is None:
            for route, each in by_route.items():
                await Lane().send(each, at_once(route), done)
            return set()
        lanes = {route: self._lanes.setdefault(route, Lane()) for route in by_route}
        free = [lane for lane in lanes.values() if not lane.busy]
        tasks = [lane.begin(by_route[route], at_once(route), done) for route, lane in lanes.items() if lane in free]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=self.patience)
        finally:
            for lane, task in zip(free, tasks, strict=True):
                if not task.done():
                    lane.close()
                    task.add_done_callback(lambda task: self.wake())
        for lane in free:
            if not lane.busy:
                lane.take_error()
        return {order.key for order in orders} - done

    @property
    def busy(self) -> bool:
        """Whether an order of an earlier cycle is under way."""
        return any(lane.busy for lane in self._lanes.values())

    def drop(self) -> list[asyncio.Task[None]]:
        """Break off what is under way, and return it."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None and lane.busy]
        for task in tasks:
            task.cancel()
        self._lanes = {}
        return tasks

    async def close(self) -> None:
        """Break off what is under way, and wait until it has ended."""
        await asyncio.gather(*self.drop(), return_exceptions=True)
