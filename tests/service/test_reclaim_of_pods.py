"""Reclaim at the speed of pods: what still terminates is counted once, and evicted for once."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

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
    result = Site(SimulatedCluster(nodes), folder, policy)
    await result.start()
    return result


async def preemptions(found: Site) -> int:
    return sum(row.preemptions + (row.state == "checkpointing") for row in (await found.rows()).values())


@pytest.mark.covers("N33", "F20", "N11")
@pytest.mark.parametrize("saves", [(3, 4, 5, 6), (0.1, 0.2, 0.3, 0.4), (0.0, 0.0, 0.0, 0.0), (1, 9, 2, 9)])
@pytest.mark.parametrize("lingers", [0.0, 0.1, 4.0])
async def test_a_job_of_two_gpus_takes_two_victims_however_slowly_they_save(
    tmp_path: Path, saves: tuple[float, ...], lingers: float
) -> None:
    result = await site(tmp_path, {"n1": 4})
    for number, seconds in enumerate(saves):
        result.cluster.habits[f"r{number}"] = Habits(saves=seconds, lingers=lingers)
        result.submit(f"r{number}", "rnd")
        await result.run(1.0)
    result.submit("d", "devops", "two", gpus=2000)
    await result.run(40.0)
    rows = await result.rows()
    assert rows["d"].state == "running"
    assert await preemptions(result) == 2
    await result.stop()


@pytest.mark.covers("N33", "F20")
@pytest.mark.parametrize("victims", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
async def test_reclaims_in_a_row_take_as_many_victims_as_they_need(tmp_path: Path, victims: int, seed: int) -> None:
    policy = POLICY.replace("reserved: 2", f"reserved: {victims}").replace("gpus: 2", f"gpus: {victims}")
    result = await site(tmp_path, {"n1": victims + 2}, policy)
    random = Random(seed)
    for number in range(victims + 2):
        result.cluster.habits[f"r{number}"] = Habits(
            random.choice([0.0, 0.3, 1.0, 2.0]), lingers=random.choice([0, 0.5])
        )
        result.submit(f"r{number}", "rnd")
        await result.run(0.2)
    await result.run(2.0)
    for number in range(4):
        before = await preemptions(result)
        result.cluster.habits[f"d{number}"] = Habits()
        result.submit(f"d{number}", "devops", "two", gpus=1000 * victims)
        await running(result, f"d{number}")
        assert await preemptions(result) - before == victims
        bound = result.cluster.bound[f"makeway-d{number}-1-0"]
        last = max(at for pod, at in result.cluster.exited.items() if pod.startswith("makeway-r"))
        assert bound - last < 0.5, "the owner's pod is bound as soon as the last victim has ended"
        result.cluster.finish(f"d{number}")
        await result.run(8.0)
    await result.stop()


@pytest.mark.covers("N33", "F20")
async def test_two_jobs_at_once_take_one_victim_each(tmp_path: Path) -> None:
    result = await site(tmp_path, {"n1": 4})
    for number in range(4):
        result.cluster.habits[f"r{number}"] = Habits(saves=number + 1.0, exits=0.2)
        result.submit(f"r{number}", "rnd")
        await result.run(0.5)
    result.submit("d1", "devops")
    result.submit("d2", "devops")
    await running(result, "d1", "d2")
    await result.run(20.0)
    assert await preemptions(result) == 2
    await result.stop()


@pytest.mark.covers("N33", "F20", "N07")
@pytest.mark.parametrize("after", [0.5, 2.02, 2.1, 3.0])
async def test_a_service_that_starts_again_in_between_takes_no_more_victims(tmp_path: Path, after: float) -> None:
    result = await site(tmp_path, {"n1": 3})
    for number in range(3):
        result.cluster.habits[f"r{number}"] = Habits(saves=2.0, lingers=3.0)
        result.submit(f"r{number}", "rnd")
        await result.run(1.0)
    result.submit("d", "devops", "two", gpus=2000)
    await result.run(after)
    await result.restart()
    await running(result, "d")
    await result.run(20.0)
    assert await preemptions(result) == 2
    await result.stop()


@pytest.mark.covers("N33", "F20")
@pytest.mark.parametrize("seconds", [0.3, 5.0, 25.0])
@pytest.mark.parametrize("saves", [1.0, 8.0])
async def test_a_node_that_is_not_ready_for_a_moment_costs_no_second_victim(
    tmp_path: Path, saves: float, seconds: float
) -> None:
    result = await site(tmp_path, {"n1": 1, "n2": 1})
    for number in range(2):
        result.cluster.habits[f"r{number}"] = Habits(saves=saves)
        result.submit(f"r{number}", "rnd")
        await result.run(1.0)
    result.submit("d", "devops")
    await result.run(0.5)
    (victim,) = [row for row in (await result.rows()).values() if row.state == "checkpointing"]
    node = victim.placement[0].node
    result.cluster.set_ready(node, False)
    result.cluster.at(seconds, lambda: result.cluster.set_ready(node, True))
    await result.run(40.0)
    assert (await result.rows())["d"].placement[0].node == node
    assert await preemptions(result) == 1
    await result.stop()


@pytest.mark.covers("N33", "F20")
async def test_a_victim_that_never_ends_is_removed_again_and_again_and_another_one_makes_way(tmp_path: Path) -> None:
    result = await site(tmp_path, {"n1": 1, "n2": 1})
    for number in range(2):
        result.cluster.habits[f"r{number}"] = Habits(stuck=True) if number else Habits()
        result.submit(f"r{number}", "rnd")
        await result.run(1.0)
    result.submit("d", "devops")
    await result.run(80.0)
    rows = await result.rows()
    assert (rows["r1"].state, rows["d"].state, await preemptions(result)) == ("checkpointing", "pending", 1)
    await result.run(20.0)
    rows = await result.rows()
    assert (rows["d"].state, rows["d"].placement[0].node) == ("running", "n1"), "a minute after the deadline of r1"
    assert await preemptions(result) == 2
    await result.run(400.0)
    times = [at for at, pod in result.cluster.deletes if pod == "makeway-r1-1-0"]
    pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert len(pauses) >= 3, "it is deleted again"
    assert pauses == sorted(pauses), "less and less often"
    result.cluster.release("r1")
    await result.run(5.0)
    assert (await result.rows())["r0"].state == "running", "its GPU is used again once it is free"
    await result.stop()


async def running(found: Site, *names: str) -> None:
    """Wait until these jobs run."""
    for _ in range(200):
        rows = await found.rows()
        if all(rows[name].state == "running" for name in names):
            return
        await found.run(0.5)
    raise AssertionError(f"they do not run: {[(rows[name].state, rows[name].reason_message) for name in names]}")
