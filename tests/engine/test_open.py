"""Known breaches of the engine's rules, each found by random worlds: a mend makes its strict xfail fail."""

from __future__ import annotations

from random import Random

import pytest
from engine.engines import ENGINES
from engine.mixed_worlds import contended_world, in_two_pools
from engine.properties import check


@pytest.mark.xfail(strict=True, reason="I4: one eviction too many for a job that may run in either of two pools")
@pytest.mark.parametrize("engine", ENGINES)
def test_no_victim_is_needless_in_two_pools(engine: str) -> None:
    check(in_two_pools(contended_world(Random(1002067)), Random(1002067)), ENGINES[engine], Random(7))
