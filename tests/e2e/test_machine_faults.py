"""Machines of a cloud in a folder while services are killed and frozen: none is forgotten, no job is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from machine_fleet import MachineFleet, fleet, replica
from postgres import empty_database, postgres_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SEED = int(os.environ.get("SEED", "20261128"))
KILLS = int(os.environ.get("KILLS", "5"))
"""How often the service is killed; `make faults` does it 25 times"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def work(world: MachineFleet, stop: asyncio.Event) -> None:
    """Submit jobs in bursts with pauses, so that machines are launched, run and idle all the time."""
    while not stop.is_set():
        for _ in range(world.chance.randint(1, 3)):
            await world.submit(round(world.chance.uniform(0.5, 5.0), 1), world.chance.choice(["gpu1", "gpu2"]))
        with suppress(TimeoutError):
            async with asyncio.timeout(world.chance.uniform(0.5, 6.0)):
                await stop.wait()


@pytest.mark.timeout(1200)
@pytest.mark.no_repeat
async def test_the_service_is_killed_while_machines_boot_run_and_drain(tmp_path: Path) -> None:
    port, url = free_port(), f"sqlite:///{tmp_path / 'makeway.sqlite'}"
    one = replica(tmp_path, "one", url, port, f"http://127.0.0.1:{port}", slow=0.4)
    met: set[str] = set()
    async with fleet(tmp_path, url, [one], SEED) as world:
        stop = asyncio.Event()
        working = asyncio.create_task(work(world, stop))
        began = time.monotonic()
        for _ in range(KILLS):
            await asyncio.sleep(world.chance.uniform(0.3, 4.0))
            assert not working.done(), working
            met |= {row.state for row in world.rows()}
            await one.kill()
        stop.set()
        await working
        print(f"\n{KILLS} kills in {time.monotonic() - began:.0f} s, {len(world.names)} jobs, at states {sorted(met)}")
        await world.all_right()


CALLS = (
    ("launch-before", "kill"),
    ("launch-after", "freeze"),
    ("terminate-before", "freeze"),
    ("terminate-after", "kill"),
    ("launch-before", "freeze"),
    ("launch-after", "kill"),
    ("terminate-before", "kill"),
    ("terminate-after", "freeze"),
)
"""Where a leader is in a call of the provider, and what is done to it then"""
HARMED = CALLS if "FAULTS" in os.environ else CALLS[:4]


class Balancer:
    """The address that machines use: it leads to a replica that is not withdrawn, as the service of a cluster does."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.withdrawn: set[int] = set()
        self.url = ""
        self._tasks: dict[asyncio.Task[None], int] = {}

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection, both ways, until one side closes it or its replica is withdrawn."""
        task = asyncio.current_task()
        assert task is not None
        for port in self.ports:
            if port in self.withdrawn:
                continue
            with suppress(OSError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
                self._tasks[task] = port
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(pump(reader, far_writer))
                        both.create_task(pump(far_reader, writer))
                finally:
                    del self._tasks[task]
                    far_writer.close()
                break
        writer.close()

    def withdraw(self, port: int) -> None:
        """Lead to a replica no more, and close all connections to it."""
        self.withdrawn.add(port)
        for task, there in list(self._tasks.items()):
            if there == port:
                task.cancel()

    async def close(self) -> None:
        """Close all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one way; the end of it closes the other side."""
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def balanced(ports: list[int]) -> AsyncIterator[Balancer]:
    """Serve a balancer in front of replicas."""
    made = Balancer(ports)
    server = await asyncio.start_server(made.carry, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await made.close()


@pytest.fixture
def postgres() -> Iterator[str]:
    with postgres_server() as folder:
        yield folder


async def harm(world: MachineFleet, balancer: Balancer, when: str, how: str) -> None:
    """Kill or freeze the leader while it makes a call, and wait until the other one has done all there is to do."""
    holds = world.cloud.folder / "holds"
    (holds / when).touch()
    await world.submit(0.5)

    async def held(_: object) -> list[str]:
        return [path.name.rpartition("-")[2] for path in holds.glob(f"{when}-by-*")]

    [name] = await world.heard(held, f"a leader is at {when}")
    victim = next(one for one in world.replicas if one.name == name)
    other = next(one for one in world.replicas if one.name != name)
    assert victim.process is not None
    balancer.withdraw(int(victim.environ["PORT"]))
    victim.signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    for path in holds.iterdir():
        path.unlink()
    began = time.monotonic()
    world.replicas = [other]
    await world.heard(world.all_ended, f"all jobs end after {how} at {when}")
    await world.heard(world.empty, f"no machine is left after {how} at {when}", 120)
    print(f"{how} of {name} at {when}: all is done after {time.monotonic() - began:.1f} s", flush=True)
    if how == "kill":
        await asyncio.to_thread(victim.process.wait)
        await victim.start()
    else:
        victim.signal(signal.SIGCONT)
    balancer.withdrawn.clear()
    world.replicas = [other, victim]


@pytest.mark.timeout(1200)
@pytest.mark.no_repeat
async def test_a_leader_is_killed_or_frozen_while_it_launches_and_ends_machines(postgres: str, tmp_path: Path) -> None:
    url, ports = empty_database(postgres), [free_port(), free_port()]
    async with balanced(ports) as balancer:
        more = {"MAKEWAY_LEADER_SECONDS": 3}
        both = [
            replica(tmp_path, name, url, port, balancer.url, 0.0, **more)
            for name, port in zip(("one", "two"), ports, strict=True)
        ]
        async with fleet(tmp_path, url, both, SEED) as world:
            for when, how in HARMED:
                await harm(world, balancer, when, how)
            await asyncio.sleep(2)  # what was frozen goes on
            await world.all_right()
