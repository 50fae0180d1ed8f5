"""Limits, reservations and preemptors that reach over several pools: the invariants, and both engines alike."""

from __future__ import annotations

from random import Random

import pytest
from engine.cascades import come_to_rest
from engine.engines import ENGINES
from engine.histories import HISTORIES
from engine.pooled_worlds import pooled_world
from engine.properties import check
from engine.test_reference import compare

ROWS = ("F14", "F15", "F16", "F17")
WRONG_ONCE = (10, 50, 61, 123, 224, 282, 458, 475, 619, 834, 8000285)
"""Worlds where work in quota once waited for ever, an eviction was needless or led to another, or a check said so."""


def hold_in_all_ways(seed: int) -> None:
    """Compare the engines, and check the invariants of one of them in one plan and until the world comes to rest."""
    engine = ENGINES["fast" if seed % 2 else "reference"]
    compare(pooled_world(Random(seed)))
    check(pooled_world(Random(seed)), engine, Random(7))
    come_to_rest(pooled_world(Random(seed)), engine)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("part", range(4))
def test_the_invariants_hold_over_several_pools(part: int) -> None:
    for seed in range(10 * part, 10 * part + 10):
        hold_in_all_ways(seed)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("seed", WRONG_ONCE)
def test_the_invariants_hold_over_several_pools_where_they_were_broken_once(seed: int) -> None:
    hold_in_all_ways(seed)


@pytest.mark.slow
@pytest.mark.covers(*ROWS)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", range(20))
def test_the_invariants_hold_over_several_pools_at_length(part: int) -> None:
    many = max(1, HISTORIES // 20)
    for seed in range(10**6 + part * many, 10**6 + (part + 1) * many):
        hold_in_all_ways(seed)
