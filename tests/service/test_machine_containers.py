"""Jobs in containers on a machine of a deployment: real service, real agent, real podman."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agent.machines import TestMachine
from agent.podman import DEFAULT, OTHER, Podman, needed
from machine_agents import add, join_token, ready, requested
from pods import wait_until
from running import Running
from service.test_machines import POLICY, SAVES, Fleet, fleet

pytestmark = pytest.mark.slow

IMAGES = f"""
profiles:
  - {{name: plain, gpus: 1, pools: [cloud], policies: [[rnd]]}}
  - name: own
    gpus: 1
    pools: [cloud]
    policies: [[rnd]]
    images: [{{name: other, image: '{OTHER}'}}, {{name: none, image: 'localhost:1/none:1'}}]
"""
SHOWS = "import pathlib, sys; file = pathlib.Path('/image'); print(file.read_text() if file.exists() else 'bare')"


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Yield podman with two images."""
    needed()
    result = Podman(tmp_path_factory.mktemp("podman"))
    yield result
    result.close()


@asynccontextmanager
async def boxes(folder: Path, podman: Podman, image: str | None) -> AsyncIterator[Fleet]:
    """Start a service with one machine, whose deployment has this image."""
    policy = POLICY.replace("\nprofiles:\n", IMAGES, 1)
    async with fleet(folder, policy=policy) as service:
        add(service.run.service, requested("m-1", image=image))
        machine = TestMachine(folder / "m-1", cast(Any, SimpleNamespace(url=f"{service.address}/services/makeway")))
        machine.service.silent = SimpleNamespace(clear=lambda: None)  # type: ignore[assignment]
        machine.token_file.write_text(join_token(service.run.service, "m-1"))
        machine.env |= podman.env
        machine.start()
        try:
            reports = service.run.service.components.store.machine_reports
            await asyncio.to_thread(wait_until, lambda: _initialized(reports.of("m-1")), "the first report")
            ready(service.run.service, "m-1")
            await service.until_node("m-1", lambda node: node.ready)
            yield service
        finally:
            await asyncio.to_thread(machine.close)
            podman("rm", "--force", "--all", "--time=0")


def _initialized(report: Any) -> bool:
    return report is not None and report.facts.get("init_exit_code") == 0


async def ran_in(service: Fleet, **ask: Any) -> tuple[str, str | None]:
    """Run a job; return what its image says of itself, and the image in its detail."""
    run: Running = service.run
    job = await run.submit("ana", "shows", ["python3", "-c", SHOWS], **ask)
    done = await run.job(job.id, "succeeded", "failed")
    return (await service.log(job.id)).strip(), done.image


@pytest.mark.covers("F64", "F75")
async def test_the_image_of_a_job_wins_over_that_of_the_deployment(tmp_path: Path, podman: Podman) -> None:
    async with boxes(tmp_path, podman, DEFAULT) as service:
        assert await ran_in(service, profile="plain") == (DEFAULT, DEFAULT)
        assert await ran_in(service, profile="own", image="other") == (OTHER, OTHER)


@pytest.mark.covers("F64")
async def test_without_an_image_of_either_a_job_runs_bare(tmp_path: Path, podman: Podman) -> None:
    async with boxes(tmp_path, podman, None) as service:
        assert await ran_in(service, profile="plain") == ("bare", None)


async def test_a_job_in_a_container_makes_way_and_resumes_at_its_checkpoint(tmp_path: Path, podman: Podman) -> None:
    async with boxes(tmp_path, podman, DEFAULT) as service:
        job = await service.run.submit("ana", "train", ["python3", "-c", SAVES], profile="plain")
        await service.said(job.id, "from 0")
        await service.run.client("root").preempt_test(job.id)
        done = await service.run.job(job.id, "succeeded", "failed")
        assert (done.state.value, done.attempt) == ("succeeded", 2)
        assert await service.log(job.id, attempt=2) == "from 5\n"
        await asyncio.to_thread(wait_until, lambda: podman.containers() == [], "that no container is left")


async def test_an_image_that_cannot_be_pulled_is_the_cause_that_is_shown_and_no_failure(
    tmp_path: Path, podman: Podman
) -> None:
    async with boxes(tmp_path, podman, None) as service:
        job = await service.run.submit("ana", "shows", ["python3", "-c", SHOWS], profile="own", image="none")

        async def told() -> bool:
            return "could not be pulled" in str((await service.run.client("ana").job(job.id)).reason)

        await service.run.until(told, "the job says why it waits")
        shown = await service.run.client("ana").job(job.id)
        assert shown.state.value == "pending"
        assert "worker 0 did not start on m-1: the image localhost:1/none:1" in str(shown.reason)
        assert (shown.failures, shown.attempts) == (0, [])
