"""The service is killed and frozen while jobs run as pods and make way: nothing is lost or run twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import httpx2
import pytest
from job_service import TRAIN, Serving, weights
from kube.node_faults import FAULTS
from makeway_api.errors import MakewayError
from makeway_api.models import Job

from kube_cluster.node import Node

pytestmark = pytest.mark.kube

T = TypeVar("T")
SEED = int(os.environ.get("SEED", "20261123"))
KILLS = int(os.environ.get("KILLS", "3"))
FREEZES = int(os.environ.get("FREEZES", "1"))
"""More of both: `KILLS=25 FREEZES=5 make kube-test ARGS="-k run_twice"`."""
NODE_FAULTS = int(os.environ.get("NODE_FAULTS", str(len(FAULTS))))
"""Faults of the node that pass, each kind in turn; more of them: `NODE_FAULTS=25`, as `make faults` has it."""
TESTS = Path(__file__).parents[1]
ONCE = """
mkdir -p "$MAKEWAY_CHECKPOINT_DIR" && cd "$MAKEWAY_CHECKPOINT_DIR"
exec 9> lock
flock -n 9 || echo TWO ATTEMPTS AT ONCE
mkdir "attempt-$MAKEWAY_ATTEMPT" || echo STARTED TWICE
cd "$OLDPWD"
exec python3 train.py --steps 400 --every 100 --seconds "$0"
"""
"""Trains, and says so where this attempt was started before, or another one of the job still runs."""


class Victim:
    """The process of the service."""

    def __init__(self, serving: Serving, log: Path) -> None:
        self._serving = serving
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it answers some time later."""
        host, port = self._serving.reservation.getsockname()
        command = [sys.executable, str(TESTS / "job_service_process.py"), host, str(port)]
        environ = {**os.environ, **self._serving.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal; the test fails if it has ended."""
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-4000:]
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@asynccontextmanager
async def running(serving: Serving, log: Path) -> AsyncIterator[Victim]:
    victim = Victim(serving, log)
    victim.start()
    try:
        yield victim
    finally:
        victim.kill()


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request until the service answers, and return what it answers."""
    for _ in range(600):
        try:
            async with asyncio.timeout(10):
                return await ask()
        except (MakewayError, httpx2.HTTPError, TimeoutError):
            await asyncio.sleep(0.2)
    raise TimeoutError("the service does not answer")


async def train(serving: Serving, person: str, name: str, seconds: float) -> Job:
    command = ["sh", "-c", ONCE, str(seconds)]
    return await patiently(lambda: serving.submit(person, name, *command, files=[TRAIN]))


@pytest.mark.covers("N07", "F42", "F47")
@pytest.mark.timeout(1800)
@pytest.mark.no_repeat
async def test_nothing_is_lost_or_run_twice(serving: Serving, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    faults = ["kill"] * KILLS + ["freeze"] * FREEZES
    chance.shuffle(faults)
    async with running(serving, tmp_path / "log") as victim:
        calm = await train(serving, "ana", "calm", 0.0)
        jobs = [await train(serving, "ana", f"train {number}", 0.05) for number in range(3)]
        for number, fault in enumerate(faults):
            if number % 2 == 0:  # an owner comes back, and the second of the running jobs makes way
                jobs.append(await train(serving, "bo", f"owner {number}", 0.005))
            await asyncio.sleep(chance.uniform(0.0, 3.0))
            if fault == "kill":
                victim.kill()
                await asyncio.sleep(chance.choice([0.0, 0.0, 5.0]))
                victim.start()
            else:
                victim.signal(signal.SIGSTOP)
                await asyncio.sleep(chance.uniform(1.0, 12.0))
                victim.signal(signal.SIGCONT)
        ended = [await ends(serving, job) for job in [calm, *jobs]]
        wanted = weights(await patiently(lambda: serving.log(calm)))
        for job in ended:
            outcomes = [attempt.outcome for attempt in job.attempts]
            assert (job.state.value, outcomes[-1]) == ("succeeded", "succeeded"), job
            assert set(outcomes[:-1]) <= {"preempted"}, job
            logs = [await patiently(lambda at=at, job=job: serving.log(job, at)) for at in range(1, len(outcomes) + 1)]
            assert not [log for log in logs if "TWICE" in log or "AT ONCE" in log], logs
            assert weights(logs[-1]) == wanted, f"{job.name} has other weights than an undisturbed run"
        evictions = Counter(job.preemptions for job in ended)
        assert sum(evictions[many] for many in evictions if many) > 0, "no job made way"
        await serving.no_pod_left()


@pytest.mark.covers("N07", "F42", "F47")
@pytest.mark.timeout(3600)
@pytest.mark.no_repeat
async def test_faults_of_the_node_that_pass_cost_no_job_anything(
    serving: Serving, real_node: Node, tmp_path: Path
) -> None:
    """Jobs train and make way while their node is not ready, offers no GPUs, is drained or has a job fill its disk."""
    chance = random.Random(SEED)
    kinds = [*FAULTS] * (NODE_FAULTS // len(FAULTS) + 1)
    faults = kinds[:NODE_FAULTS]
    chance.shuffle(faults)
    async with running(serving, tmp_path / "log"):
        calm = await ends(serving, await train(serving, "ana", "calm", 0.0))
        jobs = [await train(serving, "ana", f"train {number}", 0.05) for number in range(2)]
        owners = 0
        for number, fault in enumerate(faults):
            if number % 2 == 0:  # an owner comes back, and one job makes way
                jobs.append(await train(serving, "ana", f"more {number}", 0.05))
                jobs.append(await train(serving, "bo", f"owner {number}", 0.005))
                owners += 1
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            await FAULTS[fault](serving, real_node)
        ended = [await ends(serving, job) for job in jobs]
        wanted = weights(await patiently(lambda: serving.log(calm)))
        drains = faults.count("drain")
        for job in ended:
            outcomes = Counter(attempt.outcome for attempt in job.attempts)
            assert (job.state.value, outcomes.pop("succeeded")) == ("succeeded", 1), job
            assert outcomes.pop("lost", 0) <= drains, job
            assert not outcomes.keys() - {"preempted"}, job
            assert weights(await patiently(lambda job=job: serving.log(job, job.attempts[-1].number))) == wanted, job
        evictions = sum(job.preemptions for job in ended)
        # Only owners have jobs make way: a training job of 1 GPU for each of them, and for the job that fills the disk.
        assert evictions <= owners + faults.count("disk") + drains, [(job.name, job.preemptions) for job in ended]
        print(f"\n{len(faults)} faults of the node ({', '.join(faults)}): {evictions} evictions for {owners} owners")
        await serving.no_pod_left()


async def ends(serving: Serving, job: Job) -> Job:
    """Wait until a job has ended."""
    result: list[Job] = []

    async def there() -> bool:
        result.append(await patiently(lambda: serving.client("root").job(job.id)))
        return result[-1].state.value in ("succeeded", "failed", "cancelled")

    await serving.until(there, lambda: f"{job.name} ends: {result[-1]}")
    return result[-1]
