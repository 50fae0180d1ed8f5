"""Count the CPU time that calls take in the threads of the requests, for those whose work has a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class ThreadTime:
    """The CPU time of calls in other threads; each thread adds its own."""

    calls: list[float] = field(default_factory=list)
    """CPU seconds of each call that has ended"""

    @property
    def seconds(self) -> float:
        """Return the CPU seconds of all calls."""
        return sum(self.calls)


_COUNTED: ContextVar[ThreadTime | None] = ContextVar("counted", default=None)


@contextmanager
def thread_time() -> Iterator[ThreadTime]:
    """Count the calls that `Context.call` makes in threads for this block and the asyncio tasks that begin in it."""
    counted = ThreadTime()
    token = _COUNTED.set(counted)
    try:
        yield counted
    finally:
        _COUNTED.reset(token)


def counting(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function for another thread whose CPU time is counted where the caller's block counts it."""
    counted = _COUNTED.get()
    if counted is None:
        return function

    def measured() -> T:
        before = time.thread_time()
        try:
            return function()
        finally:
            counted.calls.append(time.thread_time() - before)

    return measured
