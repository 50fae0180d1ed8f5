"""The loop of deployments on the real store, with machines of Amazon EC2: moto behind a layer with a cloud's faults.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ec2_cloud import IMAGE, REGION, ZONES, Ec2Cloud, served, set_environment
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.provider import Provider
from makeway_quota.autoscale.providers.choice import provider_of
from makeway_quota.store import open_store
from service.test_machine_loop import World

ZONE_A, ZONE_B = ZONES
DOCUMENT = f"""
name: cloud
provider: aws
currency: USD
max_machines: 6
drain_timeout: 60
settings: {{region: {REGION}}}
machine_types:
  - &type
    name: g2
    pool: gpu
    instance: g5.12xlarge
    gpus: 2
    machine_image: {IMAGE}
    zones: [{ZONE_A}, {ZONE_B}]
    idle_timeout: 60
    max_machines: 3
    market: MARKET
    price: 3
    spot_price: 1
"""
SECOND = f"""
  - {{name: g3, pool: gpu, instance: p3.8xlarge, gpus: 2, machine_image: {IMAGE}, max_machines: 3}}
"""


@dataclass
class AwsWorld(World):
    """A service whose provider is Amazon EC2."""

    cloud: Ec2Cloud = field(default_factory=Ec2Cloud)

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
        for _ in range(5):
            self.needs(*jobs)
            await self.turn(0.5)
        return self.rows

    def of_cloud(self) -> list[tuple[str, str]]:
        """Return the machine and the instance type of each instance that runs."""
        return sorted((one.machine, one.request.partition("InstanceType=")[2].partition("&")[0])
                      for one in self.cloud.running().values())  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsWorld]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    cloud = Ec2Cloud()
    with served(cloud) as address:
        set_environment(monkeypatch, address)
        result = AwsWorld(store, cloud=cloud)
        cloud.clock = lambda: result.now
        yield result
    store.close()


def document(market: str = "on_demand", second: bool = False) -> str:
    result = DOCUMENT.replace("&type\n    name", "name").replace("MARKET", market)
    return (result if market != "on_demand" else result.replace("    spot_price: 1\n", "")) + (SECOND if second else "")


@pytest.mark.covers("F49", "F70")
async def test_machines_grow_for_what_waits_and_shrink_to_none(world: AwsWorld) -> None:
    world.save(document())
    machines = await world.grown("job-1", "job-2")
    assert [name for name, _ in world.of_cloud()] == sorted(row.id for row in machines)
    for seconds in (100, 1, 1, 1, 100, 400, 20):
        world.needs(accepting_machines=())
        await world.turn(seconds)
        for row in world.rows:
            world.report(row)
    assert (world.rows, world.of_cloud()) == ([], [])
    assert world.loop.quarantine.entries == []


async def test_a_lost_answer_and_a_type_that_changes_are_one_machine(world: AwsWorld) -> None:
    """boto3#4406: the row has the request, so that the repeated call has the same bytes."""
    world.save(document())
    world.cloud.lost_after, world.cloud.delay = 1, 200
    [row] = await world.launched("job-1")
    assert row.state == "requested"
    world.save(document().replace("g5.12xlarge", "g5.24xlarge"), 1)
    for _ in range(3):
        world.needs("job-1")
        await world.turn(16)
    assert world.of_cloud() == [(row.id, "g5.12xlarge")]
    assert world.states() == ["booting"]
    first, second = (one for one in world.cloud.called("RunInstances") if "DryRun" not in one)
    assert first == second


@pytest.mark.parametrize("fault", [{"empty": True}, {"partial": True}, {"stale": 250.0}])
async def test_a_list_that_is_empty_partial_or_old_ends_nothing_and_starts_nothing_twice(
    world: AwsWorld, fault: dict[str, float]
) -> None:
    """cluster-api-provider-aws#2915, aec#405."""
    world.save(document())
    ready = await world.grown("job-1", "job-2")
    before = world.of_cloud()
    for name, value in fault.items():
        setattr(world.cloud, name, value)
    for _ in range(40):
        world.needs(busy=tuple(row.id for row in ready))
        await world.turn(30)
        for row in world.rows:
            world.report(row, attempts=[{"job": "job-1", "attempt": 1, "worker": 0, "state": "running"}])
    assert world.states() == ["ready", "ready"]
    assert world.of_cloud() == before
    assert world.cloud.launches == 2


async def test_a_stock_out_goes_on_to_the_next_type_in_the_same_cycle_and_comes_back_later(world: AwsWorld) -> None:
    """gardener/autoscaler#340, cluster-toolkit#4940."""
    world.save(document(second=True))
    world.cloud.stock_out = {("g5.12xlarge", zone, "on_demand") for zone in ZONES}
    rows = await world.launched("job-1")
    assert [(row.type, row.state) for row in rows] == [("g3", "booting")]
    assert world.cloud.launches == 3
    world.cloud.stock_out = set()
    world.now += 301
    await world.launched("job-1", "job-2")
    assert sorted(kind for _, kind in world.of_cloud()) == ["g5.12xlarge", "p3.8xlarge"]


async def test_spot_falls_back_to_on_demand_and_is_tried_again(world: AwsWorld) -> None:
    """autoscaler#4438."""
    world.save(document("spot_first"))
    world.cloud.stock_out = {("g5.12xlarge", zone, "spot") for zone in ZONES}
    rows = await world.launched("job-1")
    assert [(row.market, row.price) for row in rows] == [("on_demand", 3_000_000)]
    world.cloud.stock_out = set()
    world.now += 301
    rows = await world.launched("job-1", "job-2")
    assert sorted(row.market for row in rows) == ["on_demand", "spot"]


async def test_an_instance_with_our_tag_and_no_row_is_ended_after_the_window_and_others_are_left(
    world: AwsWorld,
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
    assert [name for name, _ in world.of_cloud()] == ["m-none", "m-theirs"]
    for _ in range(5):
        world.needs()
        await world.turn(20)
    assert [name for name, _ in world.of_cloud()] == ["m-theirs"]


async def test_a_launch_that_ec2_refuses_for_ever_is_not_repeated_at_once_and_says_why(world: AwsWorld) -> None:
    world.save(document())
    world.cloud.errors["RunInstances"] = [(400, "InvalidSubnetID.NotFound")] * 50
    assert await world.launched("job-1") == []
    assert world.loop.status("cloud") is not None
    refused = [one for one in world.cloud.called("RunInstances") if "DryRun" not in one]
    assert len(refused) == 1


async def test_what_a_check_finds_is_shown_until_it_is_mended(world: AwsWorld) -> None:
    world.cloud.errors["RunInstances"] = [(403, "UnauthorizedOperation")] * 2
    world.save(document())
    for _ in range(2):
        await world.turn(1)
    status = world.loop.status("cloud")
    assert status is not None
    assert "g2: RunInstances: UnauthorizedOperation" in status.problem
    for _ in range(3):
        await world.turn(301)
    status = world.loop.status("cloud")
    assert status is not None
    assert status.problem == ""


async def test_throttled_lists_end_nothing_and_launch_nothing_twice(world: AwsWorld) -> None:
    """ray#1346: throttled by its own polling."""
    world.save(document())
    await world.launched("job-1")
    world.cloud.errors["DescribeInstances"] = [(503, "RequestLimitExceeded")] * 9
    for _ in range(3):
        world.needs("job-1")
        await world.turn(16)
    assert world.states() == ["booting"]
    assert world.cloud.launches == 1
    status = world.loop.status("cloud")
    assert status is not None
    assert "RequestLimitExceeded" in status.problem


async def test_a_spot_machine_that_was_stopped_is_ended_and_replaced(world: AwsWorld) -> None:
    """karpenter-provider-gcp#143."""
    world.save(document("spot_first"))
    [row] = await world.grown("job-1")
    world.cloud.interrupt(row.instance or "", stop=True)
    for _ in range(4):
        world.needs("job-1")
        await world.turn(16)
    assert row.id not in [name for name, _ in world.of_cloud()]
    assert len(world.of_cloud()) == 1


async def test_limits_hold_within_one_cycle_of_many_jobs(world: AwsWorld) -> None:
    """karpenter#2915: 608 became 627, as limits were not subtracted within one pass."""
    world.save(document(second=True))
    rows = await world.launched(*(f"job-{n}" for n in range(20)))
    assert sorted(row.type for row in rows) == ["g2"] * 3 + ["g3"] * 3
    assert len(world.of_cloud()) == 6


async def test_credentials_that_are_refused_in_the_middle_of_a_drain_forget_no_machine(world: AwsWorld) -> None:
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


async def test_a_cloud_that_does_not_answer_holds_up_no_step(world: AwsWorld) -> None:
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
