"""Set aside what a step of the cycle cannot deal with, so that the cycle goes on with everything else.

Each step handles its workloads, nodes and attempts one by one inside of `guard`, or by `sort_out`, which finds the
faulty ones of a batch. What fails is quarantined: that step leaves it alone until it is tried again, less and less
often. Pages and `/readyz` show what is quarantined; a success ends it. Errors that concern everything (the database,
leadership) are never caught here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from makeway_api.quantities import count

from ..store.errors import RowRefused, StoreError

log = logging.getLogger("makeway.quarantine")

T = TypeVar("T")
Kind = Literal["workload", "node", "history"]

FIRST, LONGEST = 2.0, 120.0
"""Seconds until something is tried again, which double from try to try"""
MOST_NAMED = 5
"""Entries that a sentence names"""
MOST_WORDS = 200
"""Characters of an error in a sentence"""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One thing that one step cannot deal with."""

    step: str
    kind: Kind
    name: str
    reason: str
    tries: int
    again_at: float
    """monotonic seconds"""


class Quarantine:
    """What is set aside, by step, kind and name. Used by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[tuple[str, Kind, str], Quarantined] = {}

    def __len__(self) -> int:
        """Return how many workloads, nodes and others are set aside, each counted once."""
        return len({(kind, name) for _, kind, name in self._entries})

    @property
    def entries(self) -> list[Quarantined]:
        """Return what is set aside, sorted by kind and name."""
        return sorted(self._entries.values(), key=lambda entry: (entry.kind, entry.name, entry.step))

    def rests(self, step: str, kind: Kind, name: str) -> bool:
        """Whether a step leaves something alone for now."""
        entry = self._entries.get((step, kind, name))
        return entry is not None and self._clock() < entry.again_at

    def names(self, step: str, kind: Kind) -> set[str]:
        """Return what a step has failed with, and has not dealt with since."""
        return {name for found, of, name in self._entries if (found, of) == (step, kind)}

    def due(self) -> float | None:
        """Return the seconds until something is tried again; None if nothing is set aside."""
        now = self._clock()
        return min((max(0.0, entry.again_at - now) for entry in self._entries.values()), default=None)

    def failed(self, step: str, kind: Kind, name: str, error: Exception) -> Quarantined:
        """Set something aside because of an error; StoreError and the like, which concern everything, are raised."""
        if concerns_all(error):
            raise error
        known = self._entries.get((step, kind, name))
        tries = 1 if known is None else known.tries + 1
        reason = reason_of(error)
        if known is None or known.reason != reason:
            log.error("The %s %s is set aside: %s failed", kind, name, step, exc_info=error)
        delay = min(LONGEST, FIRST * 2.0 ** min(tries - 1, 10))
        entry = Quarantined(step, kind, name, reason, tries, self._clock() + delay)
        self._entries[step, kind, name] = entry
        return entry

    def passed(self, step: str, kind: Kind, name: str) -> None:
        """End the quarantine of something that a step has dealt with."""
        if self._entries and self._entries.pop((step, kind, name), None) is not None:
            log.info("The %s %s is no longer set aside: %s went through", kind, name, step)

    def keep(self, kind: Kind, exists: Callable[[str], bool]) -> None:
        """Forget what is not there any more."""
        for key in [key for key in self._entries if key[1] == kind and not exists(key[2])]:
            del self._entries[key]

    @contextmanager
    def guard(self, step: str, kind: Kind, name: str) -> Iterator[None]:
        """Set something aside if the block fails; ends its quarantine if it does not."""
        try:
            yield
        except Exception as error:
            self.failed(step, kind, name, error)
        else:
            self.passed(step, kind, name)

    def sort_out(self, step: str, kind: Kind, names: Sequence[str], work: Callable[[Sequence[str]], object]) -> None:
        """Do something for all names together; where that fails, set those aside without which it does not.

        `work` must have no effect where it fails, or one that may be repeated.
        """
        try:
            work(names)
        except Exception as error:
            if len(names) <= 1:
                for name in names:
                    self.failed(step, kind, name, error)
                return
            if concerns_all(error):
                raise
            middle = len(names) // 2
            self.sort_out(step, kind, names[:middle], work)
            self.sort_out(step, kind, names[middle:], work)
        else:
            for name in names if self._entries else ():
                self.passed(step, kind, name)

    def sentence(self, *, named: bool) -> str | None:
        """Return what is set aside, `named` with names and reasons; None if nothing is."""
        if not self._entries:
            return None
        things: dict[Kind, set[str]] = {}
        for _, kind, name in self._entries:
            things.setdefault(kind, set()).add(name)
        parts = " and ".join(count(len(names), kind) for kind, names in sorted(things.items()))
        sentence = f"Makeway cannot deal with {parts} at the moment, goes on with all others, and tries again."
        if not named:
            return sentence
        shown = [f"{each.kind} {each.name}: {each.step} failed ({each.reason})" for each in self.entries]
        more = f"; and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        return f"{sentence} {'; '.join(shown[:MOST_NAMED])}{more}. The log of the service has the details."


def concerns_all(error: BaseException) -> bool:
    """Whether an error is not about one thing: the database, or that this replica does not lead."""
    return not isinstance(error, Exception) or (isinstance(error, StoreError) and not isinstance(error, RowRefused))


def reason_of(error: BaseException) -> str:
    """Return an error in some words."""
    said = " ".join(str(error).split())[:MOST_WORDS]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
