"""Known breaches of the engine's rules, each found by random worlds: a mend makes its strict xfail fail."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from engine.engines import ENGINES, differences
from engine.histories import happen, random_world
from engine.properties import check
from makeway_quota.engine import reference, schedule
from makeway_quota.engine.state import LIVE
from makeway_quota.snapshot_file import read_snapshot

OPEN = Path(__file__).parent / "open"


@pytest.mark.xfail(strict=True, reason="the fast engine evicts a gang on lost nodes where the reference shrinks it")
def test_both_engines_shrink_a_gang_of_a_department_on_lost_nodes() -> None:
    snapshot = read_snapshot((OPEN / "lost-departments-730025.yaml").read_text(encoding="utf-8"))
    assert not differences(schedule(snapshot), reference.schedule(snapshot))


@pytest.mark.xfail(strict=True, reason="I7: the next plan evicts work of the preemptor's own team")
def test_planning_again_evicts_no_work_of_the_own_team() -> None:
    random = Random(597)
    world = random_world(random)
    for _ in range(40):
        happen(world, random)
        check(world, ENGINES["fast"], Random(7))
        world.now += random.choice([1, 5, 600])
        world.workloads = {id: each for id, each in world.workloads.items() if each.state in LIVE}
