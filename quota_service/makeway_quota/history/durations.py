"""Estimate how long jobs run, from the past runs of the same kind, for forecasts.

A forecast ("not before") has to hold, so the estimate is a low quantile of the known runs: of the same owner where
there are enough, else of the whole team.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from ..engine.snapshot import ADMITTED
from ..store.records import PastRun, Workload

QUANTILE = 0.1
"""The part of similar jobs that may end sooner than estimated."""

ENOUGH = 3
"""Runs that an estimate needs at least."""

KEPT = 50
"""The last runs that are kept of each kind."""

KINDS = 20_000
"""The kinds of jobs that are kept: those with the latest runs."""

Kind = tuple[str, str | None, str]
"""Team, owner (None: all) and profile."""


class Durations:
    """The last runs of every kind of job, and the estimates from them.

    Threads may read estimates while the event loop adds runs: the runs of a kind are replaced, never changed.
    """

    def __init__(self, past: Iterable[PastRun] = ()) -> None:
        self._runs: OrderedDict[Kind, tuple[float, ...]] = OrderedDict()
        self._answers: dict[Kind, tuple[tuple[float, ...], float | None]] = {}
        """The estimate of a kind, with the runs that it was made of"""
        self.add(past)

    def add(self, past: Iterable[PastRun]) -> None:
        """Add runs, oldest first."""
        for run in past:
            if run.team is not None and run.seconds > 0:
                for kind in ((run.team, run.owner, run.profile), (run.team, None, run.profile)):
                    self._remember(kind, run.seconds)

    def learn(self, row: Workload) -> bool:
        """Add the run of an ended job, over all its attempts; other rows change nothing.

        Return whether there is an estimate now for the team's jobs on this profile that was missing before.
        """
        if row.kind != "job" or row.live or row.team is None:
            return False
        kinds: tuple[Kind, ...] = ((row.team, row.owner, row.profile), (row.team, None, row.profile))
        before = [self._known(kind) for kind in kinds]
        self.add((PastRun(row.team, row.owner, row.profile, row.ran),))
        return None in before and [self._known(kind) for kind in kinds].count(None) < before.count(None)

    def _remember(self, kind: Kind, seconds: float) -> None:
        self._runs[kind] = (*self._runs.get(kind, ())[1 - KEPT :], seconds)
        self._runs.move_to_end(kind)
        if len(self._runs) > KINDS:
            forgotten, _ = self._runs.popitem(last=False)
            self._answers.pop(forgotten, None)

    def expected(self, team: str, owner: str, profile: str) -> float | None:
        """Return a low estimate of the seconds such a job runs in total; None where too few runs are known."""
        mine = self._known((team, owner, profile))
        return mine if mine is not None else self._known((team, None, profile))

    def remaining(self, row: Workload, now: float) -> float | None:
        """Return a low estimate of the seconds of the present attempt: earlier attempts count as done.

        For a job that has outrun the estimate, only longer runs count.
        """
        if row.kind != "job" or row.team is None or row.state not in ADMITTED:
            return None
        total = self.expected(row.team, row.owner, row.profile)
        if total is None:
            return None
        so_far = row.ran + max(0.0, now - row.started_at) if row.started_at is not None else row.ran
        if total <= so_far:
            total = self._longer((row.team, row.owner, row.profile), so_far)
        return None if total is None else max(0.0, total - row.ran)

    def _longer(self, kind: Kind, than: float) -> float | None:
        """Return a low quantile of the runs that were longer; None without any."""
        team, _, profile = kind
        for group in (kind, (team, None, profile)):
            longer = [seconds for seconds in self._runs.get(group, ()) if seconds > than]
            if longer:
                return low(longer, QUANTILE)
        return None

    def _known(self, kind: Kind) -> float | None:
        runs = self._runs.get(kind)
        if runs is None:
            return None  # not kept: there may be any number of kinds without a run
        known = self._answers.get(kind)
        if known is None or known[0] is not runs:
            known = runs, low(runs, QUANTILE) if len(runs) >= ENOUGH else None
            self._answers[kind] = known
        return known[1]


def low(runs: Iterable[float], part: float) -> float:
    """Return the length that the next run stays below in at most `part` of all cases.

    Of n runs the next one is shorter than the k-th shortest with a chance of k in n + 1; k is 1 at least.
    """
    ordered = sorted(runs)
    return ordered[max(1, math.floor(part * (len(ordered) + 1))) - 1]
