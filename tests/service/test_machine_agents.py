"""Jobs on a machine with the real agent: real launchers, which reach the real service by the attempt protocol."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agent.machine_service import MachineService, answering
from agent.machines import TestMachine
from makeway_api.models import Job
from makeway_quota.backends.base import Key, NodeStatus, StartOrder
from makeway_quota.backends.remote.backend import RemoteBackend
from makeway_quota.backends.remote.worker_hosts import WorkerHosts
from pods import wait_until
from running import Running, python, running
from web.portal import serving

pytestmark = pytest.mark.slow

SAVES = """
import time
from makeway import checkpoint
start = checkpoint.step_of(checkpoint.latest())
print("from", start, flush=True)
while not checkpoint.requested():
    time.sleep(0.02)
with checkpoint.saving(start + 5) as folder:
    (folder / "state").write_text("saved")
checkpoint.stop()
"""


class OneMachine(RemoteBackend):
    """A backend whose only node is a machine: what it starts is in the orders, and what runs is in the reports."""

    def __init__(self, service: MachineService, volume: Path) -> None:
        super().__init__(lost_after=120.0)
        self.service = service
        self.volume = volume
        self.address = ""
        self.ordered: dict[tuple[str, int, int], dict[str, object]] = {}
        self._nodes = {"m-1": NodeStatus("m-1", "gpu", (0, 1), virtual=True)}

    async def nodes(self) -> Mapping[str, NodeStatus]:
        return self._nodes

    async def start(self, order: StartOrder) -> None:
        for number, place in enumerate(order.workers):
            path, token = self.channel.credentials(order.workload, order.attempt, number)
            self.ordered[order.workload, order.attempt, number] = self.service.worker(
                order.workload,
                order.attempt,
                number,
                url=f"{self.address}/{path}",
                token=token,
                devices=list(place.devices),
                env={"RANK": str(number), "WORLD_SIZE": str(len(order.workers))},
                checkpoints=str(self.volume / order.workload),
            )
        self.service.order(*self.ordered.values())

    async def hosts(self) -> Mapping[Key, WorkerHosts]:
        sizes: dict[Key, int] = {}
        alive = set()
        for job, attempt, _ in self.ordered:
            sizes[job, attempt] = sizes.get((job, attempt), 0) + 1
        states = self.service.states()
        for job, attempt, worker in self.ordered:
            if states.get((job, attempt, worker), "starting") != "exited":
                alive.add((job, attempt))
        return {key: WorkerHosts(size, present=key in alive) for key, size in sizes.items()}

    async def remove(self, workload: str, attempt: int) -> None:
        self.ordered = {key: order for key, order in self.ordered.items() if key[:2] != (workload, attempt)}
        self.service.order(*self.ordered.values())


class MachineRun:
    """A service, its only machine, and people who submit."""

    def __init__(self, run: Running, machine: TestMachine) -> None:
        self.run = run
        self.machine = machine

    async def train(self, code: str) -> Job:
        job = await self.run.submit("ana", "far", python(code), profile="gpu1")
        return await self.run.job(job.id, "running", "succeeded", "failed")

    async def said(self, job: Job, text: str, attempt: int = 1) -> None:
        async def there() -> bool:
            chunk = await self.run.client("ana").logs(job.id, attempt=attempt, offset=0, limit=2**20)
            return text in chunk.text

        await self.run.until(there, f"the job writes {text}")


@asynccontextmanager
async def one_machine(folder: Path) -> AsyncIterator[MachineRun]:
    with answering() as server:
        machine = TestMachine(folder / "machine", server)
        backend = OneMachine(server, folder / "volume")
        settings = {"MAKEWAY_TICK_SECONDS": "0.2", "MAKEWAY_TICKET_SECRET": "s" * 32}
        try:
            async with running(folder / "state", backend=backend, **settings) as run:
                async with serving(run.app) as address:
                    backend.address = f"{address}/services/makeway"
                    machine.start()
                    yield MachineRun(run, machine)
                    await asyncio.to_thread(machine.close)
        finally:
            await asyncio.to_thread(machine.close)


async def test_a_job_on_a_machine_survives_its_agent_makes_way_and_resumes_at_its_checkpoint(tmp_path: Path) -> None:
    async with one_machine(tmp_path) as site:
        job = await site.train(SAVES)
        await site.said(job, "from 0")
        before = site.machine.launchers()
        await asyncio.to_thread(site.machine.kill)
        site.machine.start()
        reports = len(site.machine.service.reports)
        await asyncio.to_thread(
            wait_until, lambda: len(site.machine.service.reports) > reports + 1, "reports of the next agent"
        )
        assert site.machine.launchers() == before
        await site.run.client("ana").preempt_test(job.id)
        await site.said(job, "from 5", attempt=2)
        done = await site.run.job(job.id, "running")
        assert done.attempt == 2
        await asyncio.to_thread(
            wait_until, lambda: list(site.machine.service.states()) == [(job.id, 2, 0)], "the end of the first attempt"
        )
        await site.run.client("ana").cancel(job.id)
        await site.run.job(job.id, "cancelled")
        await asyncio.to_thread(wait_until, lambda: not site.machine.launchers(), "the end of the launcher")


async def test_a_job_that_ends_while_no_agent_runs_has_its_result_and_log(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    async with one_machine(tmp_path) as site:
        job = await site.train(
            f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(.05)\nprint('end')"
        )
        await asyncio.to_thread(site.machine.kill)
        go_on.touch()
        done = await site.run.job(job.id, "succeeded", "failed")
        assert done.state.value == "succeeded", done.message
        await site.said(job, "end")


async def test_a_machine_that_stops_has_its_job_save_which_goes_on_with_the_next_agent(tmp_path: Path) -> None:
    async with one_machine(tmp_path) as site:
        job = await site.train(SAVES)
        await site.said(job, "from 0")
        agent = site.machine.agents[-1]
        agent.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(agent.wait, 60) == 143
        site.machine.start()
        await site.said(job, "from 5", attempt=2)
        assert not [pid for pid in site.machine.launchers() if not os.path.exists(f"/proc/{pid}")]
