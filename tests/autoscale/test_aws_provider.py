"""Amazon EC2: what is asked for, what each of its answers means, and what becomes of answers that never come.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ec2_cloud import AWS, AWS_TYPE, IMAGE, ZONES, Ec2Cloud, served, set_environment
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.instances import Instance
from makeway_quota.autoscale.provider import (
    CallOutcomeUnknown,
    Denied,
    InvalidLaunch,
    JoinData,
    ProviderError,
    QuotaReached,
    StockOut,
    Throttled,
)
from makeway_quota.autoscale.providers import aws, aws_errors, aws_launch
from makeway_quota.autoscale.providers.aws import AwsProvider
from makeway_quota.autoscale.providers.boot_script import boot_script

JOIN = JoinData("https://gpus.example/services/makeway", "m-1.secret-of-the-join")


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2Cloud]:
    result = Ec2Cloud()
    with served(result) as address:
        set_environment(monkeypatch, address)
        yield result


@pytest.fixture
def provider(cloud: Ec2Cloud) -> AwsProvider:
    return AwsProvider(AWS, "here")


def request(machine: str = "m-1", zone: str = ZONES[0], market: Any = "on_demand", **fields: Any) -> str:
    machine_type = replace(AWS_TYPE, **fields)
    return AWS.request(machine_type, zone, market, machine_type.price_in(market), machine)


def launched(cloud: Ec2Cloud, **fields: Any) -> dict[str, str]:
    """Return the parameters of a launch, as EC2 gets them."""
    AwsProvider(AWS, "here").launch(request(**fields), "m-1", JOIN)
    return cloud.called("RunInstances")[-1]


def test_an_instance_ends_with_its_shutdown_and_its_metadata_need_a_token_and_one_hop(cloud: Ec2Cloud) -> None:
    sent = launched(cloud)
    assert sent["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert sent["MetadataOptions.HttpTokens"] == "required"
    assert sent["MetadataOptions.HttpPutResponseHopLimit"] == "1"
    assert (sent["MinCount"], sent["MaxCount"], sent["ClientToken"]) == ("1", "1", "m-1")
    assert (sent["ImageId"], sent["InstanceType"]) == (IMAGE, "g5.12xlarge")
    assert sent["Placement.AvailabilityZone"] == ZONES[0]
    assert not [name for name in sent if "Market" in name or "IamInstance" in name or "KeyName" in name]


def test_instance_and_disk_have_their_tags_from_the_call_that_launches_them(cloud: Ec2Cloud) -> None:
    """terraform-aws-gitlab-runner#450: untagged spot machines for ever."""
    sent = launched(cloud, market="spot", spot_price=1_100_000)
    for number, kind in ((1, "instance"), (2, "volume")):
        prefix = f"TagSpecification.{number}."
        assert sent[f"{prefix}ResourceType"] == kind
        tags = {sent[f"{prefix}Tag.{n}.Key"]: sent[f"{prefix}Tag.{n}.Value"] for n in range(1, 5)}
        assert tags == {
            "makeway:installation": "here",
            "makeway:deployment": "cloud",
            "makeway:machine": "m-1",
            "Name": "makeway cloud m-1",
        }


def test_a_spot_machine_is_asked_for_once_at_its_highest_price_and_is_ended_when_it_is_taken_back(
    cloud: Ec2Cloud,
) -> None:
    sent = launched(cloud, market="spot", spot_price=1_100_000)
    assert sent["InstanceMarketOptions.MarketType"] == "spot"
    assert sent["InstanceMarketOptions.SpotOptions.MaxPrice"] == "1.1"
    assert sent["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    assert sent["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == "terminate"
    assert "InstanceMarketOptions.SpotOptions.MaxPrice" not in launched(cloud, machine="m-2", market="spot")


@pytest.mark.parametrize(("price", "text"), [(1, "0.000001"), (10_000_000, "10"), (100_000_000_000_000, "100000000")])
def test_a_highest_price_is_written_in_full(price: int, text: str) -> None:
    assert aws_launch._spot(price)["MaxPrice"] == text


def test_disk_network_role_and_key_are_asked_for_where_the_document_has_them(cloud: Ec2Cloud) -> None:
    settings = {**AWS.settings, "instance_profile": "gpu-machine", "key_pair": "ops"}
    machine_type = replace(
        AWS_TYPE, disk=200 * 1024 + 1, subnets={ZONES[0]: "subnet-0abc"}, security_groups=("sg-0abc", "sg-0def")
    )
    wanted = aws_launch.parse_request(
        replace(AWS, settings=settings).request(machine_type, ZONES[0], "on_demand", 1, "m-1")
    )
    sent = aws_launch.launch_parameters(wanted, "m-1", None, "here", "/dev/sda1")
    assert sent["BlockDeviceMappings"] == [
        {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 201, "VolumeType": "gp3", "DeleteOnTermination": True}}
    ]
    assert (sent["SubnetId"], sent["SecurityGroupIds"]) == ("subnet-0abc", ["sg-0abc", "sg-0def"])
    assert (sent["IamInstanceProfile"], sent["KeyName"]) == ({"Name": "gpu-machine"}, "ops")
    assert "UserData" not in sent


def test_a_disk_of_another_size_is_that_of_the_machine_image(cloud: Ec2Cloud) -> None:
    sent = launched(cloud, disk=102_400)
    assert (sent["BlockDeviceMapping.1.DeviceName"], sent["BlockDeviceMapping.1.Ebs.VolumeSize"]) == (
        "/dev/sda1",
        "100",
    )
    assert len(cloud.called("DescribeImages")) == 1


def test_user_data_are_the_boot_script_with_the_token_of_the_machine_and_no_other_secret(cloud: Ec2Cloud) -> None:
    script = base64.b64decode(launched(cloud, init_script="echo password")["UserData"]).decode()
    assert script == boot_script(JOIN, "m-1", "cloud", 900.0, "aws")
    assert JOIN.token in script
    assert "password" not in script
    assert "very-secret" not in script


@pytest.mark.parametrize(
    ("status", "code", "meaning"),
    [
        (500, "InsufficientInstanceCapacity", StockOut),
        (400, "SpotMaxPriceTooLow", StockOut),
        (400, "Unsupported", StockOut),
        (400, "VcpuLimitExceeded", QuotaReached),
        (400, "MaxSpotInstanceCountExceeded", QuotaReached),
        (400, "InsufficientFreeAddressesInSubnet", QuotaReached),
        (403, "AuthFailure.ServiceLinkedRoleCreationNotPermitted", QuotaReached),
        (503, "RequestLimitExceeded", Throttled),
        (403, "UnauthorizedOperation", Denied),
        (401, "AuthFailure", Denied),
        (400, "RequestExpired", Denied),
        (400, "RequestTimeTooSkewed", Denied),  # the service's clock is wrong
        (403, "SomethingNew", Denied),
        (400, "InsufficientCapacityOnHost", StockOut),
        (400, "PrivateIpAddressLimitExceeded", QuotaReached),
        (400, "InvalidAMIID.NotFound", InvalidLaunch),
        (400, "InvalidParameterValue", InvalidLaunch),
        (400, "SomethingNew", InvalidLaunch),
        (500, "InternalError", CallOutcomeUnknown),
        (503, "Unavailable", CallOutcomeUnknown),
        (503, "SomethingNew", CallOutcomeUnknown),
    ],
)
def test_every_refusal_of_a_launch_has_one_meaning_and_is_called_once(
    cloud: Ec2Cloud, provider: AwsProvider, status: int, code: str, meaning: type[ProviderError]
) -> None:
    """A stock-out is HTTP 500, which the SDK would repeat: a launch is called once, whatever is answered."""
    cloud.errors["RunInstances"] = [(status, code)]
    with pytest.raises(meaning, match=code) as refused:
        provider.launch(request(), "m-1")
    assert type(refused.value) is meaning
    assert len(cloud.called("RunInstances")) == 1
    assert not cloud.instances


def test_a_list_is_asked_for_again_a_few_times(cloud: Ec2Cloud, provider: AwsProvider) -> None:
    cloud.errors["DescribeInstances"] = [(503, "Unavailable"), (500, "InternalError")]
    assert provider.list("cloud", 0.0).complete
    cloud.errors["DescribeInstances"] = [(503, "RequestLimitExceeded")] * 3
    with pytest.raises(Throttled):
        provider.list("cloud", 0.0)
    assert len(cloud.called("DescribeInstances")) == 6


def test_all_pages_are_read(cloud: Ec2Cloud, provider: AwsProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "PAGE_SIZE", 5)
    for number in range(12):
        provider.launch(request(f"m-{number}"), f"m-{number}")
    result = provider.list("cloud", 0.0)
    assert (len(result.instances), result.complete) == (12, True)
    assert len(cloud.called("DescribeInstances")) == 3
    monkeypatch.setattr(aws, "LIST_SECONDS", -1.0)
    result = provider.list("cloud", 0.0)
    assert (len(result.instances), result.complete) == (5, False)


def test_installations_of_one_account_see_and_end_nothing_of_each_other(cloud: Ec2Cloud) -> None:
    here, there = AwsProvider(AWS, "here"), AwsProvider(AWS, "there")
    here.launch(request(), "m-1")
    assert there.list("cloud", 0.0).instances == ()
    assert len(here.list("cloud", 0.0).instances) == 1


def test_a_boot_script_of_another_release_finds_the_instance_of_the_first_call(
    cloud: Ec2Cloud, provider: AwsProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3#4406: the same token with other bytes, as after an upgrade between two calls."""
    cloud.lost_after = 1
    with pytest.raises(CallOutcomeUnknown):
        provider.launch(request(), "m-1", JOIN)
    [instance] = cloud.instances
    monkeypatch.setattr(aws_launch, "boot_script", lambda *options: "#!/bin/sh\n# of a later release\n")
    assert provider.launch(request(), "m-1", JOIN).id == instance
    assert len(cloud.instances) == 1
    cloud.delay = cloud.instances[instance].visible_at = time.time() + 600
    with pytest.raises(CallOutcomeUnknown):
        provider.launch(request(), "m-1", JOIN)
    assert len(cloud.instances) == 1


def test_the_token_of_an_instance_that_is_not_even_listed_any_more_is_used_for_no_other(
    cloud: Ec2Cloud, provider: AwsProvider
) -> None:
    made = provider.launch(request(), "m-1")
    cloud.interrupt(made.id)
    assert provider.launch(request(), "m-1").state == "terminated"
    cloud.forgets = 0.0
    assert provider.launch(request(), "m-1") == Instance("", "m-1", "cloud", "terminated")


@pytest.mark.parametrize(
    ("fault", "state"),
    [({"boot": 600.0}, "pending"), ({}, "running"), ({"end_delay": 600.0}, "stopping"), ({"stop": True}, "stopped")],
)
def test_the_state_of_an_instance_is_what_ec2_says(
    cloud: Ec2Cloud, provider: AwsProvider, fault: dict[str, Any], state: str
) -> None:
    """karpenter-provider-gcp#143: a stopped spot machine is not a deleted one."""
    made = provider.launch(request(), "m-1")
    if "stop" in fault:
        cloud.interrupt(made.id, stop=True)
    else:
        for name, value in fault.items():
            setattr(cloud, name, value)
    if state == "stopping":
        assert provider.terminate(made.id)
    [result] = provider.list("cloud", 0.0).instances
    assert result.state == state


def test_a_console_is_the_newest_output_or_what_an_older_machine_shows(cloud: Ec2Cloud, provider: AwsProvider) -> None:
    made = provider.launch(request(), "m-1")
    assert provider.console(made.id) == ""
    cloud.consoles[made.id] = base64.b64encode("ready ✓\n".encode()).decode()
    assert provider.console(made.id) == "ready ✓\n"
    cloud.errors["GetConsoleOutput"] = [(400, "UnsupportedOperation")]
    assert provider.console(made.id) == "ready ✓\n"
    assert [one.get("Latest") for one in cloud.called("GetConsoleOutput")][-2:] == ["true", None]


@pytest.mark.parametrize("call", ["list", "launch", "terminate", "console"])
def test_a_call_without_an_answer_ends_in_time_and_says_that_nothing_is_known(
    cloud: Ec2Cloud, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(aws, "LAUNCH_SECONDS", 0.3)
    monkeypatch.setattr(aws, "READ_SECONDS", 0.3)
    monkeypatch.setattr(aws, "READ_TRIES", 1)
    provider = AwsProvider(AWS, "here")
    cloud.hang = 8.0
    began = time.monotonic()
    calls = {
        "list": lambda: provider.list("cloud", 0.0),
        "launch": lambda: provider.launch(request(), "m-1"),
        "terminate": lambda: provider.terminate("i-0123456789abcdef0"),
        "console": lambda: provider.console("i-0123456789abcdef0"),
    }
    with pytest.raises(CallOutcomeUnknown, match="no answer") as lost:
        calls[call]()
    assert not lost.value.certain
    assert time.monotonic() - began < 7.0


def test_a_launch_and_its_time_outs_end_before_its_row_is_given_up() -> None:
    assert AWS.request_timeout > aws.CONNECT_SECONDS + aws.LAUNCH_SECONDS


def test_an_address_that_nothing_answers_at_is_a_lost_answer(cloud: Ec2Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", "http://127.0.0.1:9")
    with pytest.raises(CallOutcomeUnknown):
        AwsProvider(AWS, "here").launch(request(), "m-1")


def test_without_credentials_every_call_is_denied(cloud: Ec2Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Denied, match="credentials"):
        AwsProvider(AWS, "here").list("cloud", 0.0)
    given = {"access_key_id": "of-the-deployment", "secret_access_key": "hunter2"}
    provider = AwsProvider(AWS, "here", given)
    assert provider.list("cloud", 0.0).complete
    assert "hunter2" not in repr(provider)


def test_a_profile_that_is_not_there_is_denied(cloud: Ec2Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(Denied):
        AwsProvider(AWS, "here").list("cloud", 0.0)


def test_a_check_launches_and_ends_nothing_and_tells_what_ec2_would_refuse(cloud: Ec2Cloud) -> None:
    second = replace(AWS_TYPE, name="g3", zones=("eu-central-1a",), market="spot", spot_price=1)
    deployment: Deployment = replace(AWS, types=(AWS_TYPE, second))
    provider = AwsProvider(deployment, "here")
    provider.check()
    provider.launch(request(), "m-1")
    provider.check()
    assert [one.state(time.time()) for one in cloud.instances.values()] == ["running"]
    assert {one["DryRun"] for one in cloud.called("RunInstances")[:3]} == {"true"}
    assert cloud.called("TerminateInstances")[0]["DryRun"] == "true"
    cloud.errors = {"RunInstances": [(403, "UnauthorizedOperation")] * 2 + [(400, "InvalidAMIID.NotFound")]}
    with pytest.raises(Denied, match=r"g2: RunInstances: UnauthorizedOperation.*g3: RunInstances: InvalidAMIID"):
        provider.check()
    cloud.errors = {"TerminateInstances": [(403, "UnauthorizedOperation")]}
    with pytest.raises(Denied, match="TerminateInstances"):
        provider.check()


def test_a_message_leaves_out_what_only_aws_can_read() -> None:
    error = {
        "Error": {"Code": "UnauthorizedOperation", "Message": f"No. Encoded authorization failure message: {'x' * 999}"}
    }
    assert aws_errors._message("RunInstances", error) == "RunInstances: UnauthorizedOperation: No."


def test_a_credential_with_names_that_aws_does_not_have_is_denied_without_its_values(cloud: Ec2Cloud) -> None:
    given = {"access_key": "AKIA", "secret_access_key": "hunter2", "session_token": "t"}
    for call in (lambda one: one.list("cloud", 0.0), lambda one: one.launch(request(), "m-1"), AwsProvider.check):
        with pytest.raises(Denied) as refused:
            call(AwsProvider(AWS, "here", given))
        assert "AWS knows no access_key in a credential: it has access_key_id, secret_access_key" in str(refused.value)
        assert "hunter2" not in str(refused.value)
    assert cloud.called("RunInstances") == []
