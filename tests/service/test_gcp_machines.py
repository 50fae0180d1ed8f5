"""The loop of deployments on the real store, with machines of Compute Engine: a server of its interface, with faults.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gce_cloud import IMAGE, PROJECT, ZONES, GceCloud, served, set_environment
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.provider import Provider
from makeway_quota.autoscale.providers import gcp
from makeway_quota.autoscale.providers.choice import provider_of
from makeway_quota.store import open_store
from service.test_machine_loop import World

ZONE_A, ZONE_B = ZONES
FIRST, SECOND = "g2-standard-24", "n1-standard-8"
DOCUMENT = f"""
name: cloud
provider: gcp
max_machines: 6
drain_timeout: 60
settings: {{project: {PROJECT}}}
machine_types:
  - name: l4
    pool: gpu
    instance: {FIRST}
    gpus: 2
    machine_image: {IMAGE}
    zones: [{ZONE_A}, {ZONE_B}]
    idle_timeout: 60
    max_machines: 3
    market: MARKET
    price: 3
    spot_price: 1
"""
MORE = f"""
  - {{name: t4, pool: gpu, instance: {SECOND}, accelerator: nvidia-tesla-t4, gpus: 2, machine_image: {IMAGE},
     zones: [{ZONE_A}], max_machines: 3}}
"""


@dataclass
class GcpWorld(World):
    """A service whose provider is Compute Engine."""

    cloud: GceCloud = field(default_factory=GceCloud)

    def provider(self, deployment: Deployment) -> Provider:
        return provider_of(deployment, Path("/nonexistent"), lambda: "here")

    def save(self, document: str, version: int = 0) -> None:
        self.store.deployments.save("cloud", document, version, "admin", self.now)

    async def calls(self) -> None:
        """Wait until the calls under way are answered."""
        for driver in self.loop._drivers.values():
            while driver._tasks:
                await asyncio.gather(*driver._tasks, return_exceptions=True)

    async def launched(self, *jobs: str) -> list[Machine]:
        """Return the rows after the cycles that launch for jobs that wait, refusals and all."""
        await self.turn()
        for _ in range(6):
            self.needs(*jobs)
            await self.turn(0.5)
            await self.calls()
        return self.rows

    def of_cloud(self) -> list[tuple[str, str, str]]:
        """Return the machine, the zone and the machine type of each instance that runs."""
        return sorted(
            (one.machine, one.id.partition("/")[0], self.cloud._resources[one.id]["machineType"].rpartition("/")[2])
            for one in self.cloud.running().values()
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcpWorld]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    cloud = GceCloud()
    with served(cloud) as address:
        set_environment(monkeypatch, address, tmp_path)
        result = GcpWorld(store, cloud=cloud)
        cloud.clock = lambda: result.now
        yield result
    store.close()


def document(market: str = "on_demand", second: bool = False) -> str:
    result = DOCUMENT.replace("MARKET", market)
    return (result if market != "on_demand" else result.replace("    spot_price: 1\n", "")) + (MORE if second else "")


@pytest.mark.covers("F49", "F70")
async def test_machines_grow_for_what_waits_and_shrink_to_none(world: GcpWorld) -> None:
    world.save(document())
    machines = await world.grown("job-1", "job-2")
    assert [name for name, *_ in world.of_cloud()] == sorted(row.id for row in machines)
    for seconds in (100, 1, 1, 1, 100, 400, 20):
        world.needs(accepting_machines=())
        await world.turn(seconds)
        for row in world.rows:
            world.report(row)
    assert (world.rows, world.of_cloud()) == ([], [])
    assert world.loop.quarantine.entries == []


async def test_a_lost_answer_and_a_type_that_changes_are_one_machine(world: GcpWorld) -> None:
    """boto3#4406: the row has the request, so that the repeated call has the same bytes."""
    world.save(document())
    world.cloud.lost_after, world.cloud.delay = 1, 200
    [row] = await world.launched("job-1")
    assert row.state == "requested"
    world.save(document().replace(FIRST, "g2-standard-48").replace("gpus: 2", "gpus: 4"), 1)
    for _ in range(3):
        world.needs("job-1")
        await world.turn(16)
        await world.calls()
    assert world.of_cloud() == [(row.id, ZONE_A, FIRST)]
    assert world.states() == ["booting"]
    first, second = world.cloud.called("instances.insert")
    assert (first.query, first.body) == (second.query, second.body)


@pytest.mark.parametrize("fault", [{"empty": True}, {"partial": True}, {"stale": 250.0}, {"unreachable": {ZONE_A}}])
async def test_a_list_that_is_empty_partial_or_old_ends_nothing_and_starts_nothing_twice(
    world: GcpWorld, fault: dict[str, object]
) -> None:
    """cluster-api-provider-aws#2915, aec#405."""
    world.save(document())
    ready = await world.grown("job-1", "job-2")
    before = world.of_cloud()
    for name, value in fault.items():
        setattr(world.cloud, name, value)
    for _ in range(30):
        world.needs(busy=tuple(row.id for row in ready))
        await world.turn(30)
        for row in world.rows:
            world.report(row, attempts=[{"job": "job-1", "attempt": 1, "worker": 0, "state": "running"}])
    assert world.states() == ["ready", "ready"]
    assert world.of_cloud() == before
    assert world.cloud.launches == 2


async def test_a_stock_out_goes_on_to_the_next_zone_and_type_at_once_and_comes_back_later(world: GcpWorld) -> None:
    """gardener/autoscaler#340, cluster-toolkit#4940; the stock-out only shows in the operation."""
    world.save(document(second=True))
    world.cloud.stock_out = {(FIRST, ZONE_A, "on_demand")}
    [row] = await world.launched("job-1")
    assert (row.type, row.zone, row.state) == ("l4", ZONE_B, "booting")
    world.cloud.stock_out = {(FIRST, zone, "on_demand") for zone in ZONES}
    rows = await world.launched("job-1", "job-2")
    assert sorted(one.type for one in rows) == ["l4", "t4"]
    assert world.cloud.launches == 4
    world.cloud.stock_out = set()
    world.now += 301
    await world.launched("job-1", "job-2", "job-3")
    assert sorted(kind for *_, kind in world.of_cloud()) == [FIRST, FIRST, SECOND]


async def test_a_launch_that_fails_after_it_was_listed_is_ended_at_once_and_replaced(
    world: GcpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation goes on for longer than a list: the machine boots for Makeway, and comes to nothing."""
    monkeypatch.setattr(gcp, "POLL_SECONDS", 0.05)
    world.save(document())
    await world.turn()
    world.cloud.slow = 1_000_000
    world.cloud.stock_out = {(FIRST, ZONE_A, "on_demand")}
    world.needs("job-1")
    world.now += 0.5
    await world.loop.turn()
    for _ in range(100):
        await asyncio.sleep(0.02)
        if world.cloud.called("instances.insert"):
            break
    for _ in range(100):  # the list is read while the launch waits
        world.now += 16
        await world.loop.turn()
        await asyncio.sleep(0.05)
        if world.states() == ["booting"]:
            break
    assert world.states() == ["booting"]
    world.cloud.slow = 1
    for operation in world.cloud._operations.values():
        operation.polls = 1
    await world.calls()
    [ended] = world.rows
    assert (ended.state, ended.reason) == ("terminating", "stock_out")
    for _ in range(4):
        world.needs("job-1")
        await world.turn(1)
        await world.calls()
    assert [(zone, kind) for _, zone, kind in world.of_cloud()] == [(ZONE_B, FIRST)]


async def test_spot_falls_back_to_on_demand_and_is_tried_again(world: GcpWorld) -> None:
    """autoscaler#4438."""
    world.save(document("spot_first"))
    world.cloud.stock_out = {(FIRST, zone, "spot") for zone in ZONES}
    rows = await world.launched("job-1")
    assert [(row.market, row.price) for row in rows] == [("on_demand", 3_000_000)]
    world.cloud.stock_out = set()
    world.now += 301
    rows = await world.launched("job-1", "job-2")
    assert sorted(row.market for row in rows) == ["on_demand", "spot"]


async def test_an_instance_with_our_labels_and_no_row_is_ended_after_the_window_and_others_are_left(
    world: GcpWorld,
) -> None:
    """terraform-aws-gitlab-runner#450."""
    world.save(document())
    await world.turn()
    deployment = world.loop._drivers["cloud"].deployment
    for installation, machine in (("here", "m-none"), ("there", "m-theirs")):
        request = deployment.request(deployment.types[0], ZONE_A, "on_demand", 1, machine)
        provider_of(deployment, Path("/nonexistent"), lambda name=installation: name).launch(request, machine)
    for _ in range(20):
        world.needs()
        await world.turn(20)
    assert [name for name, *_ in world.of_cloud()] == ["m-none", "m-theirs"]
    for _ in range(5):
        world.needs()
        await world.turn(20)
    assert [name for name, *_ in world.of_cloud()] == ["m-theirs"]


async def test_what_a_check_finds_is_shown_until_it_is_mended(world: GcpWorld) -> None:
    world.cloud.missing = {"debian-12"}
    world.save(document())
    for _ in range(2):
        await world.turn(1)
        await world.calls()
    status = world.loop.status("cloud")
    assert status is not None
    assert "l4: images.get: notFound" in status.problem
    world.cloud.missing = set()
    for _ in range(3):
        await world.turn(301)
        await world.calls()
    status = world.loop.status("cloud")
    assert status is not None
    assert status.problem == ""


async def test_a_spot_machine_that_was_stopped_is_deleted_and_replaced(world: GcpWorld) -> None:
    """karpenter-provider-gcp#143."""
    world.save(document("spot_first"))
    [row] = await world.grown("job-1")
    world.cloud.interrupt(row.instance or "", stop=True)
    for _ in range(4):
        world.needs("job-1")
        await world.turn(16)
        await world.calls()
    assert row.id not in [name for name, *_ in world.of_cloud()]
    assert len(world.of_cloud()) == 1


async def test_credentials_that_are_refused_in_the_middle_of_a_drain_forget_no_machine(world: GcpWorld) -> None:
    """nomad-autoscaler#375."""
    world.save(document())
    await world.grown("job-1")
    world.cloud.denied = True
    for seconds in (100, 1, 1, 400, 30, 30):
        world.needs(accepting_machines=())
        await world.turn(seconds)
        for row in world.rows:
            world.report(row)
    assert world.states() == ["terminating"]
    world.cloud.denied = False
    for seconds in (400, 30, 30, 30):
        world.needs(accepting_machines=())
        await world.turn(seconds)
    assert (world.rows, world.of_cloud()) == ([], [])


async def test_a_cloud_that_does_not_answer_holds_up_no_step(world: GcpWorld) -> None:
    world.save(document())
    await world.turn()
    world.cloud.hang = 2.0
    world.needs("job-1")
    for _ in range(3):
        began = time.monotonic()
        world.now += 20
        await world.loop.turn()
        assert time.monotonic() - began < 1.5
    world.cloud.hang = 0.0
    await world.calls()
