"""Assign colours to teams: the same on every page and after every restart."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

SALT = 136
"""Chosen so that the sample teams get the first two colours."""
SLOTS = 10
"""Colours in the style sheet (`.t0` … `.t9`), distinguishable with every common colour blindness."""


def colours(teams: Iterable[str]) -> Mapping[str, str]:
    """Return a class `t0` … `t9` for each team.

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
