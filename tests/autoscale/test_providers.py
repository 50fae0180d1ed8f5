"""What every provider has to do: one suite for memory, the cloud in a folder, Amazon EC2 and Google Compute Engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ec2_cloud
import gce_cloud
import pytest
from ec2_cloud import AWS, AWS_TYPE, Ec2Cloud
from gce_cloud import GCP, GCP_TYPE, GceCloud
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.provider import (
    CallOutcomeUnknown,
    Denied,
    InvalidLaunch,
    JoinData,
    Provider,
    ProviderError,
    StockOut,
    Throttled,
)
from makeway_quota.autoscale.providers.aws import AwsProvider
from makeway_quota.autoscale.providers.gcp import GcpProvider
from makeway_quota.autoscale.providers.local import LocalFaults, LocalProvider
from makeway_quota.autoscale.providers.memory import MemoryProvider

JOIN = JoinData("http://192.0.2.1:8000/services/makeway", "m-1.secret-of-the-join")


@dataclass
class Cloud:
    """A provider, and how a test makes its cloud do something wrong; what is not told is as it should be."""

    provider: Provider
    tell: Callable[..., None]
    """`out_of_stock`, `denied`, `partial`: whether; `busy`, `lost_before`, `lost_after`: calls; `hidden`: seconds"""
    deployment: Deployment = AWS
    bigger: str = "g5.24xlarge"
    """another type of machines"""

    def launch(self, machine: str = "m-1", join: JoinData | None = None, **fields: Any) -> Any:
        machine_type = replace(self.deployment.types[0], **fields)
        request = self.deployment.request(machine_type, machine_type.zones[0], "on_demand", machine_type.price, machine)
        return self.provider.launch(request, machine, join)

    def listed(self, deployment: str = "cloud") -> dict[str, str]:
        return {one.machine: one.state for one in self.provider.list(deployment, time.time()).instances}

    def alive(self) -> list[str]:
        return sorted(name for name, state in self.listed().items() if state not in ("terminated", "stopping"))


def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    provider = MemoryProvider(time.time)

    def tell(out_of_stock: bool = False, hidden: float = 0.0, **faults: Any) -> None:
        for name in ("busy", "denied", "partial", "lost_before", "lost_after"):
            setattr(provider, name, faults.get(name, 0))
        provider.delay = hidden
        provider.stock_out = {(AWS_TYPE.instance_type, AWS_TYPE.zones[0], "on_demand")} if out_of_stock else set()

    yield Cloud(provider, tell)


def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    provider = LocalProvider(tmp_path / "cloud")

    def tell(out_of_stock: bool = False, busy: int = 0, **faults: Any) -> None:
        stock = {AWS_TYPE.instance_type: 0} if out_of_stock else {}
        provider.set_faults(LocalFaults(boot_seconds=0.0, stock=stock, throttled=busy, **faults))

    tell()
    yield Cloud(provider, tell)
    tell()
    for folder in (provider.folder / "instances").iterdir():
        with suppress(ProviderError):
            provider.terminate(folder.name)


def of_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    cloud = Ec2Cloud()

    def tell(out_of_stock: bool = False, hidden: float = 0.0, busy: int = 0, **faults: Any) -> None:
        for name in ("denied", "partial", "lost_before", "lost_after"):
            setattr(cloud, name, faults.get(name, 0))
        cloud.delay, cloud.busy = hidden, busy
        cloud.stock_out = {(AWS_TYPE.instance_type, AWS_TYPE.zones[0], "on_demand")} if out_of_stock else set()

    with ec2_cloud.served(cloud) as address:
        ec2_cloud.set_environment(monkeypatch, address)
        yield Cloud(AwsProvider(AWS, "here"), tell)


def of_gcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    cloud = GceCloud()

    def tell(out_of_stock: bool = False, hidden: float = 0.0, busy: int = 0, **faults: Any) -> None:
        for name in ("denied", "partial", "lost_before", "lost_after"):
            setattr(cloud, name, faults.get(name, 0))
        cloud.delay, cloud.busy = hidden, busy
        cloud.stock_out = {(GCP_TYPE.instance_type, GCP_TYPE.zones[0], "on_demand")} if out_of_stock else set()

    with gce_cloud.served(cloud) as address:
        gce_cloud.set_environment(monkeypatch, address, tmp_path)
        yield Cloud(GcpProvider(GCP, "here"), tell, GCP, "g2-standard-48")


@pytest.fixture(params=[in_memory, in_a_folder, of_aws, of_gcp], ids=["memory", "local", "aws", "gcp"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    yield from request.param(tmp_path, monkeypatch)


def test_an_instance_has_its_tags_from_its_launch_and_is_listed_by_them(cloud: Cloud) -> None:
    made = cloud.launch()
    assert (made.machine, made.deployment) == ("m-1", "cloud")
    assert made.launched_at is not None
    assert abs(made.launched_at - time.time()) < 60
    result = cloud.provider.list("cloud", 5.0)
    assert (result.at, result.complete, [one.id for one in result.instances]) == (5.0, True, [made.id])
    assert cloud.listed("other") == {}


def test_one_token_is_one_instance(cloud: Cloud) -> None:
    made = cloud.launch(join=JOIN)
    assert cloud.launch(join=JOIN).id == made.id
    assert cloud.launch("m-2").id != made.id
    assert cloud.alive() == ["m-1", "m-2"]


@pytest.mark.parametrize("changed", ["instance_type", "join"])
def test_a_token_with_other_bytes_launches_nothing_more(cloud: Cloud, changed: str) -> None:
    """boto3#4406: what EC2 answers is no refusal, as an instance exists."""
    made = cloud.launch()
    change: dict[str, Any] = {"join": JOIN} if changed == "join" else {"instance_type": cloud.bigger}
    with suppress(CallOutcomeUnknown):
        assert cloud.launch(**change).id == made.id
    assert cloud.alive() == ["m-1"]


def test_the_token_of_an_instance_that_has_ended_launches_none(cloud: Cloud) -> None:
    """boto3#4406."""
    made = cloud.launch()
    assert cloud.provider.terminate(made.id)
    repeated = cloud.launch()
    assert (repeated.id, repeated.state) == (made.id, "terminated")
    assert cloud.alive() == []


def test_a_launch_without_an_answer_was_done_or_not_and_can_be_repeated(cloud: Cloud) -> None:
    cloud.tell(lost_before=1)
    with pytest.raises(CallOutcomeUnknown):
        cloud.launch()
    assert cloud.alive() == []
    cloud.tell(lost_after=1)
    with pytest.raises(CallOutcomeUnknown):
        cloud.launch()
    assert cloud.alive() == ["m-1"]
    made = cloud.launch()
    assert [one.id for one in cloud.provider.list("cloud", 0.0).instances] == [made.id]


@pytest.mark.parametrize(
    ("fault", "error"),
    [({"out_of_stock": True}, StockOut), ({"busy": 1}, Throttled), ({"denied": True}, Denied)],
)
def test_a_refusal_is_certain_and_leaves_nothing(cloud: Cloud, fault: dict[str, Any], error: Any) -> None:
    cloud.tell(**fault)
    with pytest.raises(error) as refused:
        cloud.launch()
    assert refused.value.certain
    assert str(refused.value)
    cloud.tell()
    assert cloud.alive() == []
    cloud.launch("m-2" if error is StockOut else "m-1")  # one that was refused is a new machine the next time
    assert len(cloud.alive()) == 1


def test_a_request_that_lacks_what_a_machine_needs_is_refused_for_certain(cloud: Cloud) -> None:
    with pytest.raises(InvalidLaunch):
        cloud.provider.launch('{"deployment":"cloud","machine":"m-1","zone":"","market":"on_demand"}', "m-1")
    assert cloud.alive() == []


def test_ending_is_for_good_and_may_be_repeated(cloud: Cloud) -> None:
    """dstack#1551: "terminated" without terminating."""
    made, other = cloud.launch(), cloud.launch("m-2")
    assert cloud.provider.terminate(made.id)
    assert cloud.listed().get("m-1", "terminated") == "terminated", "what is deleted may not be listed any more"
    assert not cloud.provider.terminate(made.id)
    assert cloud.alive() == ["m-2"]
    assert cloud.provider.terminate(other.id)
    assert cloud.alive() == []


@pytest.mark.parametrize("unknown", ["i-0123456789abcdef0", "i-000000000000", "../../etc", "m-1"])
def test_an_instance_that_is_not_there_cannot_be_ended_and_has_no_console(cloud: Cloud, unknown: str) -> None:
    cloud.launch()
    assert not cloud.provider.terminate(unknown)
    assert cloud.provider.console(unknown) == ""
    assert cloud.alive() == ["m-1"]


def test_a_list_without_all_instances_says_so(cloud: Cloud) -> None:
    """aec#405: a partial page taken for all."""
    for number in range(4):
        cloud.launch(f"m-{number}")
    cloud.tell(partial=True)
    result = cloud.provider.list("cloud", 0.0)
    assert not result.complete
    assert len(result.instances) == 2
    cloud.tell()
    assert cloud.provider.list("cloud", 0.0).complete
    assert len(cloud.alive()) == 4


def test_an_instance_may_be_listed_later_than_it_is_launched(cloud: Cloud) -> None:
    cloud.tell(hidden=600)
    made = cloud.launch()
    assert cloud.listed() == {}
    assert cloud.launch().id == made.id


@pytest.mark.parametrize("call", ["list", "terminate", "launch", "check"])
def test_wrong_credentials_are_told_by_every_call(cloud: Cloud, call: str) -> None:
    made = cloud.launch()
    cloud.tell(denied=True)
    provider = cloud.provider
    calls: dict[str, Callable[[], Any]] = {
        "list": lambda: provider.list("cloud", 0.0),
        "terminate": lambda: provider.terminate(made.id),
        "launch": lambda: cloud.launch("m-2"),
        "check": provider.check,
    }
    with pytest.raises(Denied):
        calls[call]()
    cloud.tell()
    provider.check()
    assert cloud.alive() == ["m-1"]
