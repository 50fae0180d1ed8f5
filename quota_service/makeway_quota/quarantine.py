"""Quarantine what a step cannot deal with, so that the service goes on with everything else.

Each step of the cycle, of a backend's observation and of the retention handles its objects one by one inside of
`guard`, or by `sort_out`, which finds the faulty ones of a batch. What fails is quarantined: that step tries it again
after a backoff, which grows from try to try. Pages and `/readyz` show what is quarantined; a success ends it. Errors
that concern everything (the database, leadership) are never caught here; their classes have a true `concerns_all`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from makeway_api.quantities import count

log = logging.getLogger("makeway.quarantine")

Kind = Literal[
    "workload",
    "node",
    "pod",
    "queue",
    "team",
    "pool",
    "profile",
    "person",
    "row",
    "folder",
    "file",
    "deployment",
    "step",
]
"""A `row` is one of the database, a `folder` and a `file` are what ended workloads leave. A `step` is a part of the
cycle, or of the retention, that fails by itself, or with something that it does not name."""

FIRST_DELAY, MAX_DELAY = 2.0, 120.0
"""Seconds until something is tried again, which double from try to try"""
FORGOTTEN_AFTER = 60.0
"""Seconds after which something that no step tried again when it was due is no longer quarantined"""
MAX_NAMED = 5
"""Entries that a sentence names"""
MAX_REASON = 200
"""Characters of an error in a sentence"""

REMEDIES: dict[Kind, str] = {
    "workload": "cancel it and have it submitted again",
    "node": "correct its labels and what it reports, or cordon it",
    "queue": "look at its profile and team in the policy",
    "team": "correct the team in the policy",
    "pool": "correct the pool in the policy",
    "profile": "correct the profile in the policy",
    "pod": "delete the pod if it is not needed",
    "person": "look at what is kept for them in the log of the service",
    "row": "remove it from the database by hand if it stays",
    "folder": "remove it by hand if it stays",
    "file": "remove it by hand if it stays",
    "deployment": "correct its document, or pause it",
    "step": "report the error in the log of the service",
}
"""What an administrator can do, by kind"""
PLURALS: Mapping[Kind, str] = {"person": "people"}


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One thing that one step cannot deal with."""

    step: str
    kind: Kind
    name: str
    error: str
    """the class of the error"""
    reason: str
    """the error in some words, which may name people"""
    tries: int
    since: float
    """Unix seconds"""
    again_at: float
    """monotonic seconds"""

    def message(self, *, whole: bool) -> str:
        """Return which thing it is, since when, the error, and what an administrator can do."""
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M UTC")
        error = self.reason if whole else self.error
        name = "" if self.kind == "step" else f"{self.kind} {self.name}: "
        return f"{name}{self.step} fails since {since} ({error}); {REMEDIES[self.kind]}"


class Quarantine:
    """What is quarantined, by step, kind and name. Used by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._entries: dict[tuple[str, Kind, str], Quarantined] = {}

    @property
    def size(self) -> int:
        """Return how many workloads, nodes and others are quarantined, each counted once."""
        return len({(kind, name) for _, kind, name in self._entries})

    @property
    def entries(self) -> list[Quarantined]:
        """Return what is quarantined, sorted by kind and name."""
        return sorted(self._entries.values(), key=lambda entry: (entry.kind, entry.name, entry.step))

    def is_backing_off(self, step: str, kind: Kind, name: str) -> bool:
        """Whether a step still backs off from something that it failed with."""
        if not self._entries:
            return False
        entry = self._entries.get((step, kind, name))
        return entry is not None and self._clock() < entry.again_at

    def names(self, step: str, kind: Kind) -> set[str]:
        """Return what a step has failed with, and has not dealt with since."""
        return {name for result, of, name in self._entries if (result, of) == (step, kind)}

    def all(self, kind: Kind) -> set[str]:
        """Return everything of a kind that any step has quarantined."""
        return {name for _, of, name in self._entries if of == kind}

    def backing_off(self, steps: Collection[str], kind: Kind) -> set[str]:
        """Return what any of some steps still backs off from."""
        if not self._entries:
            return set()
        now = self._clock()
        result = ((key, entry) for key, entry in self._entries.items() if key[0] in steps and key[1] == kind)
        return {name for (_, _, name), entry in result if now < entry.again_at}

    def due(self) -> float | None:
        """Return the seconds until something is tried again; None if nothing is to be."""
        now = self._clock()
        return min((item.again_at - now for item in self._entries.values() if item.again_at > now), default=None)

    def failed(self, step: str, kind: Kind, name: str, error: Exception, every: float = 0.0) -> Quarantined:
        """Quarantine something because of an error, for `every` seconds at least.

        StoreError and the like, which concern everything, are raised.
        """
        if concerns_all(error):
            raise error
        return self.add(step, kind, name, error, every)

    def add(self, step: str, kind: Kind, name: str, error: Exception, every: float = 0.0) -> Quarantined:
        """Quarantine something as `failed` does, whatever the error: it is known to concern nothing else."""
        known = self._entries.get((step, kind, name))
        tries = 1 if known is None else known.tries + 1
        since = self._wall() if known is None else known.since
        reason = reason_of(error)
        if known is None or known.reason != reason:
            log.error("The %s %s is quarantined: %s failed", kind, name, step, exc_info=error)
        delay = max(every, min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(tries - 1, 10)))
        entry = Quarantined(step, kind, name, type(error).__name__, reason, tries, since, self._clock() + delay)
        self._entries[step, kind, name] = entry
        return entry

    def passed(self, step: str, kind: Kind, name: str) -> None:
        """End the quarantine of something that a step has dealt with."""
        if self._entries and self._entries.pop((step, kind, name), None) is not None:
            log.info("The %s %s is no longer quarantined: %s went through", kind, name, step)

    def keep(self, kind: Kind, exists: Callable[[str], bool]) -> None:
        """Forget what is not there any more."""
        for key in [key for key in self._entries if key[1] == kind and not exists(key[2])]:
            del self._entries[key]

    def tidy(self) -> None:
        """Forget what was due long ago: no step has anything to do with it any more."""
        if self._entries:
            old = self._clock() - FORGOTTEN_AFTER
            for key in [key for key, entry in self._entries.items() if entry.again_at < old]:
                del self._entries[key]

    @contextmanager
    def guard(self, step: str, kind: Kind, name: str) -> Iterator[None]:
        """Quarantine something if the block fails; end its quarantine if it does not."""
        try:
            yield
        except Exception as error:
            self.failed(step, kind, name, error)
        else:
            self.passed(step, kind, name)

    @contextmanager
    def step(self, step: str) -> Iterator[None]:
        """Go on if a part of the cycle fails by itself, or with something that it does not name."""
        with self.guard(step, "step", step):
            yield

    def sort_out(self, step: str, kind: Kind, names: Sequence[str], work: Callable[[Sequence[str]], object]) -> None:
        """Do something for all names together; where that fails, quarantine those without which it does not.

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
        """Return what is quarantined, `named` with names and reasons; None if nothing is."""
        if not self._entries:
            return None
        things: dict[Kind, set[str]] = {}
        for _, kind, name in self._entries:
            things.setdefault(kind, set()).add(name)
        parts = " and ".join(count(len(names), kind, PLURALS.get(kind, "")) for kind, names in sorted(things.items()))
        sentence = f"Makeway cannot deal with {parts} at the moment, goes on with all others, and tries again."
        if not named:
            return sentence
        return f"{sentence} {self.details(whole=True)}. The log of the service has the details."

    def details(self, *, whole: bool) -> str:
        """Return each thing with since when, the error and what to do; without `whole` only the class of the error."""
        shown = [entry.message(whole=whole) for entry in self.entries]
        more = f"; and {len(shown) - MAX_NAMED} more" if len(shown) > MAX_NAMED else ""
        return f"{'; '.join(shown[:MAX_NAMED])}{more}"


def concerns_all(error: BaseException) -> bool:
    """Whether an error is not about one thing: the database, or that this replica does not lead."""
    return not isinstance(error, Exception) or bool(getattr(error, "concerns_all", False))


def reason_of(error: BaseException) -> str:
    """Return an error in some words."""
    message = " ".join(str(error).split())[:MAX_REASON]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
