"""Reclaim at the speed of pods: what still terminates is counted once, and evicted for once."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_pods import Habits, SimulatedCluster, Site

POLICY = """
version: 1
pools: [{name: p}]
profiles:
  - {name: one, gpus: 1, pools: [p], policies: [[rnd, devops]], grace: 30}
  - {name: two, gpus: 2, pools: [p], policies: [[rnd, devops]], grace: 30}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [p], reserved: 0}]}
  - {name: devops, groups: [devops], quotas: [{pools: [p], reserved: 2}]}
"""


async def site(folder: Path, nodes: dict[str, int], policy: str = POLICY) -> Site:
    found = Site(SimulatedCluster(nodes), folder, policy)
    await found.start()
    return found


async def preemptions(found: Site) -> int:
    return sum(row.preemptions + (row.state == "checkpointing") for row in (await found.rows()).values())


@pytest.mark.covers("N33", "F20", "N11")
@pytest.mark.parametrize("saves", [(3, 4, 5, 6), (0.1, 0.2, 0.3, 0.4), (0.0, 0.0, 0.0, 0.0), (1, 9, 2, 9)])
@pytest.mark.parametrize("lingers", [0.0, 0.1, 4.0])
async def test_a_job_of_two_gpus_takes_two_victims_however_slowly_they_save(
    tmp_path: Path, saves: tuple[float, ...], lingers: float
) -> None:
    found = await site(tmp_path, {"n1": 4})
    for number, seconds in enumerate(saves):
        found.cluster.habits[f"r{number}"] = Habits(saves=seconds, lingers=lingers)
        found.submit(f"r{number}", "rnd")
        await found.run(1.0)
    found.submit("d", "devops", "two", gpus=2000)
    await found.run(40.0)
    rows = await found.rows()
    assert rows["d"].state == "running"
    assert await preemptions(found) == 2
    await found.stop()
