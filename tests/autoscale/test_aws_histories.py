"""Random histories of a deployment on Amazon EC2 behind a faulty layer: the same rules hold as in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from autoscale.histories import History
from ec2_cloud import AWS, IMAGE, ZONES, Ec2Cloud, served, set_environment
from makeway_quota.autoscale.instances import Instance, InstanceList
from makeway_quota.autoscale.provider import JoinData
from makeway_quota.autoscale.providers import aws
from makeway_quota.autoscale.providers.aws import AwsProvider

pytestmark = pytest.mark.slow


class Ec2(Ec2Cloud):
    """The cloud that a history changes, and its provider, which knows it by HTTP only."""

    aws: AwsProvider

    def check(self) -> None:
        self.aws.check()

    def list(self, deployment: str, now: float) -> InstanceList:
        return self.aws.list(deployment, now)

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        return self.aws.launch(request, token, join)

    def terminate(self, instance: str) -> bool:
        return self.aws.terminate(instance)

    def console(self, instance: str) -> str:
        return self.aws.console(instance)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2]:
    monkeypatch.setattr(aws, "READ_TRIES", 1)  # the pauses of the SDK are real ones
    made = Ec2()
    with served(made) as address:
        set_environment(monkeypatch, address)
        made.aws = AwsProvider(AWS, "here")
        yield made


@pytest.mark.parametrize("seed", range(4))
def test_histories_on_aws_keep_the_rules(cloud: Ec2, seed: int) -> None:
    history = History(seed)
    types = tuple(
        replace(machine_type, machine_image=IMAGE, zones=ZONES if "a" in machine_type.zones else machine_type.zones)
        for machine_type in history.deployment.types
    )
    history.deployment = replace(
        history.deployment, provider="aws", types=types, currency="USD", settings=dict(AWS.settings)
    )
    cloud.ignores_tokens = history.provider.ignores_tokens
    cloud.clock = lambda: history.true_now
    history.provider = cloud  # type: ignore[assignment]
    history.play()
    assert cloud.launches
    assert cloud.called("DescribeInstances")
