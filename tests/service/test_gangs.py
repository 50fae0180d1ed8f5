"""Gangs through the whole service: an elastic one makes room with some of its workers and goes on with the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.models import Job
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from running import Running, running

POLICY = """
version: 1
pools: [{name: h100}]
profiles:
  - {name: elastic, gpus: 4, workers: 3, min_workers: 1, kinds: [job], policies: [[rnd, devops]]}
  - {name: gpu4, gpus: 4, policies: [[rnd, devops]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{reserved: 4}]}
  - {name: devops, groups: [devops], quotas: [{reserved: 8}]}
"""
NODES = [NodeStatus(name, "", tuple(range(4)), virtual=True) for name in ("n1", "n2", "n3")]


def nodes(job: Job) -> list[str]:
    return sorted(place.node for place in job.placement)


async def workers(run: Running, backend: MemoryBackend, job: Job, attempt: int) -> list[str]:
    """Return the places of an attempt's workers, once it was ordered to start."""
    key = (job.id, attempt)
    await run.until(lambda: key in backend.attempts, f"attempt {attempt} starts")
    return sorted(place.node for place in backend.attempts[key].order.workers)


@pytest.mark.covers("F17", "F35", "F42")
async def test_an_elastic_gang_makes_room_with_one_worker_and_grows_again(tmp_path: Path) -> None:
    backend = MemoryBackend(NODES, real_time=True, leaves_after=0.2)
    async with running(tmp_path, POLICY, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        wide = await run.submit("ana", "wide", profile="elastic")
        assert nodes(await run.job(wide.id, "running")) == ["n1", "n2", "n3"]
        single = await run.submit("bo", "single", profile="gpu4")
        terminating = await run.job(wide.id, "checkpointing")
        assert terminating.reason is not None
        assert terminating.reason.message.endswith("It saves a checkpoint and goes on with 2 of its 3 workers.")
        assert nodes(await run.job(single.id, "running")) == ["n3"]

        assert await workers(run, backend, wide, 2) == ["n1", "n2"]
        again = await run.job(wide.id, "running")
        assert (again.attempt, again.preemptions, nodes(again)) == (2, 1, ["n1", "n2"])
        assert [a.outcome for a in again.attempts][:1] == ["moved"]
        assert (again.gpus, again.workers, wide.gpus) == (8, 2, 12), "what it holds, and what it asked for"
        assert again.reason is not None
        assert again.reason.message.startswith("Runs over quota on 8 GPUs")
        assert (await run.used())["rnd"] == 8

        session = await run.session("bo", "gpu4", "devops")
        await run.granted(session.id)
        assert await workers(run, backend, wide, 3) == ["n1"]
        await run.client("spawner").release(session.id)
        await run.client("bo").cancel(single.id)
        await run.until(lambda: told_idle(run, 8), "both are over")
        assert nodes(await run.job(wide.id, "running")) == ["n1"], "a gang that runs is not widened"
        await run.client("ana").preempt_test(wide.id)
        assert await workers(run, backend, wide, 4) == ["n1", "n2", "n3"]


async def told_idle(run: Running, gpus: int) -> bool:
    return (await run.used())["idle"] == gpus
