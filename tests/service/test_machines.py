"""Jobs on machines of deployments: real launchers, started by agents that know an address and a token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from machine_agents import Agent, add, change, join_token, ready, requested
from makeway_quota.backends.machines.backend import MachinesBackend
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.routing.backend import RoutingBackend
from running import Running, python, running
from web.portal import serving

pytestmark = pytest.mark.slow

POLICY = """
version: 1
pools:
  - {name: here, nodes: {local: {gpus: all}}}
  - {name: cloud, nodes: {labels: {kind: cloud}}}
profiles:
  - {name: gpu1, gpus: 1, pools: [cloud], policies: [[rnd], [devops]]}
  - {name: gpu2, gpus: 2, pools: [cloud], policies: [[rnd], [devops]]}
  - {name: pair, gpus: 2, workers: 2, pools: [cloud], policies: [[rnd]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [cloud], reserved: 0, limit: 8}]}
  - {name: devops, groups: [devops], quotas: [{pools: [cloud], reserved: 2, limit: 8}]}
"""
SAVES = """
import time
from makeway import checkpoint
start = checkpoint.step_of(checkpoint.latest()) or 0
print("from", start, flush=True)
while not checkpoint.requested() and start < 5:
    time.sleep(0.02)
if start >= 5:
    raise SystemExit(0)
with checkpoint.saving(start + 5) as folder:
    (folder / "state").write_text("saved")
checkpoint.stop()
"""
SLEEPS = python("import time; print('runs', flush=True); time.sleep(600)")


class Fleet:
    """A service behind a socket, and the agents of its machines."""

    def __init__(self, run: Running, address: str, root: Path) -> None:
        self.run, self.address, self.root = run, address, root
        self.agents: list[Agent] = []

    async def machine(self, name: str, gpus: int = 2, **request: Any) -> Agent:
        """Add a machine, and wait until it is a node."""
        add(self.run.service, requested(name, gpus=gpus, **request))
        agent = Agent(self.address, name, join_token(self.run.service, name), self.root / name, gpus)
        self.agents.append(agent)
        assert (await agent.join()).status_code == 200
        assert (await agent.report()).status_code == 200
        ready(self.run.service, name)
        agent.work()
        await self.until_node(name, lambda node: node.ready and not node.cordoned)
        return agent

    async def until_node(self, name: str, holds: Callable[[Any], bool]) -> None:
        world = self.run.service.components.world

        def there() -> bool:
            return any(node.name == name and holds(node) for node in world.observation.nodes)

        await self.run.until(there, f"{name} is a node")

    async def log(self, job: str, attempt: int = 1) -> str:
        return (await self.run.client("root").logs(job, attempt=attempt, offset=0, limit=2**20)).text

    async def said(self, job: str, text: str, attempt: int = 1) -> None:
        async def there() -> bool:
            return text in await self.log(job, attempt)

        await self.run.until(there, f"{job} says {text}")


@asynccontextmanager
async def fleet(folder: Path, policy: str = POLICY, **settings: Any) -> AsyncIterator[Fleet]:
    """Start a service with a backend without GPUs of its own, and with machines."""
    shared = folder / "shared"
    backend = RoutingBackend([MemoryBackend(), MachinesBackend(durable_checkpoints=True)])
    settings = {
        "MAKEWAY_TICK_SECONDS": "0.2",
        "MAKEWAY_TICKET_SECRET": "s" * 32,
        "MAKEWAY_BACKEND": "local,machines",
        "MAKEWAY_MACHINE_CHECKPOINT_DIR": str(shared),
        **settings,
    }
    async with running(folder / "state", policy, backend=backend, **settings) as run, serving(run.app) as address:
        machines = run.service.components.settings.machines
        object.__setattr__(machines, "url", f"{address}/services/makeway")
        result = Fleet(run, address, folder / "machines")
        try:
            yield result
            assert run.service.components.world.failure is None
        finally:
            for agent in result.agents:
                await agent.close()


async def test_a_job_on_a_machine_runs_to_its_end_with_its_log_and_result(tmp_path: Path) -> None:
    code = """
import os, pickle
print(sorted(name for name in os.environ if "TOKEN" in name or "ATTEMPT_URL" in name))
print(os.environ["MAKEWAY_GPUS"], os.environ["RANK"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
pickle.dump("done", open(os.environ["MAKEWAY_RESULT_FILE"], "wb"))
"""
    async with fleet(tmp_path) as service:
        agent = await service.machine("m-1")
        job = await service.run.submit("ana", "train", python(code), profile="gpu1")
        job = await service.run.job(job.id, "succeeded", "failed")
        assert job.state.value == "succeeded", job.message
        assert await service.log(job.id) == "[]\n1 0 0\n"
        assert agent.starts == [(job.id, 1, 0)]
        await service.run.until(lambda: not agent.launchers, "the agent has nothing left")
        assert (await agent.ask()).json()["attempts"] == []


async def test_a_job_makes_way_and_resumes_on_another_machine(tmp_path: Path) -> None:
    async with fleet(tmp_path) as service:
        first = await service.machine("m-1")
        job = await service.run.submit("ana", "saves", python(SAVES), profile="gpu2")
        await service.said(job.id, "from 0")
        change(service.run.service, "m-1", state="draining", drain="idle")
        await service.until_node("m-1", lambda node: node.cordoned)
        assert (await service.run.job(job.id, "running")).attempt == 1, "what runs on a machine that drains goes on"
        await service.run.until(lambda: first.orders.get("drain"), "the agent is told")
        second = await service.machine("m-2")
        await service.run.client("ana").preempt_test(job.id)
        done = await service.run.job(job.id, "succeeded", "failed")
        assert (done.state.value, done.attempt) == ("succeeded", 2)
        assert "from 5" in await service.log(job.id, 2)
        assert (first.starts, second.starts) == ([(job.id, 1, 0)], [(job.id, 2, 0)])


async def test_work_of_a_machine_that_vanishes_goes_on_elsewhere_and_no_loss_counts(tmp_path: Path) -> None:
    async with fleet(tmp_path) as service:
        first = await service.machine("m-1")
        job = await service.run.submit("ana", "long", SLEEPS, profile="gpu2")
        await service.said(job.id, "runs")
        first.vanish()
        change(service.run.service, "m-1", state="lost")
        await service.until_node("m-1", lambda node: not node.ready)
        assert (await service.run.client("root").job(job.id)).attempt == 1, "its launcher may still be heard"
        await service.machine("m-2")
        change(service.run.service, "m-1", state="terminating", reason="lost")
        change(service.run.service, "m-1", state="gone")
        await service.said(job.id, "runs", 2)
        again = await service.run.client("root").job(job.id)
        assert again.attempt == 2
        row = service.run.service.components.store.workload(job.id)
        assert row is not None
        assert (row.infra_failures, row.failures) == (0, 0)
        await service.run.client("ana").cancel(job.id)
        await service.run.job(job.id, "cancelled")


async def test_a_machine_that_is_fenced_ends_what_it_runs(tmp_path: Path) -> None:
    async with fleet(tmp_path) as service:
        agent = await service.machine("m-1")
        job = await service.run.submit("ana", "long", SLEEPS, profile="gpu1")
        await service.said(job.id, "runs")
        [launcher] = agent.launchers.values()
        agent.silent = True
        change(service.run.service, "m-1", state="terminating", reason="lost")
        change(service.run.service, "m-1", state="gone")
        await service.run.job(job.id, "pending")
        agent.silent = False
        await service.run.until(lambda: agent.stopped_by, "the agent hears that its machine is over")
        await service.run.until(lambda: launcher.poll() is not None, "its launcher has ended")
        assert (await agent.report()).status_code == 410
        assert (await agent.ask()).status_code == 410


async def test_a_gang_over_two_machines_runs_with_its_ranks(tmp_path: Path) -> None:
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')), flush=True)"
    async with fleet(tmp_path) as service:
        agents = [await service.machine(f"m-{number}") for number in (1, 2)]
        job = await service.run.submit("ana", "gang", python(code), profile="pair")
        done = await service.run.job(job.id, "succeeded", "failed")
        assert done.state.value == "succeeded", done.message
        assert sorted(key for agent in agents for key in agent.starts) == [(job.id, 1, 0), (job.id, 1, 1)]
        assert "0 2 127.0.0.1" in await service.log(job.id)


async def test_another_service_on_the_same_database_starts_nothing_twice(tmp_path: Path) -> None:
    """The first one is gone without a word to any agent; what was placed is told by the next one."""
    async with fleet(tmp_path, MAKEWAY_KEEP=1) as service:
        agent = await service.machine("m-1")
        agent.silent = True
        job = await service.run.submit("ana", "long", SLEEPS, profile="gpu1")
        await service.run.job(job.id, "starting")
        agent.stopped_by = "test"
    async with fleet(tmp_path, MAKEWAY_KEEP=1) as service:
        again = Agent(service.address, "m-1", "", service.root / "m-1")
        again.token = agent.token
        service.agents.append(again)
        again.work()
        await service.said(job.id, "runs")
        assert (await service.run.job(job.id, "running")).attempt == 1
        assert again.starts == [(job.id, 1, 0)]
