"""The loop of deployments on the real store: it launches for what waits, ends what idles, and outlives its failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from makeway_quota import metrics
from makeway_quota.autoscale.demand import PendingWork
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.instances import Instance
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.prospects import NoLaunch
from makeway_quota.autoscale.provider import JoinData, Provider
from makeway_quota.autoscale.providers.memory import MemoryProvider
from makeway_quota.control.machines import deployment_driver, machine_loop
from makeway_quota.control.machines.cycle_demand import CycleDemand
from makeway_quota.control.machines.machine_loop import MachineLoop
from makeway_quota.engine.restarts import Restarts
from makeway_quota.quarantine import Quarantine
from makeway_quota.services import machine_what_if
from makeway_quota.store import Store, open_store
from makeway_quota.store.errors import NotLeading, StoreError
from makeway_quota.store.records import NewDecision, NewWorkload
from makeway_quota.store.rows import initial_record
from makeway_quota.store.storage.sealed_secrets import SecretKeys, StoredCredential
from makeway_quota.values import Notice, Place
from makeway_quota.wording.machines import CAUSES
from running import python, running
from sqlalchemy import event

DOCUMENT = """
version: 1
name: {name}
provider: memory
max_machines: 5
drain_timeout: 60
machine_types:
  - {{name: g2, pool: gpu, instance: big-2, gpus: 2, idle_timeout: 60, max_machines: {machines}}}
"""
START = 1_790_000_000.0
FACTS = {"gpus": 2, "cpu": 8000, "memory": 4096, "init_exit_code": 0, "attempts": []}


@dataclass
class Leading:
    """A leader whose term a test sets."""

    term: int | None = None

    def check(self, term: int | None = None) -> int:
        if self.term is None or term not in (None, self.term):
            raise NotLeading("this replica does not lead")
        return self.term


@dataclass
class World:
    """A service with its loop, on a clock that a test moves."""

    store: Store
    now: float = START
    leader: Leading = field(default_factory=Leading)
    providers: dict[str, MemoryProvider] = field(default_factory=dict)
    cycles: int = 0

    def __post_init__(self) -> None:
        self.lead()
        self.loop = self.new_loop()

    def new_loop(self) -> MachineLoop:
        def woken() -> None:
            self.cycles += 1

        def clock() -> float:
            return self.now

        leader: Any = self.leader
        return MachineLoop(self.store, leader, self.provider, woken, clock, clock)

    def provider(self, deployment: Deployment) -> Provider:
        return self.providers.setdefault(deployment.name, MemoryProvider(lambda: self.now))

    def lead(self) -> None:
        self.leader.term = self.store.take_term("test", self.now)

    def deploy(self, name: str = "cloud", machines: int = 3, version: int = 0) -> None:
        self.store.deployments.save(name, DOCUMENT.format(name=name, machines=machines), version, "admin", self.now)

    def needs(self, *jobs: str, busy: tuple[str, ...] = (), accepting_machines: tuple[str, ...] | None = None) -> None:
        """Pass on what a cycle knows that has observed the machines as they are."""
        self.loop.planned(self.known(*jobs, busy=busy, accepting_machines=accepting_machines), self.leader.term)

    def known(
        self, *jobs: str, busy: tuple[str, ...] = (), accepting_machines: tuple[str, ...] | None = None
    ) -> CycleDemand:
        """Return what a cycle knows that has observed the machines as they are."""
        self.now += 0.1
        ready = tuple(row.id for row in self.rows if row.state == "ready")
        pending = tuple(PendingWork(job, ("gpu",), gpus=2000) for job in jobs)
        working = ready if accepting_machines is None else accepting_machines
        return CycleDemand(self.now, pending, frozenset(ready), frozenset(working), dict.fromkeys(busy, 1), frozenset())

    @property
    def rows(self) -> list[Machine]:
        return self.store.machines.live()

    def states(self) -> list[str]:
        return sorted(row.state for row in self.rows)

    async def turn(self, seconds: float = 1.0) -> None:
        """Move the clock, make a step, and wait for its calls."""
        self.now += seconds
        await self.loop.turn()
        for driver in self.loop._drivers.values():
            while driver._tasks:
                await asyncio.gather(*driver._tasks, return_exceptions=True)

    def report(self, machine: Machine, **facts: object) -> None:
        self.store.machine_reports.join(machine.id, "boot-1", {}, self.now)
        self.store.machine_reports.report(machine.id, "boot-1", FACTS | {"n": self.now} | facts, self.now)

    async def grown(self, *jobs: str) -> list[Machine]:
        """Return machines that are ready, for jobs that wait."""
        await self.turn()
        self.needs(*jobs)
        await self.turn()
        await self.turn()
        for row in self.rows:
            self.report(row)
        await self.turn()
        assert self.states() == ["ready"] * len(jobs)
        return self.rows


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    yield World(store)
    store.close()


async def test_a_pause_holds_though_the_provider_cannot_be_made_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the key of its credential cannot be read."""
    world.deploy()
    await world.grown("a")

    def locked(deployment: Deployment) -> Provider:
        raise ValueError("no key")

    monkeypatch.setattr(world.loop, "_make_provider", locked)
    paused = DOCUMENT.format(name="cloud", machines=3) + "paused: true\n"
    world.store.deployments.save("cloud", paused, 1, "admin", world.now)
    world.needs("b")
    for _ in range(4):
        await world.turn()
        world.needs()
    assert [row.state for row in world.rows] in (["draining"], ["terminating"], [])


async def test_a_deployment_whose_provider_cannot_be_made_says_why_and_forgets_no_machine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new leader has no provider of an earlier document: as after a restart without the provider's package."""
    world.deploy()
    world.deploy("other")
    [row] = await world.grown("a")
    [(name, cloud)] = [(name, one) for name, one in world.providers.items() if one.running()]
    world.lead()
    world.loop = world.new_loop()
    world.loop.quarantine = Quarantine(lambda: world.now)
    able = world.provider

    def missing(deployment: Deployment) -> Provider:
        if deployment.name == name:
            raise ValueError("The provider aws needs boto3 beside the service: install Makeway with its extra `aws`.")
        return able(deployment)

    monkeypatch.setattr(world.loop, "_make_provider", missing)
    for _ in range(4):
        world.report(row)
        await world.turn()
        world.needs("a", "b")
    status = world.loop.status(name)
    assert status is not None
    assert (status.problem, status.unusable) == (
        "The provider aws needs boto3 beside the service: install Makeway with its extra `aws`.", True
    )  # fmt: skip
    assert {one.deployment for one in world.rows if one.id != row.id} == {"cloud", "other"} - {name}, "it launches none"
    assert any(one.name == name for one in world.loop.quarantine.entries), "pages and probes name it, too"
    for _ in range(20):  # it has nothing to do, and is to be ended
        world.report(row)
        world.needs()
        await world.turn(20)
    assert [one.state for one in world.rows if one.id == row.id] == ["terminating"]
    assert list(cloud.running()) == [row.instance], "no call was made, and none is forgotten"

    monkeypatch.setattr(world.loop, "_make_provider", able)
    for _ in range(60):
        await world.turn(10)
    assert not cloud.running()
    assert [one.id for one in world.rows if one.id == row.id] == []
    status = world.loop.status(name)
    assert status is not None
    assert (status.problem, status.unusable) == ("", False)


async def test_a_provider_that_cannot_be_made_anew_launches_nothing_and_tells_those_who_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy()
    [row] = await world.grown("a")

    def locked(deployment: Deployment) -> Provider:
        raise ValueError("no key")

    monkeypatch.setattr(world.loop, "_make_provider", locked)
    world.store.deployments.save("cloud", DOCUMENT.format(name="cloud", machines=3) + "title: C\n", 1, "ad", world.now)
    for _ in range(4):
        world.report(row)
        world.needs("b", busy=(row.id,))
        await world.turn()
    assert [one.id for one in world.rows] == [row.id]
    [(_, told)] = world.loop.prospects or ()
    prospect = told["b"]
    assert isinstance(prospect, NoLaunch)
    [cause] = prospect.causes
    assert CAUSES[cause.code](cause.values) == "the service cannot use the provider of C"


def _titled(title: str, more: str = "") -> str:
    return f"{DOCUMENT.format(name='cloud', machines=3)}title: {title}\n{more}"


async def _with_a_document_that_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Save a second version for which no provider can be made, and try until it backs off for long.

    Returns the machine of the first one.
    """
    world.loop.quarantine = Quarantine(lambda: world.now)
    world.deploy()
    [row] = await world.grown("a")

    def broken(deployment: Deployment) -> Provider:
        if deployment.title == "Wrong":
            raise ValueError("no such region")
        return world.provider(deployment)

    monkeypatch.setattr(world.loop, "_make_provider", broken)
    world.store.deployments.save("cloud", _titled("Wrong"), 1, "admin", world.now)
    for _ in range(6):
        world.report(row)
        world.needs(busy=(row.id,))
        await world.turn(20)
    [entry] = world.loop.quarantine.entries
    assert (entry.name, entry.reason) == ("cloud", "ValueError: no such region")
    assert entry.again_at > world.now + 5
    return row


@pytest.mark.parametrize("edit", ["pause", "delete"])
async def test_a_pause_and_a_deletion_count_at_the_next_step_while_a_document_that_failed_backs_off(
    world: World, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    row = await _with_a_document_that_fails(world, monkeypatch)
    if edit == "pause":
        world.store.deployments.save("cloud", _titled("Wrong", "paused: true\n"), 2, "admin", world.now)
    else:
        world.store.deployments.delete("cloud", 2, "admin", world.now)
    world.report(row)
    world.needs(busy=(row.id,))
    await world.turn(0.1)
    assert [(one.id, one.state) for one in world.rows] == [(row.id, "draining")]


async def test_a_correction_counts_at_the_next_step_while_a_document_that_failed_backs_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = await _with_a_document_that_fails(world, monkeypatch)
    world.store.deployments.save("cloud", _titled("Right"), 2, "admin", world.now)
    await world.turn(0.1)
    status = world.loop.status("cloud")
    assert status is not None
    assert (status.problem, status.unusable) == ("", False)
    world.needs("b", busy=(row.id,))
    await world.turn(0.1)
    assert len(world.rows) == 2
    assert world.loop.quarantine.entries == []


async def test_a_credential_that_was_set_is_used_at_the_next_step_while_its_absence_backs_off(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = SecretKeys(tmp_path / "credentials.key", made=True)

    def made(deployment: Deployment) -> Provider:
        if not world.store.secrets.cloud(keys, deployment.name):
            raise ValueError("it has no credential")
        return world.provider(deployment)

    monkeypatch.setattr(world.loop, "_make_provider", made)
    world.loop.quarantine = Quarantine(lambda: world.now)
    world.deploy()
    for _ in range(6):
        await world.turn(20)
    status = world.loop.status("cloud")
    assert status is not None
    assert status.unusable
    credential = StoredCredential("cloud", "cloud", "", world.now, "admin")
    line = NewDecision("credential", None, None, "admin", "credential", "It is set.", {})
    world.store.secrets.write(credential, {"key": "k"}, keys, line)
    await world.turn(0.1)
    status = world.loop.status("cloud")
    assert status is not None
    assert not status.unusable


@contextmanager
def _reads_of_documents(world: World) -> Iterator[list[str]]:
    """Collect an entry for each statement that reads documents of deployments."""
    read = list[str]()

    def heard(connection: object, cursor: object, statement: str, *_: object) -> None:
        read.extend(["documents"] if "deployments.document" in statement else [])

    event.listen(world.store._database.engine, "before_cursor_execute", heard)
    try:
        yield read
    finally:
        event.remove(world.store._database.engine, "before_cursor_execute", heard)


async def test_a_document_that_failed_is_neither_read_nor_tried_again_before_it_is_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = await _with_a_document_that_fails(world, monkeypatch)
    tries = world.loop.quarantine.entries[0].tries
    with _reads_of_documents(world) as read:
        for _ in range(3):
            world.report(row)
            world.needs(busy=(row.id,))
            await world.turn(0.1)
        assert read == []
        await world.turn(120)
        assert read == ["documents"]
    assert world.loop.quarantine.entries[0].tries == tries + 1


async def test_a_database_that_fails_while_a_provider_is_made_is_not_called_a_fault_of_the_provider(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy()
    await world.turn()

    def locked(deployment: Deployment) -> Provider:
        raise StoreError("the database is locked")

    with monkeypatch.context() as broken:
        broken.setattr(world.loop, "_make_provider", locked)
        world.store.deployments.save("cloud", _titled("C"), 1, "admin", world.now)
        with pytest.raises(StoreError):
            await world.turn()
        driver = world.loop._drivers["cloud"]
        assert (driver.deployment.revision, driver.deployment.can_launch) == (1, True)
    await world.turn(0.1)
    assert (driver.deployment.revision, driver.deployment.title) == (2, "C")
    assert world.loop.quarantine.entries == []


async def test_a_launch_that_cannot_be_called_without_a_provider_is_not_counted_as_called(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its machine would hold its place, and the credential, until a list shows that there is no instance."""
    world.deploy()
    await world.turn()
    world.providers["cloud"].busy = 1
    world.needs("a")
    await world.turn()
    assert [(row.state, row.launch_calls) for row in world.rows] == [("requested", 0)], "it was throttled"
    world.lead()
    world.loop = world.new_loop()

    def missing(deployment: Deployment) -> Provider:
        raise ValueError("no credential")

    monkeypatch.setattr(world.loop, "_make_provider", missing)
    for _ in range(4):
        world.needs("a")
        await world.turn(60)
    assert [(row.state, row.launch_calls) for row in world.rows] == [("requested", 0)]
    for _ in range(3):
        world.needs()
        await world.turn(200)
    assert world.rows == []
    [row] = world.store.machines.machines("cloud")
    assert (row.state, row.instance) == ("failed", None)


async def test_nothing_is_launched_before_a_cycle_says_what_waits(world: World) -> None:
    world.deploy()
    for _ in range(5):
        await world.turn()
    assert world.rows == []
    assert world.loop.active


@pytest.mark.covers("F49", "F67")
async def test_machines_are_launched_for_what_waits_once_and_end_when_idle(world: World) -> None:
    world.deploy()
    machines = await world.grown("job-1", "job-2")
    assert len(world.providers["cloud"].running()) == 2
    busy = tuple(row.id for row in machines)
    for _ in range(3):
        world.needs(busy=busy)
        await world.turn(100)
        for row in world.rows:
            world.report(row, attempts=[{"job": "job-1", "attempt": 1, "worker": 0, "state": "running"}])
    assert world.states() == ["ready", "ready"]
    for seconds in (100, 1, 1, 1, 100, 400, 20):
        world.needs(accepting_machines=())
        await world.turn(seconds)
        for row in world.rows:
            world.report(row)
    assert world.rows == []
    assert not world.providers["cloud"].running()
    states = [event.state for event in world.store.machine_log.events(machine=machines[0].id)]
    assert states[::-1] == ["requested", "booting", "ready", "draining", "terminating", "gone"]


async def test_a_demand_of_before_a_change_launches_nothing_twice(world: World) -> None:
    world.deploy()
    await world.turn()
    world.needs("job-1")
    for _ in range(4):
        await world.turn()  # always the same cycle
    assert len(world.rows) == 1


async def test_a_machine_on_which_a_cycle_may_still_start_work_is_not_ended(world: World) -> None:
    world.deploy()
    [machine] = await world.grown("job-1")
    world.needs()
    await world.turn(100)
    assert world.states() == ["draining"]
    world.report(machine)
    for _ in range(3):
        world.needs(accepting_machines=(machine.id,))  # it observed the machine before the drain
        await world.turn(5)
        world.report(machine)
    assert world.states() == ["draining"]
    world.needs(accepting_machines=())
    await world.turn(5)
    assert world.states() == ["terminating"]


async def test_a_new_leader_goes_on_with_the_rows_and_the_deposed_one_writes_nothing(world: World) -> None:
    world.deploy()
    [machine] = await world.grown("job-1")
    second = World(world.store, world.now, providers=world.providers)
    world.leader.term = second.leader.term - 1  # it has not heard yet
    world.needs("job-1", "job-2")
    await world.turn()
    assert [row.id for row in world.rows] == [machine.id]
    second.now = world.now
    second.needs()
    await second.turn()
    second.needs("job-2", busy=(machine.id,))
    await second.turn()
    assert len(second.rows) == 2
    assert len(second.providers["cloud"].running()) == 2


async def test_a_deployment_that_cannot_be_read_holds_up_no_other(world: World) -> None:
    world.deploy("good")
    world.store.deployments.save("bad", "version: 1\nname: bad\nprovider: moon\n", 0, "admin", world.now)
    await world.turn()
    world.needs("job-1")
    await world.turn()
    assert [row.deployment for row in world.rows] == ["good"]
    assert any(one.name == "bad" for one in world.loop.quarantine.entries)


async def test_a_provider_that_refuses_and_one_that_hangs_hold_up_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy("good")
    world.deploy("hangs")
    released = SimpleNamespace(now=False)

    def hang(self: MemoryProvider, deployment: str, now: float) -> Any:
        while not released.now:
            time.sleep(0.01)
        raise RuntimeError("too late")

    monkeypatch.setattr(
        world,
        "provider",
        lambda deployment: (
            type("Hanging", (MemoryProvider,), {"list": hang})(lambda: world.now)
            if deployment.name == "hangs"
            else World.provider(world, deployment)
        ),
    )
    world.loop = world.new_loop()
    await world.loop.turn()
    world.now += 1
    world.needs("job-1")
    await world.loop.turn()
    assert "good" in {row.deployment for row in world.rows}
    released.now = True
    await world.turn()


def counted(name: str, **labels: str) -> float:
    """Return a metric as Prometheus would read it."""
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.covers("N19")
async def test_boots_and_failures_are_counted_once_and_only_if_they_were_written(world: World) -> None:
    def numbers() -> tuple[float, float, float]:
        boots, seconds = (
            counted(f"makeway_machine_boot_seconds_{one}", deployment="cloud") for one in ("count", "sum")
        )
        failures = counted("makeway_machine_failures_total", deployment="cloud", failure="stock_out")
        return boots, seconds, failures

    before = numbers()
    world.deploy()
    await world.grown("job-1", "job-2")
    await world.turn()
    boots, seconds, failures = (after - known for after, known in zip(numbers(), before, strict=True))
    assert (boots, failures) == (2, 0)
    assert 2 <= seconds <= 20
    world.providers["cloud"].stock_out.add(("big-2", "", "on_demand"))
    for _ in range(5):
        world.needs("job-1", "job-2", "job-3", busy=tuple(row.id for row in world.rows), accepting_machines=())
        await world.turn()
    assert numbers()[2] - before[2] == 1, "no machine is to be had, which is one failure while launches are held back"
    assert numbers()[0] - before[0] == 2


@pytest.mark.covers("F50")
async def test_each_deployment_lists_its_provider_at_its_own_interval(world: World) -> None:
    for name, seconds in (("often", 5), ("seldom", 60)):
        text = DOCUMENT.format(name=name, machines=1).replace(
            "machine_types", f"poll_interval: {seconds}\nmachine_types"
        )
        world.store.deployments.save(name, text, 0, "admin", world.now)
    lists: Counter[str] = Counter()

    class Counting(MemoryProvider):
        """A provider that counts how often it is listed."""

        def list(self, deployment: str, now: float) -> Any:
            lists[deployment] += 1
            return super().list(deployment, now)

    world.providers = {name: Counting(lambda: world.now) for name in ("often", "seldom")}
    for _ in range(120):
        await world.turn()
    assert lists == {"often": 24, "seldom": 2}


@pytest.mark.covers("F55")
async def test_deleting_ends_the_machines_first_and_then_the_deployment(world: World) -> None:
    world.deploy()
    await world.grown("job-1")
    world.store.deployments.delete("cloud", 1, "admin", world.now)
    await world.turn()
    assert world.states() == ["draining"]
    assert world.store.deployments.read("cloud") is not None
    for seconds in (1, 1, 70, 5, 450, 20, 20):
        world.needs(accepting_machines=())
        await world.turn(seconds)
        for row in world.rows:
            world.report(row)
    assert world.rows == []
    assert world.store.deployments.read("cloud") is None
    assert not world.loop.active
    assert not world.providers["cloud"].running()


async def test_an_edit_counts_at_the_next_step(world: World) -> None:
    world.deploy(machines=1)
    await world.turn()
    world.needs("job-1", "job-2", "job-3")
    await world.turn()
    assert len(world.rows) == 1
    assert {one.code for one in _refusals(world.loop)} == {"max_machines"}
    world.deploy(machines=2, version=1)
    await world.turn()
    world.needs("job-1", "job-2", "job-3")
    await world.turn()
    assert len(world.rows) == 2


def _refusals(loop: MachineLoop) -> Any:
    status = loop.status("cloud")
    assert status is not None
    return status.refusals


async def test_a_lost_machine_is_ended_once_no_work_has_a_row_there(world: World) -> None:
    world.deploy()
    [machine] = await world.grown("job-1")
    busy = (machine.id,)
    world.needs(busy=busy)
    await world.turn(130)
    assert world.states() == ["lost"]
    world.needs(busy=busy)
    await world.turn()
    assert world.states() == ["lost"]
    world.needs()
    await world.turn()
    assert world.states() == ["terminating"]


class SlowProvider(MemoryProvider):
    """A provider whose answers to launches are held back until a test releases them."""

    released: threading.Event
    late = False
    """whether the instance, too, exists only then"""

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        if not self.late:
            super().launch(request, token, join)
        self.released.wait(30)
        return super().launch(request, token, join)


async def _whose_launches_hang(world: World) -> SlowProvider:
    """Deploy on a provider whose launches hang until it is released."""
    provider = SlowProvider(lambda: world.now)
    provider.released = threading.Event()
    world.providers["cloud"] = provider
    world.deploy()
    await world.turn()
    return provider


async def _with_a_launch_that_hangs(world: World, late: bool) -> SlowProvider:
    provider = await _whose_launches_hang(world)
    provider.late = late
    world.needs("job-1")
    await world.loop.turn()
    assert world.states() == ["requested"]
    return provider


async def _turns(world: World, *seconds: float) -> None:
    """Make steps that wait for no call, each with the list before it."""
    for item in seconds:
        world.now += item
        world.needs(accepting_machines=())
        await world.loop.turn()
        await asyncio.sleep(0.1)
        await world.loop.turn()


async def test_a_launch_that_hangs_holds_up_no_end(world: World) -> None:
    provider = await _with_a_launch_that_hangs(world, late=False)
    try:
        world.store.deployments.delete("cloud", 1, "admin", world.now)
        await _turns(world, 20, 20, 20)
        assert len(provider.instances) == 1
        assert not provider.running()
    finally:
        provider.released.set()
    await world.turn()


async def test_many_launches_that_hang_hold_up_neither_lists_nor_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment_driver, "CALLS_AT_ONCE", 2)
    provider = await _whose_launches_hang(world)
    try:
        world.needs("job-1", "job-2", "job-3")
        await world.loop.turn()
        assert world.states() == ["requested"] * 3
        world.store.deployments.delete("cloud", 1, "admin", world.now)
        await _turns(world, 20, 20, 20)
        assert len(provider.instances) == 2
        assert not provider.running()
    finally:
        provider.released.set()
    await world.turn()


async def test_a_launch_that_had_no_thread_in_time_is_not_made_any_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment_driver, "CALLS_AT_ONCE", 1)
    provider = await _whose_launches_hang(world)
    try:
        world.needs("job-1", "job-2")
        await world.loop.turn()
        await asyncio.sleep(0.1)
        assert len(provider.instances) == 1
        world.now += 130
    finally:
        provider.released.set()
    for driver in world.loop._drivers.values():
        while driver._tasks:
            await asyncio.gather(*driver._tasks, return_exceptions=True)
    assert len(provider.instances) == 1


async def test_a_deployment_is_not_gone_while_a_launch_hangs(world: World) -> None:
    """Else what it launches at last would belong to no deployment, and cost money for ever."""
    provider = await _with_a_launch_that_hangs(world, late=True)
    try:
        world.store.deployments.delete("cloud", 1, "admin", world.now)
        await _turns(world, 20, 600, 600, 600)
        assert world.rows == []
        assert world.store.deployments.read("cloud") is not None
    finally:
        provider.released.set()
    for _ in range(60):
        await world.turn(20)
    assert len(provider.instances) == 1
    assert not provider.running()
    assert world.store.deployments.read("cloud") is None


async def test_documents_are_read_only_where_one_has_changed(world: World) -> None:
    world.deploy("one")
    world.deploy("two")
    await world.turn()
    with _reads_of_documents(world) as read:
        for _ in range(3):
            await world.turn()
        assert read == []
        world.deploy("two", machines=1, version=1)
        read.clear()
        await world.turn()
        assert read == ["documents"]
        assert world.loop._drivers["two"].deployment.types[0].max_machines == 1
        await world.turn()
        assert read == ["documents"]


async def _replaced(world: World) -> tuple[World, SlowProvider]:
    """Return a new leader whose calls do not hang, and the provider in which a launch of the one before still does.

    The cloud has forgotten the tokens of launches when that one goes on.
    """
    hanging = await _with_a_launch_that_hangs(world, late=True)
    await asyncio.sleep(0.1)
    hanging.ignores_tokens = True
    quick = MemoryProvider(lambda: world.now, hanging.instances, ignores_tokens=True, _numbers=hanging._numbers)
    return World(world.store, world.now, providers={"cloud": quick}), hanging


async def _launched_late(world: World, hanging: SlowProvider) -> str:
    """Release the launch of the replaced leader; return the instance that it makes."""
    before = hanging.instances.keys() | set()
    hanging.released.set()
    for driver in world.loop._drivers.values():
        while driver._tasks:
            await asyncio.gather(*driver._tasks, return_exceptions=True)
    [late] = hanging.instances.keys() - before
    assert late in hanging.running()
    return late


async def test_an_instance_that_a_replaced_leader_launches_after_its_machine_is_gone_is_ended(world: World) -> None:
    second, hanging = await _replaced(world)
    try:
        while second.rows:
            await _both(world, second)
            assert second.now < START + 3600
    finally:
        late = await _launched_late(world, hanging)
    for _ in range(30):
        await _both(world, second)
    assert late not in hanging.running()
    assert second.rows == []


async def test_an_instance_that_a_replaced_leader_launches_for_a_machine_that_has_one_is_ended(world: World) -> None:
    second, hanging = await _replaced(world)
    try:
        while "ready" not in second.states():
            await _both(world, second, "job-1")
            for row in second.rows:
                second.report(row)
            assert second.now < START + 600
        [machine] = second.rows
    finally:
        late = await _launched_late(world, hanging)
    assert late != machine.instance
    for _ in range(30):
        second.report(machine)
        await _both(world, second, busy=(machine.id,))
    assert [*hanging.running()] == [machine.instance]
    assert [(row.id, row.state, row.instance) for row in second.rows] == [(machine.id, "ready", machine.instance)]


async def _both(world: World, second: World, *jobs: str, busy: tuple[str, ...] = ()) -> None:
    """Make a step of the new leader, on the clock of both."""
    second.needs(*jobs, busy=busy)
    await second.turn(20)
    world.now = second.now


async def test_a_clock_that_was_set_while_another_replica_led_moves_no_times(world: World) -> None:
    monotonic = time.monotonic
    leader: Any = world.leader
    world.loop = MachineLoop(world.store, leader, world.provider, lambda: None, lambda: world.now, monotonic)
    world.now = time.time()
    world.loop._steps.observe()
    world.deploy()
    await world.turn(0)
    world.needs("job-1")
    assert world.loop._demand is not None
    world.loop._demand = replace(world.loop._demand, began=monotonic())
    await world.turn(0)
    [machine] = world.rows
    world.leader.term = None
    await world.turn(0)
    world.now += 3600
    world.lead()
    await world.turn(0)
    assert [row.requested_at for row in world.rows] == [machine.requested_at]


async def test_a_deadline_that_was_noted_before_the_clock_was_set_leaves_as_long_to_save(world: World) -> None:
    """The cycle comes before the step that shifts the rows, and the rows that are known are from before that."""
    leader: Any = world.leader
    ahead = [0.0]
    args = world.store, leader, world.provider, lambda: None, lambda: world.now + ahead[0], lambda: world.now
    world.loop = MachineLoop(*args, live_machines=world.store.machines.live)
    world.deploy()
    [machine] = await world.grown("job-1")
    world.store.deployments.save(
        "cloud", DOCUMENT.format(name="cloud", machines=3) + "paused: true\n", 1, "admin", world.now
    )
    world.needs(busy=(machine.id,))
    await world.turn()
    [machine] = world.rows
    assert machine.deadline is not None

    def seconds() -> float:
        """Return for how many seconds a job of the machine may save."""
        made = initial_record(NewWorkload("train", "job", "rnd", "gpu1", "ana", gpus=1000), 0.0)
        job = made._replace(state="running", placement=(Place(machine.id, (0,), (1000,)),), grace=3600.0)
        known = replace(world.known(busy=(machine.id,)), rows=(job,), machines={machine.id: machine.id})
        [change] = world.loop.notices(known, world.now + ahead[0]).changes
        notice = change.fields["notice"]
        assert isinstance(notice, Notice)
        return notice.deadline - (world.now + ahead[0])

    before = seconds()
    assert before > 30
    for ahead[0] in (7200.0, -7200.0):
        assert seconds() == pytest.approx(before, abs=1), "before the step"
        world.needs(busy=(machine.id,))
        await world.turn(0)
        assert seconds() == pytest.approx(before, abs=1), "after it"


async def test_an_error_where_moves_are_looked_for_stops_neither_cycles_nor_steps(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def broken(*args: Any) -> None:
        asked.append(args)
        raise RecursionError("this document")

    monkeypatch.setattr(machine_loop, "drain_candidates", broken)
    world.store.deployments.save(
        "cloud", DOCUMENT.format(name="cloud", machines=3) + "moves: {every: 60}\n", 0, "admin", world.now
    )
    [machine] = await world.grown("job-1")
    world.needs(busy=(machine.id,))
    await world.turn(90)
    (tmp_path / "service").mkdir()
    async with running(tmp_path / "service") as run:
        seen = run.service.components.world
        known = await world.loop.known(seen, (), world.now, world.now)
    assert asked
    assert known.restartable == known.moved == frozenset()
    assert [one.step for one in world.loop.quarantine.entries] == [machine_loop.ASKING]
    assert world.loop.notices(known, world.now).changes == []


async def test_moves_are_looked_for_with_what_the_cycle_has_started(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that its plan found waiting takes room now."""
    found: list[Restarts] = []

    def noted(known: CycleDemand, machines: object, restarts: Callable[[], Restarts], *rest: object) -> CycleDemand:
        found.append(restarts())
        return known

    world.store.deployments.save(
        "cloud", DOCUMENT.format(name="cloud", machines=3) + "moves: {every: 60}\n", 0, "admin", world.now
    )
    [machine] = await world.grown("job-1")
    world.needs(busy=(machine.id,))
    await world.turn(90)
    monkeypatch.setattr(machine_loop, "drain_candidates", lambda *args: {"cloud": [machine]})
    monkeypatch.setattr(machine_loop, "restartable", noted)
    (tmp_path / "service").mkdir()
    async with running(tmp_path / "service") as run:
        seen = run.service.components.world
        job = await run.submit("ana", "x", python("import time; time.sleep(60)"), profile="gpu1")
        await run.job(job.id, "running", seconds=20)
        await world.loop.known(seen, (), world.now, time.time())
        await run.client("ana").cancel(job.id)
    assert [one.elsewhere((), [job.id]) is not None for one in found] == [True], "it runs, and would start again"


async def test_reports_for_a_step_that_fails_are_kept_once_for_each_machine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy()
    [machine] = await world.grown("job-1")
    driver = world.loop._drivers["cloud"]
    with monkeypatch.context() as broken:
        broken.setattr(world.store.machines, "read", lambda name: 1 / 0)
        for _ in range(5):
            world.report(machine)
            await world.turn(30)
    assert driver._term is not None
    assert list(driver._term.reports) == [machine.id]
    world.loop.quarantine = Quarantine()
    await world.turn(1)
    assert world.states() == ["ready"]
    assert not driver._term.reports


async def test_reports_of_machines_change_no_offer_and_another_machine_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change makes all answers of the offers void, and with many machines one reports at any moment."""

    async def call(function: Any, *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(machine_what_if, "FRESH", 0.0)
    settings = SimpleNamespace(backends=("local", "machines"))
    context: Any = SimpleNamespace(settings=settings, store=world.store, call=call)
    what_if = machine_what_if.MachineWhatIf(context)
    world.deploy()
    [machine] = await world.grown("job-1")
    before = await what_if.read()
    assert [row.state for row in before["cloud"].rows.machines] == ["ready"]
    world.needs(busy=(machine.id,))
    world.report(machine, attempts=1)
    await world.turn(10)
    [after] = world.rows
    assert (after.heard_at, after.version) != (machine.heard_at, machine.version)
    assert await what_if.read() is before
    world.needs("job-2", busy=(machine.id,))
    await world.turn()
    assert len((await what_if.read())["cloud"].rows.machines) == 2
