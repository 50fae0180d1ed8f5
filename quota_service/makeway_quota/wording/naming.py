"""Names: what people call workloads, teams, pools and profiles, of which the engine knows the ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


def _same(id: str) -> str:
    return id


def kind_name(kind: str) -> str:
    """Return what people call a kind of workload: a session is a notebook to them."""
    return "notebook" if kind == "session" else kind


@dataclass(frozen=True, slots=True)
class Names:
    """One lookup for each kind of id. A lookup returns the id where it has no name for it."""

    workload: Callable[[str], str] = _same
    team: Callable[[str], str] = _same
    pool: Callable[[str], str] = _same
    profile: Callable[[str], str] = _same
    reader: str | None = None
    """the team whose members read the sentence: work of other teams has neither name nor owner; None: all have"""

    def to(self, team: str | None) -> Names:
        """Return these names for a sentence that the members of a team read."""
        return replace(self, reader=team or "")

    def work(self, team: str, kind: str, id: str, owner: str) -> str:
        """Return what a sentence calls a workload: `R&D's job “train” of ana`, and `R&D's job` to other teams."""
        whose = f"{self.team(team)}'s {kind_name(kind)}"
        if self.reader is not None and self.reader != team:
            return whose
        return f"{whose} {self.workload(id)}{f' of {owner}' if owner else ''}"


IDS = Names()
"""The ids themselves: for snapshot files, where nothing else is known."""
