"""Names: what people call workloads, teams, pools and profiles, of which the engine knows the ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _same(id: str) -> str:
    return id


@dataclass(frozen=True, slots=True)
class Names:
    """One lookup for each kind of id. A lookup returns the id where it has no name for it."""

    workload: Callable[[str], str] = _same
    team: Callable[[str], str] = _same
    pool: Callable[[str], str] = _same
    profile: Callable[[str], str] = _same


IDS = Names()
"""The ids themselves: for snapshot files, where nothing else is known."""
