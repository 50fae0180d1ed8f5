"""What is kept idle for machines that boot is bounded, whatever becomes of their boots, and outlives its leader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from makeway_quota import policy
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.machines.backend import MachinesBackend
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.routing.backend import RoutingBackend
from makeway_quota.control.machines import machine_loop
from makeway_quota.control.machines.machine_loop import MachineLoop
from makeway_quota.control.world.engine_view import EngineView
from makeway_quota.control.world.pool_assignment import divide
from makeway_quota.engine.snapshot import Node
from makeway_quota.history.durations import Durations
from makeway_quota.store import open_store
from running import IDLE, running

from .test_machine_loop import World

POOLS = """
version: 1
pools:
  - {name: gpu, kind: autoscaled}
  - {name: half, nodes: {local: {gpus: [0]}}}
  - {name: rest, nodes: {local: {gpus: all}}}
profiles: [{name: one, gpus: 1, policies: [[rnd]]}]
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 8}]}]
"""
DOCUMENT = """
version: 1
name: cloud
provider: memory
max_machines: 5
machine_types:
  - {name: g2, pool: gpu, instance: big-2, gpus: 2, spin_up_timeout: SPIN, idle_timeout: 60, max_machines: 5}
  - {name: h2, pool: gpu, instance: new-2, gpus: 2, spin_up_timeout: SPIN, idle_timeout: 60, max_machines: 5}
"""


@dataclass
class Shown:
    """What a plan is shown of machines that boot."""

    document: policy.Document = field(default_factory=lambda: policy.read_policy(POOLS))
    observed: Any = field(default_factory=lambda: SimpleNamespace(nodes={}))
    booting: list[Node] = field(default_factory=list)

    def show_booting(self, nodes: list[Node]) -> None:
        self.booting = nodes

    def of(self, loop: MachineLoop) -> list[str]:
        """Return the machines that the next plan is shown, sorted."""
        world: Any = self
        loop.prepare(world)
        return sorted(node.name for node in self.booting)

    def may_plan(self, loop: MachineLoop) -> bool:
        world: Any = self
        return loop.may_plan(world)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    yield World(store)
    store.close()


def deploy(world: World, spin_up: str) -> None:
    world.store.deployments.save("cloud", DOCUMENT.replace("SPIN", spin_up), 0, "admin", world.now)


async def passes(world: World, seconds: float, *jobs: str, step: float = 30.0) -> list[list[str]]:
    """Move the clock in steps while these jobs wait; return which machines were shown at each of them."""
    shown = []
    for _ in range(int(seconds / step)):
        world.needs(*jobs)
        await world.turn(step)
        shown.append(Shown().of(world.loop))
    return shown


@pytest.mark.covers("N23")
async def test_machines_that_never_join_hold_nothing_once_each_type_has_failed(world: World) -> None:
    """While one type is backed off, the other one boots: there is always a machine on its way."""
    deploy(world, "300")
    await world.turn()
    first = await passes(world, 720, "job-1")
    assert any(first)
    later = await passes(world, 2400, "job-1")
    assert not any(later), "no boot of either type has ever ended well"
    assert len(world.store.machines.machines("cloud")) >= 6, "they were launched again and again"


@pytest.mark.covers("N23")
async def test_a_type_is_shown_again_once_one_of_its_machines_was_ready(world: World) -> None:
    deploy(world, "300")
    await world.turn()
    await passes(world, 720, "job-1")
    while not (booting := [row for row in world.rows if row.state == "booting" and row.type == "g2"]):
        await passes(world, 30, "job-1")
    assert Shown().of(world.loop) == []
    world.report(booting[0])
    await world.turn()
    world.needs("job-1", "job-2", "job-3", busy=(booting[0].id,))
    await world.turn()
    await world.turn()
    coming = sorted(row.id for row in world.rows if row.state == "booting" and row.type == "g2")
    assert coming
    assert Shown().of(world.loop) == sorted([booting[0].id, *coming]), "the first one is no node yet"


@pytest.mark.covers("N23")
async def test_machines_whose_boot_may_take_a_day_hold_nothing_for_longer_than_half_an_hour(world: World) -> None:
    """Nor do those that are launched meanwhile: a machine that is late counts as one that failed."""
    deploy(world, "86400")
    await world.turn()
    assert all((await passes(world, 1500, "job-1"))[1:])
    shown = await passes(world, 900, "job-1", "job-2", "job-3")
    assert len(shown[5]) == 3
    assert shown[-1] == []
    assert world.states() == ["booting"] * 3
    assert {len(one) for one in await passes(world, 900, "job-1", "job-2", "job-3", "job-4")} == {0}


@pytest.mark.covers("N23")
async def test_a_machine_that_has_joined_and_does_not_finish_its_init_script_is_shown_no_longer(world: World) -> None:
    deploy(world, "86400")
    await world.turn()
    await passes(world, 60, "job-1")
    [row] = world.rows
    world.report(row, init_exit_code=None)
    shown = await passes(world, 2400, "job-1")
    assert (world.states(), shown[0], shown[-1]) == (["joining"], [row.id], [])


@pytest.mark.covers("N23")
async def test_a_machine_is_shown_for_twice_as_long_as_boots_take(world: World) -> None:
    deploy(world, "3600")
    await world.turn()
    await passes(world, 300, "job-1")
    [first] = world.rows
    world.report(first)
    await world.turn()
    seconds = 0
    for _ in range(40):
        world.report(first)
        world.needs("job-2", busy=(first.id,))
        await world.turn(30)
        seconds += 30 * any(machine != first.id for machine in Shown().of(world.loop))
    assert 480 <= seconds <= 600, "the first boot took about 270 s"


async def test_a_machine_that_was_withdrawn_says_nothing_of_the_boots_of_its_type(world: World) -> None:
    deploy(world, "3600")
    await world.turn()
    await passes(world, 60, "job-1")
    [first] = world.rows
    await passes(world, 150)
    assert world.rows == []
    assert world.store.machines.machines("cloud")[0].reason == "not_needed"
    await passes(world, 60, "job-2")
    assert Shown().of(world.loop) == [row.id for row in world.rows] != [first.id]


@pytest.mark.covers("N23")
async def test_a_new_leader_plans_once_it_knows_which_machines_boot(world: World) -> None:
    deploy(world, "3600")
    await world.turn()
    await passes(world, 90, "job-1")
    shown = Shown()
    assert shown.may_plan(world.loop)
    booting = shown.of(world.loop)
    assert booting == [row.id for row in world.rows]
    world.lead()
    assert not shown.may_plan(world.loop), "the term is another one"
    world.loop = world.new_loop()
    assert not shown.may_plan(world.loop)
    cycles = world.cycles
    await world.turn()
    assert world.cycles > cycles, "the cycle that waits for this is woken"
    assert shown.may_plan(world.loop)
    assert shown.of(world.loop) == booting


@pytest.mark.covers("N23")
async def test_a_new_leader_knows_which_types_fail(world: World) -> None:
    deploy(world, "300")
    await world.turn()
    await passes(world, 720, "job-1")
    while "booting" not in world.states():
        await passes(world, 30, "job-1")
    world.lead()
    world.loop = world.new_loop()
    await world.turn()
    assert Shown().of(world.loop) == []
    assert "booting" in world.states()


async def test_what_hangs_holds_up_the_plans_of_a_new_leader_for_seconds_only(world: World) -> None:
    deploy(world, "300")
    shown = Shown()
    assert not shown.may_plan(world.loop)
    world.now += machine_loop.FIRST_STEPS_SECONDS - 1
    assert not shown.may_plan(world.loop)
    world.now += 2
    assert shown.may_plan(world.loop)


async def test_without_pools_that_grow_a_leader_plans_at_once(world: World) -> None:
    assert Shown(policy.read_policy(POOLS.replace(", kind: autoscaled", ""))).may_plan(world.loop)


@pytest.mark.covers("N23")
async def test_machines_that_boot_for_a_pool_that_grows_no_more_are_not_shown(world: World) -> None:
    """Work would be nominated there, and be no demand in the pools that can run it."""
    deploy(world, "3600")
    await world.turn()
    await passes(world, 90, "job-1")
    assert Shown().of(world.loop)
    for text in (POOLS.replace(", kind: autoscaled", ""), POOLS.replace("  - {name: gpu, kind: autoscaled}\n", "")):
        assert Shown(policy.read_policy(text)).of(world.loop) == []


async def test_a_node_that_boots_is_gone_once_its_host_is_in_several_pools() -> None:
    """Even where that is shown before the machine is known to be ready, as by a read of offers."""
    document, view = policy.read_policy(POOLS), EngineView(Durations())
    view.show({}, divide([], document), document, 1.0)
    view.show_booting([Node("n1", "gpu", 2, ready=False, ready_at=60.0)])
    host = NodeStatus("n1", "", (0, 1))
    view.stale_hosts.add("n1")
    view.show({}, divide([host], document), document, 2.0)
    view.show_booting(())
    assert sorted(node.name for node in view.nodes()) == ["n1/half", "n1/rest"]


@pytest.mark.covers("N23")
async def test_the_first_plan_waits_for_the_first_steps_and_a_follower_shows_no_machine_that_boots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, turn = asyncio.Event(), MachineLoop.turn

    async def held(self: MachineLoop) -> None:
        await free.wait()
        await turn(self)

    monkeypatch.setattr(MachineLoop, "turn", held)
    monkeypatch.setattr(machine_loop, "FIRST_STEPS_SECONDS", 600.0)
    text = POOLS.replace("  - {name: half, nodes: {local: {gpus: [0]}}}\n", "")
    backend = RoutingBackend(
        [MemoryBackend([NodeStatus("n1", "rest", (0, 1))], real_time=True), MachinesBackend(durable_checkpoints=True)]
    )
    settings = {
        "MAKEWAY_TICK_SECONDS": "0.2",
        "MAKEWAY_TICKET_SECRET": "s" * 32,
        "MAKEWAY_BACKEND": "local,machines",
        "MAKEWAY_MACHINE_CHECKPOINT_DIR": str(tmp_path / "shared"),
    }
    async with running(tmp_path / "state", text, backend=backend, **settings) as run:
        job = await run.submit("ana", "waits", IDLE, profile="one")
        loop = run.service.loop
        cycles = loop.cycles
        await run.until(lambda: loop.cycles > cycles + 2, "cycles go on", 20)
        assert (await run.client("ana").job(job.id)).state.value == "pending"
        free.set()
        await run.job(job.id, "running", seconds=20)
        await run.client("ana").cancel(job.id)
        await run.job(job.id, "cancelled", seconds=20)
        loop.stop()
        await asyncio.sleep(1)  # no cycle shows anything any more
        world, booting = run.service.components.world, Node("m-1", "gpu", 2, ready=False, ready_at=60.0)
        world.show_booting([booting])
        await loop.follow()
        assert world.booting == ()
        assert booting not in world._view.nodes()
