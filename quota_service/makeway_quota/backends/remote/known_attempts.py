"""What a backend remembers of attempts elsewhere besides their reports: ends that were ordered, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...values import Notice
from ..base import AttemptSeen, Key

LONGEST_PAUSE = 300.0
"""Seconds between two removals of machines that stay."""


@dataclass(slots=True)
class Ending:
    """An end that was ordered: from when on the machines are removed (monotonic), and the notice, None for a kill."""

    remove_at: float
    notice: Notice | None = None
    removed: bool = False
    """whether a removal was accepted; one whose machines stay is ordered again"""
    problem: str = ""
    """why the machines could not be removed at the last try"""
    pause: float = 0.0
    """the seconds before the last try"""
    tries: int = 0
    """how often the machines were removed, or that was tried"""

    def try_again(self, now: float, first: float) -> None:
        """Make the next removal wait for twice as long as this one did; `first` seconds the first time."""
        self.pause = min(LONGEST_PAUSE, 2.0 * self.pause) if self.pause else first
        self.remove_at = now + self.pause


@dataclass(slots=True)
class Known:
    """What this process remembers of attempts; another one finds it again."""

    endings: dict[Key, Ending] = field(default_factory=dict)
    absent_since: dict[Key, float] = field(default_factory=dict)
    unheard_since: dict[Key, float] = field(default_factory=dict)
    """when the machines of attempts were there first, with workers that have not reported yet"""
    ended_since: dict[Key, float] = field(default_factory=dict)
    """when attempts reported first that something killed or stopped them, while their machines were still there"""
    lost: dict[Key, AttemptSeen] = field(default_factory=dict)
    """ends that no worker reported, as this replica concluded them while it led"""
    silent: frozenset[Key] = frozenset()
    """attempts with a silent worker at the last observation"""

    def order_end(self, key: Key, ending: Ending) -> None:
        """Remember an end that was ordered, unless an earlier one was."""
        known = self.endings.get(key)
        if known is None or (not known.removed and not known.pause and ending.remove_at < known.remove_at):
            self.endings[key] = ending

    def timed(self, unheard_before: float) -> set[Key]:
        """Return the attempts that a moment may change, and not only a report.

        Workers that have not reported change theirs when they are unheard of since a moment.
        """
        unheard = [key for key, since in self.unheard_since.items() if since <= unheard_before]
        return {*self.endings, *self.absent_since, *self.ended_since, *unheard, *self.silent}

    def drop(self, key: Key) -> None:
        """Forget an attempt."""
        for by_key in (self.endings, self.absent_since, self.unheard_since, self.ended_since, self.lost):
            by_key.pop(key, None)
