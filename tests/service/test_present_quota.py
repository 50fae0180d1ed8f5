"""Who is over quota is what holds by the policy in force, on every way to a person, not what held at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_quota.policy import read_policy
from makeway_quota.services.jobs.listing import ListQuery
from running import PEOPLE, Running, running

POLICY = """
version: 1
pools: [{name: gpu, size: 10, nodes: {local: {gpus: all}}}]
profiles:
  - {name: gpu2, title: 2 GPUs, gpus: 2, pools: [gpu], policies: [[a, b]], kinds: [job, session]}
policies:
  - {name: a, title: Team A, groups: [rnd], quotas: [{pools: [gpu], reserved: 4}]}
  - {name: b, title: Team B, groups: [devops], quotas: [{pools: [gpu], reserved: 4}]}
"""


def use(run: Running, reserved: int) -> None:
    """Apply a policy that reserves so much for team A."""
    world = run.service.services.context.world
    world.use(
        read_policy(POLICY.replace("reserved: 4", f"reserved: {reserved}", 1), "p.yaml"), world.policy_version + 1
    )


async def shown(run: Running) -> dict[str, bool]:
    """Return the names of the running jobs to whether they are over quota; every way must say the same."""
    ana = run.client("ana")
    jobs = (await ana.jobs()).jobs
    result = {job.name: job.over_quota for job in jobs}
    for job in jobs:
        whole = await ana.job(job.id)
        for item in (job, whole):
            assert item.over_quota == result[job.name]
            assert item.reason is not None
            assert item.reason.code == ("running_over_quota" if item.over_quota else "running")
            assert ("within the team's reservation" in item.reason.message) is not item.over_quota
    lines = (await run.service.services.listings.listing(PEOPLE["ana"], ListQuery("running"))).lines
    assert {line.name: line.over_quota for line in lines if line.is_job} == result
    pools = await ana.pools()
    holders = [h for pool in pools for node in pool.nodes for device in node.devices for h in device.holders]
    assert {holder.name: holder.over_quota for holder in holders if holder.kind == "job"} == result
    return result


@pytest.mark.covers("F28", "F44")
async def test_a_change_of_the_policy_is_shown_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        for name in ("j1", "j2", "j3"):
            await run.job((await run.submit("ana", name, profile="gpu2")).id, "running")
        assert await shown(run) == {"j1": False, "j2": False, "j3": True}
        borrowed = next(job for job in (await run.client("ana").jobs()).jobs if job.name == "j3")
        use(run, 6)
        assert await shown(run) == {"j1": False, "j2": False, "j3": False}
        assert not (await run.client("ana").job(borrowed.id)).borrowed_from
        use(run, 2)
        assert await shown(run) == {"j1": False, "j2": True, "j3": True}
        use(run, 0)
        assert await shown(run) == {"j1": True, "j2": True, "j3": True}


@pytest.mark.covers("F28", "F44")
async def test_what_ends_brings_the_others_back_into_the_reservation(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        ids = []
        for name in ("j1", "j2", "j3"):
            ids.append((await run.submit("ana", name, profile="gpu2")).id)
            await run.job(ids[-1], "running")
        await run.client("ana").cancel(ids[0])
        await run.job(ids[0], "cancelled")
        jobs = {job.name: job for job in (await run.client("ana").jobs(state="running")).jobs}
        assert {name: job.over_quota for name, job in jobs.items()} == {"j2": False, "j3": False}
        assert not jobs["j3"].borrowed_from
