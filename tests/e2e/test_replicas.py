"""Two real processes on one PostgreSQL and one backend, killed, frozen and cut off at random: nothing runs twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import Job, JobRequest
from postgres import Network, empty_database, network, postgres_server
from replicas import Replica, SharedBackend, settings, shared_backend

SEED = int(os.environ.get("SEED", "20261122"))
DEADLINE = float(os.environ.get("LEADER_SECONDS", "2"))
"""MAKEWAY_LEADER_SECONDS here (6 by default); a takeover takes a second more, and the first cycle."""

TAKEOVER = 10.0
BUSY = 3.0
"""How much longer both may take on a machine that runs other tests beside; `make faults` runs alone."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as folder:
        yield folder


@dataclass(slots=True)
class Cluster:
    """Two replicas with a network each, the jobs that were submitted, and what was measured."""

    replicas: list[Replica]
    networks: list[Network]
    backend: SharedBackend
    chance: random.Random
    jobs: list[str] = field(default_factory=list)
    takeovers: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)

    async def submit(self, at: Replica, name: str, person: str = "ana", profile: str = "gpu1") -> Job:
        """Submit a job; a request that fails is repeated, as a notebook would."""
        ends = time.monotonic() + 60
        while True:
            with suppress(MakewayError, httpx2.HTTPError, TimeoutError):
                async with asyncio.timeout(8):
                    job = await at.clients[person].submit(JobRequest(name=name, profile=profile, command=["sleep"]))
                assert isinstance(job, Job)
                self.jobs.append(job.id)
                return job
            if time.monotonic() >= ends:
                raise TimeoutError(f"{at.name} takes no submission\n{at.log()}")
            await asyncio.sleep(0.1)

    async def reaches(self, at: Replica, id: str, *states: str, seconds: float = 60.0) -> Job:
        """Wait until a replica shows a job in one of the states."""
        ends = time.monotonic() + seconds
        version = None
        while True:
            with suppress(httpx2.HTTPError, TimeoutError, MakewayError):
                async with asyncio.timeout(8):
                    job: Job = await at.clients["root"].job(id, wait=2.0 if version else 0, version=version)
                version = job.version
                if job.state.value in states:
                    return job
            if time.monotonic() >= ends:
                raise TimeoutError(f"{at.name} does not show {id} as {states}\n{at.log()}")
            await asyncio.sleep(0.02)

    async def harm(self, number: int) -> str:
        """Kill, freeze or cut off one replica; the other one goes on, and takes over where it has to."""
        victim = self.chance.randrange(2)
        replica, other = self.replicas[victim], self.replicas[1 - victim]
        kind = self.chance.choice(["kill", "freeze", "cut"])
        for job in range(self.chance.randrange(3)):
            await self.submit(
                self.chance.choice(self.replicas), f"work {number}-{job} {self.chance.uniform(0.2, 4):.2f}"
            )
        if self.chance.random() < 0.3:
            await self.submit(other, f"owner {number} {self.chance.uniform(0.2, 3):.2f}", "bo", "gpu2")
        await asyncio.sleep(self.chance.uniform(0, 0.6))
        restarting: asyncio.Task[None] | None = None
        if kind == "kill":
            restarting = asyncio.create_task(replica.kill())
        elif kind == "freeze":
            replica.signal(signal.SIGSTOP)
        else:
            self.networks[victim].cut()
        harmed_at = time.monotonic()
        job = await self.submit(other, f"probe {number} 0.2", "bo", "gpu1")
        await self.reaches(other, job.id, "starting", "running", "succeeded", seconds=60)
        self.takeovers.append(time.monotonic() - harmed_at)
        if kind != "kill":  # longer than the deadline, at times only just
            await asyncio.sleep(max(0.0, DEADLINE + self.chance.uniform(0.1, 2.5) - (time.monotonic() - harmed_at)))
        if kind == "freeze":
            replica.signal(signal.SIGCONT)
        elif kind == "cut":
            self.networks[victim].mend()
        if restarting is not None:
            await restarting
        return f"{kind} {replica.name}"

    async def compare(self, number: int) -> None:
        """Both answer again: what one shows, the other shows a moment later."""
        first, second = self.chance.sample(self.replicas, 2)
        job = await self.submit(first, f"seen {number} 0.3", "bo")

        async def shown(at: Replica) -> float:
            await self.reaches(at, job.id, "succeeded")
            return time.monotonic()

        times = await asyncio.gather(shown(first), shown(second))
        self.behind.append(max(times) - min(times))

    async def check(self) -> None:
        """Every job succeeded, with one attempt more than it made way, and the orders were those of one leader."""
        for id in self.jobs:
            job = await self.reaches(self.replicas[0], id, "succeeded", "failed", "cancelled")
            assert (job.state.value, job.attempt) == ("succeeded", 1 + job.preemptions), job
        assert not self.backend.breaches, self.backend.breaches
        starts = [(order.workload, order.attempt) for order in self.backend.orders if order.verb == "start"]
        assert self.backend.memory.starts == len(set(starts))


@asynccontextmanager
async def cluster(postgres: str, folder: Path, seed: int) -> AsyncIterator[Cluster]:
    empty_database(postgres)
    async with shared_backend(folder) as backend, network(postgres) as one, network(postgres) as two:
        replicas = [
            Replica(
                name, folder / name, backend.path, settings(folder / name, proxy.url(), MAKEWAY_LEADER_SECONDS=DEADLINE)
            )
            for name, proxy in (("one", one), ("two", two))
        ]
        try:
            for replica in replicas:
                await replica.start()
            yield Cluster(replicas, [one, two], backend, random.Random(seed))
        finally:
            one.mend()
            two.mend()
            for replica in replicas:
                await replica.close()


async def live_through(postgres: str, folder: Path, events: int, seed: int, pace: float = 1.0) -> None:
    async with cluster(postgres, folder, seed) as both:
        happened = []
        for number in range(events):
            happened.append(await both.harm(number))
            await both.compare(number)
            assert not both.backend.breaches, (happened, both.backend.breaches)
        await both.check()
        took, behind = sorted(both.takeovers), sorted(both.behind)
        terms = {order.term for order in both.backend.orders}
        print(
            f"\n{events} events, {len(both.jobs)} jobs, {len(terms)} terms with orders; "
            f"takeover p50 {took[len(took) // 2]:.1f} s, worst {took[-1]:.1f} s; "
            f"the other replica p50 {behind[len(behind) // 2]:.2f} s, worst {behind[-1]:.2f} s behind"
        )
        if took[-1] >= TAKEOVER * pace or behind[len(behind) // 2] >= pace:
            raise TimeoutError(f"takeovers took {took} s, and the other replica was {behind} s behind")


@pytest.mark.e2e
@pytest.mark.covers("N24")
@pytest.mark.no_repeat
async def test_two_replicas_live_through_a_few_faults(postgres: str, tmp_path: Path) -> None:
    await live_through(postgres, tmp_path, 4, SEED, BUSY)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.covers("N24")
@pytest.mark.no_repeat
async def test_two_replicas_live_through_60_faults(postgres: str, tmp_path: Path) -> None:
    await live_through(postgres, tmp_path, int(os.environ.get("FAULTS", "60")), SEED + 1)
