"""Machines by autoscaler deployments or by Kubernetes: both are documented, and both serve the same queues."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from autoscale.fleet import Fleet
from makeway_quota.autoscale.demand import PendingWork
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.document import read_deployment
from makeway_quota.autoscale.providers.settings import SETTINGS

FENCE = re.compile(r"^ *```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PAGES = {"aws": "aws.md", "gcp": "gcp.md", "kubernetes": "cluster-autoscaler.md", "local": "deployments.md"}
GUIDES = Path(__file__).parents[2] / "docs/how-to"


def documented(provider: str) -> Deployment:
    """Return the deployment that the guide of a route shows, as a reader copies it."""
    text = (GUIDES / PAGES[provider]).read_text(encoding="utf-8")
    blocks = [dedent(block) for block in FENCE.findall(text)]
    (document,) = [block for block in blocks if re.search(r"^provider: ", block, re.MULTILINE)]
    return read_deployment(document)


@pytest.mark.covers("F71")
@pytest.mark.parametrize("provider", PAGES)
def test_each_route_has_a_guide_whose_deployment_is_valid(provider: str) -> None:
    assert documented(provider).provider == provider
    overview = (GUIDES / "deployments.md").read_text(encoding="utf-8")
    assert provider == "local" or f"]({PAGES[provider]})" in overview, "the overview leads to each route"


def test_no_provider_is_without_a_guide() -> None:
    assert set(SETTINGS) <= set(PAGES)


@pytest.mark.covers("F71")
@pytest.mark.parametrize("provider", PAGES)
def test_the_same_queue_gets_its_machines_by_each_route(provider: str) -> None:
    """Of the same waiting jobs as many machines of the first type are launched, and none is left when they are done."""
    deployment = documented(provider)
    first = replace(deployment.types[0], gpus=4, cpu=0, memory=0, max_machines=4, price=1_000_000, market="on_demand")
    queue: list[PendingWork] = [PendingWork(f"job-{n}", (first.pool,), gpus=2000) for n in range(5)]
    fleet = Fleet(replace(deployment, types=(first,), hourly_budget=None, monthly_budget=None), pending=queue)
    fleet.cycle()
    fleet.boot()
    assert [(row.type, row.pool) for row in fleet.rows] == [(first.name, first.pool)] * 3
    fleet.pending = []
    fleet.run(3600)
    assert fleet.running == 0
