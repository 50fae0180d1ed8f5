"""Random histories of a deployment on Compute Engine with a cloud's faults: the same rules hold as in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from autoscale.histories import History
from gce_cloud import GCP, IMAGE, MORE_ZONES, ZONES, GceCloud, served, set_environment
from makeway_quota.autoscale.instances import Instance, InstanceList
from makeway_quota.autoscale.provider import JoinData
from makeway_quota.autoscale.providers import gcp
from makeway_quota.autoscale.providers.gcp import GcpProvider

pytestmark = pytest.mark.slow


class Gce(GceCloud):
    """The cloud that a history changes, and its provider, which knows it by HTTP only."""

    gcp: GcpProvider

    def check(self) -> None:
        self.gcp.check()

    def list(self, deployment: str, now: float) -> InstanceList:
        return self.gcp.list(deployment, now)

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        return self.gcp.launch(request, token, join)

    def terminate(self, instance: str) -> bool:
        return self.gcp.terminate(instance)

    def console(self, instance: str) -> str:
        return self.gcp.console(instance)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gce]:
    monkeypatch.setattr(gcp, "READ_TRIES", 1)  # the pauses between tries are real ones
    made = Gce()
    with served(made) as address:
        set_environment(monkeypatch, address, tmp_path)
        made.gcp = GcpProvider(GCP, "here")
        yield made


@pytest.mark.parametrize("seed", range(4))
def test_histories_on_gcp_keep_the_rules(cloud: Gce, seed: int) -> None:
    history = History(seed)
    types = tuple(
        replace(machine_type, machine_image=IMAGE, zones=ZONES if "a" in machine_type.zones else MORE_ZONES[:1])
        for machine_type in history.deployment.types
    )
    history.deployment = replace(history.deployment, provider="gcp", types=types, settings=dict(GCP.settings))
    cloud.ignores_tokens = history.provider.ignores_tokens
    cloud.clock = lambda: history.true_now
    history.provider = cloud  # type: ignore[assignment]
    history.play()
    assert cloud.launches
    assert cloud.called("instances.aggregatedList")
