"""Format teams and quantities for pages: colours, titles, sizes of cells."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from makeway_api.models import Pool

LARGE, NORMAL = (74, 58), (48, 42)
"""Width and height of a GPU's cell, in pixels."""
NORMAL_FROM, HEAT_FROM = 17, 97
"""GPUs of a pool from which on cells are drawn smaller, and from which on the pool is drawn as a heat map."""

SALT = 136
"""Chosen so that the sample teams get the first two colours."""
SLOTS = 10
"""Colours in the style sheet (`.t0` … `.t9`), distinguishable with every common colour blindness."""


@dataclass(frozen=True, slots=True)
class Display:
    """How a page shows teams, profiles and jobs: a class and a title for each team, and where jobs are shown."""

    classes: Mapping[str, str]
    titles: Mapping[str, str]
    jobs: str
    devices: int = 0
    """number of cells on the page"""
    linked: frozenset[str] | None = None
    """teams whose jobs the visitor may open; None: all"""
    profiles: Mapping[str, str] = field(default_factory=dict)
    """titles of the profiles"""

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of a cell."""
        return NORMAL if self.devices >= NORMAL_FROM else LARGE

    def opens(self, team: str) -> bool:
        """Whether the visitor may open a job of this team."""
        return self.linked is None or team in self.linked

    def colour(self, team: str) -> str:
        """Return the class of a team; grey for one that the page does not know."""
        return self.classes.get(team, "tx")

    def title(self, team: str) -> str:
        """Return the title of a team."""
        return self.titles.get(team) or team

    def profile(self, name: str) -> str:
        """Return the title of a profile; its name if the policy has it no more."""
        return self.profiles.get(name) or name


def is_large(pool: Pool) -> bool:
    """Whether a pool is drawn as a heat map instead of one cell for each GPU."""
    return pool.total >= HEAT_FROM


def colours(teams: Iterable[str]) -> Mapping[str, str]:
    """Return a class `t0` … `t9` for each team: the same on every page and after every restart.

    A team's slot comes from its name; where two names meet, the later one in the alphabet takes the next free slot,
    so that colours only repeat when there are more teams than colours.
    """
    taken: dict[int, str] = {}
    given: dict[str, str] = {}
    for team in sorted(set(teams)):
        slot = zlib.crc32(f"{SALT}{team}".encode()) % SLOTS
        if len(taken) < SLOTS:
            while slot in taken:
                slot = (slot + 1) % SLOTS
            taken[slot] = team
        given[team] = f"t{slot}"
    return given
