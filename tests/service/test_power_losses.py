"""A machine that is lost with all its jobs, again and again, is no job's fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from running import running

JOBS = 6
POLICY = """
version: 1
pools: [{name: a, nodes: {local: {gpus: all}}}]
profiles: [{name: gpu1, gpus: 1, policies: [rnd]}]
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 15}]}]
"""
WORK = """
import pathlib, time
while not pathlib.Path("../../../finish").exists():
    time.sleep(0.05)
"""
SERVICE = """
import asyncio, sys
from pathlib import Path
from running import python, running

async def main():
    async with running(Path(sys.argv[1]), sys.argv[2], gpus=15, nodes=2) as run:
        if not (await run.client("root").jobs()).jobs:
            for number in range(int(sys.argv[4])):
                await run.submit("ana", f"j-{number}", python(sys.argv[3]), profile="gpu1", team="rnd")
        await asyncio.Event().wait()

asyncio.run(main())
"""


def processes_below(folder: Path) -> list[int]:
    """Return every process that carries the mark of a job below a folder."""
    result = []
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            if f"MAKEWAY_JOB_DIR={folder}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                result.append(int(name))
    return result


def lose_power(state: Path, service: subprocess.Popen[bytes]) -> None:
    """Kill the service, the launchers and the jobs, as if the machine was gone."""
    service.kill()
    service.wait()
    while remaining := processes_below(state):
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def forget_boot(state: Path) -> None:
    """Make all claims and orders those of an earlier boot."""
    for claim in state.glob("jobs/*/attempt-*/launcher.json"):
        claim.write_text(json.dumps({**json.loads(claim.read_text()), "boot": "an earlier one"}))


def serve_until_all_run_and_lose_power(state: Path, attempt: int) -> None:
    """Run a service until all jobs run in this attempt, then lose all of it."""
    script = [sys.executable, "-c", SERVICE, str(state), POLICY, WORK, str(JOBS)]
    service = subprocess.Popen(script, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    ends = time.monotonic() + 60
    while len(list(state.glob(f"jobs/*/attempt-{attempt}/running.json"))) < JOBS and time.monotonic() < ends:
        time.sleep(0.05)
    lose_power(state, service)
    if time.monotonic() >= ends:
        raise TimeoutError(f"not all run: {sorted(str(path) for path in state.glob('jobs/*/attempt-*'))}")


@pytest.mark.parametrize("boots", [False, True], ids=["killed", "another boot"])
@pytest.mark.slow
@pytest.mark.no_repeat
async def test_five_losses_of_everything_fail_no_job(tmp_path: Path, boots: bool) -> None:
    state = (tmp_path / "state").resolve()
    for loss in range(1, 6):
        serve_until_all_run_and_lose_power(state, loss)
        if boots:
            forget_boot(state)
    (state / "finish").touch()
    async with running(state, POLICY, gpus=15, nodes=2) as run:
        for job in (await run.client("root").jobs(limit=100)).jobs:
            over = await run.job(job.id, "succeeded", "failed")
            assert over.state.value == "succeeded", over.reason
            row = run.service.components.store.workload(job.id)
            assert row is not None
            assert (row.infra_failures, row.failures, row.lost_on) == (0, 0, ())
