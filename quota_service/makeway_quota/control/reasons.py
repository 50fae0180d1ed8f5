"""What those who wait are told, so that only news is written to the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from ..engine.index.pending import Pending, PendingReason
from ..engine.plan import Code, Waiting
from ..engine.state import Workload as EngineView
from ..store.records import Workload
from ..wording import IDS, Names, sentence
from .pool_assignment import places

WAITING = frozenset(get_args(Code))
"""Reasons that the engine gave; other codes say what happened before."""

AT_ONCE = 1e9
"""A pace that nobody is too many for."""

NOT_BEFORE_SLACK = 5.0
"""Seconds that a forecast may shift before it is written again."""

LOOKS = 10
"""So many are looked at for each that may be written."""


@dataclass(slots=True)
class _Group:
    """Those who wait for the same reason: whom it was told to, from the first on, and whether anything was written."""

    members: tuple[EngineView, ...]
    told: PendingReason
    at: int = 0
    wrote: bool = False


class Reasons:
    """What those who wait were told, so that only news is written.

    A first reason and a nomination are written at once. Where only the sentence or its numbers changed, at
    most `pace` are written a second (thousands may wait, and their numbers change with every start), the others later.
    Those who wait for the same reason are looked at together, and only when it is another than before.
    """

    def __init__(self, pace: float = 100.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.pace = pace
        self.behind = False
        """Somebody's sentence is not what it should be; look again soon."""
        self._clock = clock
        self._told: dict[str, tuple[int, Waiting]] = {}
        self._groups: dict[int, _Group] = {}
        self._left = 2 * pace
        self._at = clock()
        self._last = 0

    def news(self, pending: Sequence[Waiting], rows: Mapping[str, Workload], names: Names = IDS) -> list[Waiting]:
        """Choose whom to write to."""
        self._earn()
        single = list(pending.single.values()) if isinstance(pending, Pending) else pending
        found = self._singles(single, rows, names)
        if isinstance(pending, Pending):
            found += self._of_groups(pending, rows, names)
        return found

    def _earn(self) -> None:
        now = self._clock()
        self._left = min(2 * self.pace, self._left + (now - self._at) * self.pace)
        self._at = now
        self.behind = False

    # Who is told something of its own

    def _singles(self, pending: Sequence[Waiting], rows: Mapping[str, Workload], names: Names) -> list[Waiting]:
        told, known_before = {}, self._told
        found: list[Waiting] = []
        for waiting in pending:
            row = rows[waiting.id]
            known = known_before.get(waiting.id)
            same = known is not None and known[0] == row.version and _alike(known[1], waiting)
            if same or is_told(row, waiting, names):
                told[waiting.id] = row.version, waiting
            elif not may_wait(row, waiting):
                found.append(waiting)
            elif self._left >= 1:
                self._left -= 1
                found.append(waiting)
            else:
                self.behind = True
        self._told = told
        return found

    # Who is told the same as others

    def _of_groups(self, pending: Pending, rows: Mapping[str, Workload], names: Names) -> list[Waiting]:
        found: list[Waiting] = []
        behind: list[tuple[int, _Group]] = []
        groups: dict[int, _Group] = {}
        for number, members, told in pending.groups:
            group = self._groups.get(number)
            if group is None or group.members is not members:
                group = _Group(members, told)
                for shown in members:
                    if shown.nomination or rows[shown.id].reason_code not in WAITING:
                        found.append(told.to(shown))
            elif not _same(group.told, told):
                group.told, group.at = told, 0
            groups[number] = group
            if group.at < len(members):
                behind.append((number, group))
        self._groups = groups
        begin = next((at for at, (number, _) in enumerate(behind) if number > self._last), 0)
        chosen = {waiting.id for waiting in found}
        found += self._paced(behind[begin:] + behind[:begin], rows, chosen, names)
        return found

    def _paced(
        self, behind: list[tuple[int, _Group]], rows: Mapping[str, Workload], chosen: set[str], names: Names
    ) -> Iterator[Waiting]:
        """Go through those who may not have been told yet, as far as the pace allows; `chosen` are being told."""
        looks = LOOKS * max(self._left, 1.0)
        for number, group in behind:
            while group.at < len(group.members):
                if self._left < 1 or looks < 1:
                    self.behind, self._last = True, number
                    return
                waiting = group.told.to(group.members[group.at])
                looks -= 1
                if waiting.id in chosen:
                    group.wrote = True
                elif not is_told(rows[waiting.id], waiting, names):
                    self._left -= 1
                    group.wrote = True
                    yield waiting
                group.at += 1
                if group.at == len(group.members) and group.wrote:
                    group.at, group.wrote = 0, False  # look once more: somebody else may have written in between
                    self.behind = True
                    break


def is_told(row: Workload, waiting: Waiting, names: Names) -> bool:
    """Whether the store has this reason already."""
    if row.reason_code != waiting.code or not _close_enough(row.not_before, waiting.not_before):
        return False
    return _nominated(row, waiting) and row.reason_message == sentence(waiting.facts, names)


def may_wait(row: Workload, waiting: Waiting) -> bool:
    """Say whether the reason in the store will do for a moment: there is one, and no nomination begins or ends."""
    return row.reason_code in WAITING and _nominated(row, waiting)


def _nominated(row: Workload, waiting: Waiting) -> bool:
    return row.nomination == places(waiting.nomination) if row.nomination or waiting.nomination else True


def _alike(a: Waiting, b: Waiting) -> bool:
    """Say whether two reasons would be written the same."""
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
