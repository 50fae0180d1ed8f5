"""Machines that are cut off from the service, in networks of their own: no job is lost or runs twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from machine_networks import MachineNetwork, NetworkedCloud, machine_networks
from makeway_api.models import Job
from running import python
from service.test_deployments_of_machines import Site, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LOST_AFTER = 60.0
DOCUMENT = f"""
version: 1
name: demo
provider: local
max_machines: 5
poll_interval: 1
lost_after: {LOST_AFTER:g}
orphan_after: 75
visibility: 5
machine_types:
  - {{name: g2, pool: cloud, instance: g2, gpus: 2, idle_timeout: 3, max_machines: 5}}
"""
WORKS = """
import os, time
me = os.environ["MAKEWAY_JOB_NAME"] + " " + os.environ["MAKEWAY_ATTEMPT"]
with open({book!r}, "a", buffering=1) as book:
    while not os.path.exists({end!r}):
        book.write(f"{{me}} {{time.time()}}\\n")
        time.sleep(0.1)
"""
"""Notes when it runs, until all jobs are to end."""


class Partitioned:
    """A site whose machines have networks, and a job on each."""

    def __init__(self, site: Site, cloud: NetworkedCloud, folder: Path) -> None:
        self.site, self.cloud, self.run = site, cloud, site.run
        self.book, self.end = folder / "book", folder / "end"

    async def start(self, *names: str) -> list[Job]:
        """Start jobs, each on a machine of its own."""
        code = WORKS.format(book=str(self.book), end=str(self.end))
        jobs = [await self.run.submit("ana", name, python(code), profile="gpu2") for name in names]
        return [await self.run.job(job.id, "running", seconds=120) for job in jobs]

    def instance_of(self, job: Job) -> str:
        """Return the instance on which the newest attempt of a job runs."""
        [node] = self.site.nodes_of(job.id)
        row = self.site.store.machines.machine(node)
        assert row is not None
        assert row.instance is not None
        return row.instance

    def network_of(self, job: Job) -> MachineNetwork:
        return self.cloud.networks[self.instance_of(job)]

    def state(self, instance: str) -> str:
        return next(one.state for one in self.cloud.list("demo", 0.0).instances if one.id == instance)

    def times(self, job: Job) -> dict[int, tuple[float, float]]:
        """Return when each attempt of a job was at work first and last."""
        result: dict[int, list[float]] = {}
        for line in self.book.read_text().splitlines():
            name, attempt, at = line.split()
            if name == job.name:
                result.setdefault(int(attempt), []).append(float(at))
        return {attempt: (min(times), max(times)) for attempt, times in result.items()}

    async def all_end(self, jobs: list[Job]) -> list[Job]:
        """Have all jobs end, and wait until no machine is left, in the rows and at the cloud."""
        self.end.touch()
        done = [await self.run.job(job.id, "succeeded", "failed", seconds=60) for job in jobs]
        for job in done:
            assert (job.state.value, job.failures) == ("succeeded", 0), job
            assert len(job.attempts) == len(self.times(job))
            ends = sorted(self.times(job).values())
            assert all(last < begins for (_, last), (begins, _) in pairwise(ends)), ends
        await self.site.until_machines()
        assert {one.state for one in self.cloud.list("demo", 0.0).instances} == {"terminated"}
        return done


@pytest.fixture
def networks() -> Iterator[list[MachineNetwork]]:
    with machine_networks(5) as made:
        yield made


@pytest.fixture
async def cut_off(networks: list[MachineNetwork], tmp_path: Path) -> AsyncIterator[Partitioned]:
    clouds: list[NetworkedCloud] = []

    def cloud(folder: Path) -> NetworkedCloud:
        clouds.append(NetworkedCloud(folder, networks))
        return clouds[0]

    async with site(tmp_path, DOCUMENT, make_cloud=cloud, host=networks[0].host) as made:
        yield Partitioned(made, clouds[0], tmp_path)


@pytest.mark.no_repeat
async def test_no_job_is_lost_or_runs_twice_and_no_machine_stays_behind_a_partition(cut_off: Partitioned) -> None:
    """Of three machines one is cut off for 10 s, one for longer than `lost_after`, and one for ever.

    The provider does not answer who would end them, so that they have to end themselves.
    """
    world = cut_off
    jobs = await world.start("short", "long", "ever")
    short, long, ever = jobs
    instances = [world.instance_of(job) for job in jobs]
    networks = [world.network_of(job) for job in jobs]
    world.cloud.unanswered |= set(instances)
    for network in networks:
        network.cut()
    began = time.monotonic()
    await asyncio.sleep(10)
    networks[0].mend()

    for job in (long, ever):
        await world.run.until(lambda job=job: 2 in world.times(job), f"{job.name} goes on elsewhere", 120)
    assert time.monotonic() - began > LOST_AFTER - 1
    networks[1].mend()
    await world.run.until(lambda: world.state(instances[1]) == "terminated", "the one that is back ends", 60)
    await world.run.until(lambda: world.state(instances[2]) == "terminated", "the one that is not ends itself", 60)
    assert world.state(instances[0]) == "running"
    assert list(world.times(short)) == [1]
    world.cloud.unanswered.clear()
    done = await world.all_end(jobs)
    assert [len(job.attempts) for job in done] == [1, 2, 2]
