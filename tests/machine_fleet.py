"""Services in processes of their own whose jobs run on machines of a cloud in a folder, and what has to hold of them.

A job works for a while over all of its attempts, and keeps a book; a watcher counts the machines and their cost.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from makeway_api.client import AsyncClient
from makeway_api.errors import MakewayError
from makeway_api.models import Job, JobRequest
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.providers.local import LocalFaults, LocalProvider
from makeway_quota.store import open_store
from replicas import Replica, settings
from running import python

ROOT = Path(__file__).parents[1]
SECRET = "a secret that all replicas have"
PRICE, HOUR = 2.0, 6.0
"""Of a machine, and for all of them: three at a time"""
POLICY = """
version: 1
pools:
  - {name: here, nodes: {local: {gpus: all}}}
  - {name: cloud, kind: autoscaled}
profiles:
  - {name: gpu1, gpus: 1, pools: [cloud], policies: [[rnd]]}
  - {name: gpu2, gpus: 2, pools: [cloud], policies: [[rnd]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [cloud], reserved: 20, limit: 20}]}
"""
DOCUMENT = f"""
version: 1
name: demo
provider: local
hour: {HOUR:g}
max_machines: 10
poll_interval: 1
visibility: 4
request_timeout: 20
machine_types:
  - {{name: g2, pool: cloud, instance: g2, gpus: 2, idle_timeout: 2, max_machines: 10, price: {PRICE:g}}}
"""
WORKS = """
import os, sys, time
me = os.environ["MAKEWAY_JOB_NAME"] + " " + os.environ["MAKEWAY_ATTEMPT"]
with open({book!r}, "a", buffering=1) as book:
    book.write(me + " begins\\n")
    time.sleep({seconds})
    book.write(me + " ends\\n")
"""


class MachineFleet:
    """Replicas, their cloud, and the jobs that were submitted."""

    def __init__(self, folder: Path, replicas: list[Replica], url: str, seed: int) -> None:
        self.replicas, self.url = replicas, url
        self.cloud = LocalProvider(folder / "cloud")
        self.book = folder / "book"
        self.chance = random.Random(seed)
        self.names: list[str] = []
        self.most = 0
        """machines at a time"""

    async def submit(self, seconds: float, profile: str = "gpu2") -> None:
        """Submit a job, once: one whose submission had no answer is looked for by its name."""
        name = f"job-{len(self.names)}"
        self.names.append(name)
        command = python(WORKS.format(book=str(self.book), seconds=seconds))
        request = JobRequest(name=name, profile=profile, command=command)
        await self.heard(lambda client: self._submitted(client, request), f"{name} is taken")

    async def _submitted(self, client: Any, request: JobRequest) -> bool:
        if request.name not in {job.name for job in await self._all(client)}:
            await client.submit(request)
        return True

    async def _all(self, client: Any) -> list[Job]:
        page = await client.jobs(mine=True, limit=200)
        result = list(page.jobs)
        while page.next:
            page = await client.jobs(mine=True, limit=200, cursor=page.next)
            result += page.jobs
        return result

    async def heard(self, ask: Any, what: str, seconds: float = 90) -> Any:
        """Return the first good answer of any replica."""
        ends = time.monotonic() + seconds
        while True:
            for replica in self.replicas:
                with suppress(MakewayError, httpx2.HTTPError, TimeoutError):
                    client = AsyncClient(f"http://127.0.0.1:{replica.environ['PORT']}/services/makeway", "ana")
                    try:
                        async with asyncio.timeout(4):
                            if answer := await ask(client):
                                return answer
                    finally:
                        await client.close()
            if time.monotonic() >= ends:
                raise TimeoutError(f"{what}: waited in vain\n" + "\n".join(one.log() for one in self.replicas))
            await asyncio.sleep(0.1)

    def running(self) -> list[str]:
        """Return the instances that have not ended."""
        return [one.id for one in self.cloud.list("demo", 0.0).instances if one.state != "terminated"]

    async def watch(self) -> None:
        """Count the machines again and again, until cancelled."""
        while True:
            self.most = max(self.most, len(await asyncio.to_thread(self.running)))
            await asyncio.sleep(0.1)

    def rows(self) -> list[Machine]:
        """Return the machines that are not over, as they are committed."""
        store = open_store(self.url)
        try:
            return store.machines.live()
        finally:
            store.close()

    async def all_right(self) -> None:
        """Every job ended once, no attempt began twice, no machine is left, and the money adds up."""
        jobs: list[Job] = await self.heard(self.all_ended, "all jobs end", 240)
        assert Counter(job.name for job in jobs) == Counter(self.names)
        assert {job.name: (job.state.value, job.message) for job in jobs if job.state.value != "succeeded"} == {}
        assert {job.name: job.failures for job in jobs if job.failures} == {}
        lines = Counter(self.book.read_text().splitlines())
        assert {line: times for line, times in lines.items() if times > 1} == {}
        assert Counter(line.split()[0] for line in lines if line.endswith("ends")) == Counter(self.names)
        await self.heard(self.empty, "no machine is left", 120)
        assert self.most * PRICE <= HOUR
        self._account()

    async def all_ended(self, client: Any) -> list[Job]:
        """Return all jobs if they have ended, else none."""
        result = await self._all(client)
        return result if all(job.state.ended for job in result) else []

    async def empty(self, _: Any) -> bool:
        """Whether no machine is left, in the rows and at the cloud."""
        return not self.running() and not await asyncio.to_thread(self.rows)

    def _account(self) -> None:
        """Compare what was written off for the machines with what their instances lasted."""
        instances = [json.loads(path.read_text()) for path in self.cloud.folder.glob("instances/*/instance.json")]
        assert len({one["machine"] for one in instances}) == len(instances), "two instances for one machine"
        lasted = 0.0
        for one in instances:
            ended = json.loads((self.cloud.folder / "instances" / one["instance"] / "ended.json").read_text())
            lasted += ended["at"] - one["launched_at"]
        store = open_store(self.url)
        try:
            spent = sum(store.machines.spend("demo").values()) / 1_000_000
            log = store.machine_log.events(limit=500)
        finally:
            store.close()
        assert spent >= lasted * PRICE / 3600 - 0.000_01 * len(instances)
        assert {one["machine"] for one in instances} <= {event.machine for event in log}

    def close(self) -> None:
        """End all machines."""
        for instance in self.running():
            self.cloud.terminate(instance)


def replica(folder: Path, name: str, url: str, port: int, machine_url: str, slow: float, **more: object) -> Replica:
    """Return a replica that listens on a port and whose machines use an address."""
    (folder / "cloud").mkdir(exist_ok=True)
    (folder / name).mkdir()
    (folder / name / "machines").symlink_to(folder / "cloud")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    environ = settings(folder / name, url, PORT=port, SLOW=slow, MAKEWAY_TICKET_SECRET=SECRET, **more)
    environ |= {
        "MAKEWAY_BACKEND": "local,machines",
        "MAKEWAY_POLICY_FILE": str(policy),
        "MAKEWAY_MACHINE_URL": f"{machine_url}/services/makeway",
        "MAKEWAY_MACHINE_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "PYTHONPATH": str(ROOT / "tests"),
    }
    return Replica(name, folder / name, str(folder / "cloud"), environ, script="machines_process.py")


@asynccontextmanager
async def fleet(folder: Path, url: str, replicas: list[Replica], seed: int) -> AsyncIterator[MachineFleet]:
    """Start the replicas, whose deployment has no machine yet, and watch their cloud."""
    made = MachineFleet(folder, replicas, url, seed)
    made.cloud.set_faults(LocalFaults(boot_seconds=1.0))
    (made.cloud.folder / "holds").mkdir()
    watching: asyncio.Task[None] | None = None
    try:
        for item in replicas:
            await item.start()
        store = open_store(url)
        store.deployments.save("demo", DOCUMENT, 0, "root", time.time())
        store.close()
        watching = asyncio.create_task(made.watch())
        yield made
        if watching.done():
            watching.result()
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for item in replicas:
            await item.close()
        made.close()
