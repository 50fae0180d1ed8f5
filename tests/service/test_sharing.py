"""Greedy teams, scattered GPUs and idle ones: the three old problems, with real processes on virtual nodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from running import Running, running

FORTY = """
version: 1
pools: [{name: gpu, size: 40, nodes: {local: {gpus: all}}}]
profiles:
  - {name: gpu1, title: 1 GPU, gpus: 1, pools: [gpu], policies: [[a, b]]}
  - {name: gpu2, title: 2 GPUs, gpus: 2, pools: [gpu], policies: [[a, b]]}
  - {name: gpu3, title: 3 GPUs, gpus: 3, pools: [gpu], policies: [[a, b]]}
  - {name: gpu8, title: 8 GPUs, gpus: 8, pools: [gpu], policies: [[a, b]]}
policies:
  - {name: a, title: Team A, groups: [rnd], quotas: [{pools: [gpu], reserved: 20, limit: 40}]}
  - {name: b, title: Team B, groups: [devops], quotas: [{pools: [gpu], reserved: 20, limit: 40}]}
"""


async def by_node(run: Running) -> dict[str, int]:
    """GPUs in use on each node."""
    pools = await run.client("root").pools()
    return {node.name: sum(not device.free for device in node.devices) for pool in pools for node in pool.nodes}


async def ran(run: Running, team: str, count: int) -> list[str]:
    """Wait until so many of a team's jobs run; their names."""

    async def there() -> list[str]:
        names = [name for name, state in (await run.states(team)).items() if state == "running"]
        return sorted(names) if len(names) == count else []

    result: list[str] = await run.until(there, f"{count} jobs of {team} run")
    return result


@pytest.mark.covers("F39", "F40", "F29")
async def test_greedy_team_makes_way_by_itself(tmp_path: Path) -> None:
    async with running(tmp_path, FORTY, gpus=40, nodes=4) as run:
        for i in range(15):
            await run.submit("ana", f"a{i:02}", profile="gpu2")
        await ran(run, "a", 15)
        assert await run.used() == {"a": 30, "b": 0, "idle": 10}
        jobs = [await run.submit("bo", f"b{i:02}", profile="gpu2") for i in range(10)]
        reclaimed = [job for job in jobs if job.reason and job.reason.code == "reclaiming"]
        assert reclaimed, "B is told that its GPUs are on their way"
        assert "Team A's job" in reclaimed[0].reason.message
        assert "within 30 s" in reclaimed[0].reason.message
        await ran(run, "b", 10)
        await run.converged()
        assert await run.used() == {"a": 20, "b": 20, "idle": 0}
        remaining = [name for name, state in (await run.states("a")).items() if state == "pending"]
        assert sorted(remaining) == ["a10", "a11", "a12", "a13", "a14"], "the newest of the borrowed ones"
        victim = next(job for job in (await run.client("ana").jobs(team="a")).jobs if job.name == "a14")
        told = [d for d in await run.client("ana").job_events(victim.id) if d.verb == "evict"]
        assert len(told) == 1
        assert "Team B" in told[0].message


@pytest.mark.covers("F41", "F42")
async def test_jobs_are_packed_so_that_a_big_one_starts_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, FORTY, gpus=40, nodes=4) as run:
        for i in range(6):
            await run.submit("ana", f"a{i}", profile="gpu3")
        await ran(run, "a", 6)
        assert Counter((await by_node(run)).values()) == Counter({9: 2, 0: 2})
        await run.submit("bo", "big", profile="gpu8")
        await ran(run, "b", 1)
        assert set((await run.states("a")).values()) == {"running"}, "no job was moved or stopped"


@pytest.mark.covers("F27", "F28", "F34", "F37", "F43", "F44")
async def test_idle_gpus_are_lent_and_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, FORTY, gpus=40, nodes=4) as run:
        for i in range(20):
            await run.submit("ana", f"a{i:02}", profile="gpu2")
        await ran(run, "a", 20)
        usage = {team.team: team for team in (await run.client("root").usage()).teams}
        assert (usage["a"].used, usage["a"].borrowed, usage["b"].lent) == (40, 20, 20)
        assert [(lent.team, lent.gpus) for lent in usage["a"].borrowed_from] == [("b", 20)]
        borrowed = next(job for job in (await run.client("ana").jobs()).jobs if job.name == "a19")
        assert borrowed.over_quota
        assert borrowed.reason.message == (
            "Runs over quota on 2 GPUs: it makes way when a team needs GPUs that it reserved (no checkpoint yet)."
        )
        big = await run.submit("bo", "b0", profile="gpu8")
        await run.job(big.id, "running")
        await run.converged()
        waiting = sorted(name for name, state in (await run.states("a")).items() if state == "pending")
        assert waiting == ["a16", "a17", "a18", "a19"], "the borrowed ones leave, newest first"
        await run.client("bo").cancel(big.id)
        await ran(run, "a", 20)
        assert {job.attempt for job in (await run.client("ana").jobs()).jobs if job.name in waiting} == {2}
