"""Training on machines elsewhere, while the service is killed, away, or led by another replica."""

from __future__ import annotations

import asyncio
import base64
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from elsewhere import Processes
from makeway_api.client import AsyncClient
from makeway_api.errors import MakewayError
from makeway_api.models import FileIn, Job, JobRequest
from postgres import empty_database, postgres_server
from replicas import Replica, settings
from running import python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TRAIN = FileIn(path="train.py", data=base64.b64encode((ROOT / "docs" / "examples" / "train.py").read_bytes()).decode())
STEPS = ["--steps", "1500", "--every", "5000"]
SECRET = "a secret that all replicas have"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def replica(folder: Path, name: str, url: str, port: int, workers_use: int) -> Replica:
    """Return a replica that listens on a port and whose workers use that of another, or the same."""
    environ = settings(folder / name, url, PORT=port, MAKEWAY_TICKET_SECRET=SECRET, PYTHONPATH=ROOT / "tests")
    address = f"http://127.0.0.1:{workers_use}/services/makeway"
    machines = str(folder / "machines")
    made = Replica(address, folder / name, machines, environ, script="elsewhere_process.py")
    return made


@asynccontextmanager
async def serving(folder: Path, *replicas: Replica) -> AsyncIterator[None]:
    (folder / "machines").mkdir()
    try:
        for item in replicas:
            await item.start()
        yield
    finally:
        for item in replicas:
            await item.close()
        leftover = Processes(folder / "machines", "")
        await leftover.finished()


@pytest.fixture
def one(tmp_path: Path) -> Replica:
    """Return a service on SQLite."""
    port = free_port()
    return replica(tmp_path, "one", f"sqlite:///{tmp_path / 'makeway.sqlite'}", port, port)


async def until(what: Callable[[], Awaitable[bool]], why: str) -> None:
    """Wait for something that a service tells, whether it is there or not at the moment."""
    try:
        async with asyncio.timeout(120):
            while True:
                with suppress(MakewayError):
                    if await what():
                        return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise TimeoutError(f"waited in vain: {why}") from None


def client(service: Replica, person: str = "ana") -> AsyncClient:
    return service.clients[person]


async def log_of(service: Replica, job: Job, attempt: int) -> str:
    text: str = (await client(service).logs(job.id, attempt=attempt, offset=0, limit=2**20)).text
    return text


async def reaches(service: Replica, job: Job, *states: str, attempt: int = 1) -> Job:
    result: list[Job] = []

    async def there() -> bool:
        now: Job = await client(service).job(job.id)
        result.append(now)
        return now.state.value in states and now.attempt >= attempt

    await until(there, f"{job.name} becomes {states}")
    return result[-1]


async def says(service: Replica, job: Job, text: str, attempt: int = 1) -> None:
    async def there() -> bool:
        return text in await log_of(service, job, attempt)

    await until(there, f"{job.name} says {text}")


async def training(service: Replica, name: str, seconds: str) -> Job:
    command = ["python", "train.py", *STEPS, "--seconds", seconds]
    request = JobRequest(name=name, command=command, profile="gpu1", files=[TRAIN])
    job = await client(service).submit(request)
    assert isinstance(job, Job)
    return job


def weights(log: str) -> str:
    result = re.search(r"weights (\w+)", log)
    assert result, log
    return result[1]


@pytest.mark.covers("N11")
@pytest.mark.no_repeat
async def test_training_is_bit_identical_while_notices_come_and_the_service_is_killed(
    one: Replica, tmp_path: Path
) -> None:
    async with serving(tmp_path, one):
        calm = await training(one, "calm", "0")
        rough = await training(one, "rough", "0.02")
        for attempt in (1, 2, 3):
            await reaches(one, rough, "running", attempt=attempt)
            await says(one, rough, "step", attempt)
            if attempt == 1:
                await one.kill()  # in the middle of the training
            await client(one).preempt_test(rough.id)
            if attempt == 2:
                await one.kill()  # with the notice written, or on its way
            await reaches(one, rough, "starting", "running", "succeeded", attempt=attempt + 1)
        done = await reaches(one, rough, "succeeded", attempt=4)
        assert (done.preemptions, done.failures, len(done.attempts)) == (3, 0, 4)
        assert [item.outcome for item in done.attempts] == ["preempted"] * 3 + ["succeeded"]
        await reaches(one, calm, "succeeded")
        assert weights(await log_of(one, rough, 4)) == weights(await log_of(one, calm, 1))
        for number, before in enumerate(done.attempts[:-1], 2):
            assert before.checkpoint is not None
            assert f"going on at step {before.checkpoint.step} of 1500" in await log_of(one, rough, number)


async def test_what_happens_while_the_service_is_away_is_reported_when_it_is_back(one: Replica, tmp_path: Path) -> None:
    code = """
import os, pickle, time
go = os.path.join(os.environ["MAKEWAY_CHECKPOINT_DIR"], "go")
for line in range(2000):
    print("line", line, flush=True)
    if line == 100:
        while not os.path.exists(go):
            time.sleep(0.02)
pickle.dump(list(range(300_000)), open(os.environ["MAKEWAY_RESULT_FILE"], "wb"))
"""
    async with serving(tmp_path, one):
        job = await client(one).submit(JobRequest(name="away", command=python(code), profile="gpu1"))
        assert isinstance(job, Job)
        await says(one, job, "line 100")
        assert one.process is not None
        one.process.kill()
        await asyncio.to_thread(one.process.wait)
        machines = tmp_path / "machines"
        (machines / "volume" / job.id / "go").touch()

        async def over() -> bool:
            return bool(list(machines.glob(f"{job.id}-1-0/attempt-1/status.json")))

        await until(over, "the job ends without the service")
        await one.start()
        done = await reaches(one, job, "succeeded", "failed")
        assert done.state.value == "succeeded", done.message
        assert (await log_of(one, job, 1)).splitlines() == [f"line {line}" for line in range(2000)]
        assert len(await client(one).result(job.id)) > 2**19


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """Start a PostgreSQL server of our own."""
    with postgres_server() as folder:
        yield folder


async def test_orders_reach_a_worker_at_a_follower_and_reports_reach_a_new_leader(
    postgres: str, tmp_path: Path
) -> None:
    url, first, second = empty_database(postgres), free_port(), free_port()
    leader = replica(tmp_path, "leader", url, first, second)
    follower = replica(tmp_path, "follower", url, second, second)
    async with serving(tmp_path, leader, follower):
        job = await training(leader, "far", "0.02")
        await reaches(leader, job, "running")
        await says(leader, job, "step")
        await client(leader).preempt_test(job.id)
        await reaches(leader, job, "running", attempt=2)
        await says(leader, job, "going on at step", attempt=2)
        assert leader.process is not None
        leader.signal(signal.SIGKILL)
        await asyncio.to_thread(leader.process.wait)
        await client(follower).preempt_test(job.id)
        await reaches(follower, job, "running", attempt=3)
        await says(follower, job, "going on at step", attempt=3)
        follower.signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        follower.signal(signal.SIGCONT)
        done = await reaches(follower, job, "succeeded", "failed", attempt=3)
        assert (done.state.value, done.preemptions, done.failures, len(done.attempts)) == ("succeeded", 2, 0, 3)
