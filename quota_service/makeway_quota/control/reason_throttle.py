"""Choose which reasons of pending workloads are written to the store (only what changed), and when to explain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from ..engine.index.pending import Pending, PendingReason
from ..engine.plan import Code, Waiting
from ..engine.snapshot import Workload as EngineView
from ..quarantine import Quarantine
from ..store.records import Workload
from ..values import places
from ..wording import IDS, Names, sentence

STEP = "putting into words why it waits"
WAITING = frozenset(get_args(Code))
"""Reason codes of the engine; other codes tell what happened before."""

AT_ONCE = 1e9
"""A pace without a limit."""

NOT_BEFORE_SLACK = 5.0
"""Seconds that a forecast may shift before it is written again."""

COMPARED_PER_WRITE = 10
"""Rows that are compared for each one that may be written."""

CATCH_UP = 0.5
"""Seconds after which reasons that could not all be written are looked at again, and whose pace is written at once: a
few rows in each cycle would cost a transaction and another cycle each."""

SHARE = 0.1
"""The part of the time that plans with reasons may take: one that took 10 ms is followed by 90 ms without reasons."""

MAX_PAUSE = 1.0
"""Seconds without reasons, at most."""


class Explaining:
    """Decides which cycles explain why workloads wait: while changes follow each other fast, most of them need not.

    Starts, evictions and nominations do not depend on it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock()
        self._skipped = False

    def due(self) -> bool:
        """Whether the next cycle is to explain."""
        return self._clock() >= self._due

    def done(self, seconds: float) -> None:
        """Note a cycle that explained; planning took so many seconds."""
        self._due = self._clock() + min(MAX_PAUSE, seconds * (1 / SHARE - 1))
        self._skipped = False

    def skipped(self) -> None:
        """Note a cycle that did not explain."""
        self._skipped = True

    def wait(self) -> float | None:
        """Return the seconds until a cycle has to explain what the last ones left out; None where nothing is left."""
        return max(0.0, self._due - self._clock()) if self._skipped else None


@dataclass(slots=True)
class _Group:
    """Pending workloads with the same reason, how many of them were compared, and whether any was written."""

    members: tuple[EngineView, ...]
    reason: PendingReason
    at: int = 0
    wrote: bool = False


class ReasonThrottle:
    """The reasons that are stored, so that only changes are written.

    A first reason and a nomination are written at once. Where only the sentence or its numbers changed, at
    most `pace` rows are written a second (the numbers of thousands change with every start), the others later, in
    batches of half a second.
    Workloads with the same reason are compared together, and only when it is another than before.
    """

    def __init__(
        self, pace: float = 100.0, clock: Callable[[], float] = time.monotonic, quarantine: Quarantine | None = None
    ) -> None:
        self.pace = pace
        self.behind = False
        """Some stored reason is out of date; the next cycle comes soon."""
        self.quarantine = quarantine or Quarantine()
        self._clock = clock
        self._stored: dict[str, tuple[int, Waiting]] = {}
        self._groups: dict[int, _Group] = {}
        self._earned = 2 * pace
        """Rows that may be written, with what a cycle saves for a batch"""
        self._writing = False
        """Whether this cycle writes a batch; others save for the next one."""
        self._at = clock()
        self._last = 0

    def unwritten(
        self,
        pending: Sequence[Waiting],
        rows: Mapping[str, Workload],
        names: Names = IDS,
        *,
        explained: bool = True,
    ) -> list[Waiting]:
        """Return the pending workloads whose stored reason is to be written.

        A plan that was not `explained` has reasons for nominated workloads only; all others keep theirs.
        """
        behind = self.behind
        self._earn()
        single = list(pending.single.values()) if isinstance(pending, Pending) else pending
        result = self._singles(single, rows, names)
        if not explained:
            self.behind |= behind
        elif isinstance(pending, Pending):
            result += self._of_groups(pending, rows, names)
        return result

    def _earn(self) -> None:
        now = self._clock()
        self._earned = min(2 * self.pace, self._earned + (now - self._at) * self.pace)
        self._writing = self._earned >= self.pace * CATCH_UP
        self._at = now
        self.behind = False

    @property
    def _remaining(self) -> float:
        """Return the rows that this cycle may still write."""
        return self._earned if self._writing else 0.0

    # Workloads with a reason of their own

    def _singles(self, pending: Sequence[Waiting], rows: Mapping[str, Workload], names: Names) -> list[Waiting]:
        reason, known_before = {}, self._stored
        result: list[Waiting] = []
        for waiting in pending:
            with self.quarantine.guard(STEP, "workload", waiting.id):
                row = rows[waiting.id]
                known = known_before.get(waiting.id)
                same = known is not None and known[0] == row.version and _alike(known[1], waiting)
                if same or is_stored(row, waiting, names):
                    reason[waiting.id] = row.version, waiting
                elif not may_wait(row, waiting):
                    result.append(waiting)
                elif self._remaining >= 1:
                    self._earned -= 1
                    result.append(waiting)
                else:
                    self.behind = True
        self._stored = reason
        return result

    # Workloads that share a reason

    def _of_groups(self, pending: Pending, rows: Mapping[str, Workload], names: Names) -> list[Waiting]:
        result: list[Waiting] = []
        behind: list[tuple[int, _Group]] = []
        groups: dict[int, _Group] = {}
        for number, members, reason in pending.groups:
            group = self._groups.get(number)
            if group is None or group.members is not members:
                group = _Group(members, reason)
                for shown in members:
                    if shown.nomination or rows[shown.id].reason_code not in WAITING:
                        result.append(reason.to(shown))
            elif not _same(group.reason, reason):
                group.reason, group.at = reason, 0
            groups[number] = group
            if group.at < len(members):
                behind.append((number, group))
        self._groups = groups
        begin = next((at for at, (number, _) in enumerate(behind) if number > self._last), 0)
        chosen = {waiting.id for waiting in result}
        result += self._paced(behind[begin:] + behind[:begin], rows, chosen, names)
        return result

    def _paced(
        self, behind: list[tuple[int, _Group]], rows: Mapping[str, Workload], chosen: set[str], names: Names
    ) -> Iterator[Waiting]:
        """Compare rows of groups with a new reason, as far as the pace allows; `chosen` are already to be written."""
        comparisons = COMPARED_PER_WRITE * max(self._remaining, 1.0)
        for number, group in behind:
            while group.at < len(group.members):
                if self._remaining < 1 or comparisons < 1:
                    self.behind, self._last = True, number
                    return
                waiting = group.reason.to(group.members[group.at])
                comparisons -= 1
                if waiting.id in chosen:
                    group.wrote = True
                elif not self._is_stored(rows[waiting.id], waiting, names):
                    self._earned -= 1
                    group.wrote = True
                    yield waiting
                group.at += 1
                if group.at == len(group.members) and group.wrote:
                    group.at, group.wrote = 0, False  # compare again: the row may have changed in between
                    self.behind = True
                    break

    def _is_stored(self, row: Workload, waiting: Waiting, names: Names) -> bool:
        """Whether the store has this reason; also one that cannot be put into words, which is left as it is."""
        with self.quarantine.guard(STEP, "workload", row.id):
            return is_stored(row, waiting, names)
        return True


def is_stored(row: Workload, waiting: Waiting, names: Names) -> bool:
    """Whether the store has this reason already."""
    if row.reason_code != waiting.code or not _close_enough(row.not_before, waiting.not_before):
        return False
    return _nominated(row, waiting) and row.reason_message == sentence(waiting.facts, names.to(row.team))


def may_wait(row: Workload, waiting: Waiting) -> bool:
    """Whether the stored reason may stay for a moment: there is one, and no nomination begins or ends."""
    return row.reason_code in WAITING and _nominated(row, waiting)


def _nominated(row: Workload, waiting: Waiting) -> bool:
    return row.nomination == places(waiting.nomination) if row.nomination or waiting.nomination else True


def _alike(a: Waiting, b: Waiting) -> bool:
    """Whether two reasons would be written the same."""
    if a is b:
        return True
    same = a.facts == b.facts and a.code == b.code and a.nomination == b.nomination
    return same and _close_enough(a.not_before, b.not_before)


def _same(a: PendingReason, b: PendingReason) -> bool:
    same = a.code == b.code and a.facts == b.facts and a.more == b.more
    return same and _close_enough(a.not_before, b.not_before)


def _close_enough(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= NOT_BEFORE_SLACK
