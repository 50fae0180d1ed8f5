"""The document of a deployment: exact amounts, every problem with its line, help for each field, and a round trip."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from makeway_quota.autoscale.deployment import Deployment, IdleSchedule, MachineType
from makeway_quota.autoscale.document import DeploymentTable, TypeTable, read_deployment, schema, write_deployment
from makeway_quota.policy import PolicyInvalid

FULL = """
version: 1
name: cloud
title: Cloud machines
provider: local
settings: {folder: clouds/a, region: 010}
currency: CHF
hour: 12.50
month: 3000.000001
timezone: Europe/Berlin
machine_types:
  - name: gpu-2
    pool: gpu
    instance: big-2
    gpus: 2
    cpu: 15.5
    memory: 60Gi
    zones: [a, b]
    market: spot_first
    price: 3.10
    spot_price: 1.1
    max_machines: 4
    idle_timeout: 5m
    spin_up_timeout: 20m
    schedule: [{machines: 2, days: [fri, mon], start: "08:30", end: "18:00"}]
    init_script: |
      #!/bin/sh
      echo ready
  - {name: cpu, pool: cpu, instance: small, price: 0.1, spot_price: null}
"""


def problems(text: str, **options: object) -> list[str]:
    with pytest.raises(PolicyInvalid) as refused:
        read_deployment(text, "cloud.yaml", **options)  # type: ignore[arg-type]
    return [str(issue) for issue in refused.value.issues]


def test_amounts_of_money_are_exact() -> None:
    result = read_deployment(FULL)
    assert (result.hourly_budget, result.monthly_budget) == (12_500_000, 3_000_000_001)
    assert (result.types[0].price, result.types[0].spot_price) == (3_100_000, 1_100_000)
    assert result.types[1].price == 100_000
    assert result.settings == {"folder": "clouds/a", "region": "010"}


def test_a_document_reads_back_as_the_same() -> None:
    result = read_deployment(FULL)
    assert read_deployment(write_deployment(result)) == result
    assert write_deployment(read_deployment(write_deployment(result))) == write_deployment(result)


@pytest.mark.parametrize("millionths", [1, 999_999, 100_000_000 * 1_000_000 - 1, 33_333_333_333_333, 70_000])
def test_every_amount_survives_a_round_trip(millionths: int) -> None:
    machine_type = MachineType("a", "gpu", "big", price=millionths)
    written = write_deployment(Deployment("cloud", "local", (machine_type,), hourly_budget=millionths))
    result = read_deployment(written)
    assert (result.types[0].price, result.hourly_budget) == (millionths, millionths)


def test_every_problem_is_named_with_its_line() -> None:
    text = FULL.replace("hour: 12.50", "hour: -1").replace("price: 3.10", "price: 0.0000001").replace("5m", "soon")
    result = problems(text.replace("pool: cpu", "pool: gpuu"), pools=["gpu"])
    assert [re.sub(": .*", "", line.removeprefix("cloud.yaml:")) for line in result] == ["8", "20", "20", "23", "29"]
    assert any('there is no pool "gpuu"' in line and 'did you mean "gpu"?' in line for line in result)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("price: 3.10", "price: null", "price is not known"),
        ("spot_price: 1.1", "max_age: 1d", "spot_price is not known"),
        ("price: 3.10", "price: nan", "is not between 0 and"),
        ("price: 3.10", "price: free", "expected an amount of money"),
        ("price: 3.10", 'price: "3.10"', "expected an amount of money"),
        ("price: 3.10", "price: 1e400", "is not between 0 and"),
        ("hour: 12.50", "hours: 12.50", 'did you mean "hour"?'),
        ("Europe/Berlin", "Mars/Base", "is not a time zone"),
        ("Europe/Berlin", "../../etc/passwd", "is not a time zone"),
        ("CHF", "francs", "is not a currency"),
        ("region: 010", "api_key: 010", "looks like a secret"),
        ("[fri, mon]", "[friday]", "is not a day"),
        ('"08:30"', '"25:00"', "expected a time of the day"),
        ("zones: [a, b]", "zones: [a, a]", "listed twice"),
        ("zones: [a, b]", "zones: []", "no zone is named"),
        ("max_machines: 4", "min_idle: 4", "is more than the 1 of max_machines"),
        ("name: cpu,", "name: gpu-2,", "is used twice"),
        ("provider: local", "provider: cloud", "expected one of"),
        ("price: 0.1, spot_price: null", "price: 0.1, spot_price: 0.05", "only the spot market"),
        ("timezone: Europe/Berlin", "orphan_after: 60s", "before its work goes elsewhere"),
        ("timezone: Europe/Berlin", "lost_after: 59s", "at least 60 seconds"),
        ("timezone: Europe/Berlin", "poll_interval: 0.2", "asked all the time"),
        ("spot_price: 1.1", "spot_price: 1.1\n    max_age: 60", "longer than spin_up_timeout"),
    ],
)
def test_wrong_documents_are_explained(old: str, new: str, message: str) -> None:
    assert old in FULL
    assert any(message in line for line in problems(FULL.replace(old, new)))


def test_a_stored_document_is_read_though_its_machines_would_end_at_once() -> None:
    """Else its machines would have no driver after an upgrade."""
    text = FULL.replace("timezone: Europe/Berlin", "poll_interval: 0").replace(
        "spot_price: 1.1", "spot_price: 1.1\n    max_age: 60"
    )
    assert problems(text)
    assert read_deployment(text, stored=True).poll_interval == 0


def test_a_document_without_types_is_refused() -> None:
    assert any("list of machine types is empty" in line for line in problems("name: a\nprovider: local\n"))
    assert any("name" in line for line in problems("provider: local\nmachine_types: []\n"))
    assert problems("")


@pytest.mark.covers("F78")
def test_every_field_has_help_and_every_value_of_a_deployment_is_a_field() -> None:
    for table in schema().values():
        assert [key for key, _, text in table if len(text) < 2] == []
    assert {field.name for field in fields(MachineType)} <= set(TypeTable.model_fields)
    by_service = {"types", "revision", "credential_set_at", "can_launch"}
    assert {field.name for field in fields(Deployment)} - by_service <= set(DeploymentTable.model_fields)


def test_defaults_are_those_of_the_values() -> None:
    read = read_deployment("name: a\nprovider: local\nmachine_types: [{name: b, pool: c, instance: d}]\n")
    assert read == Deployment("a", "local", (MachineType("b", "c", "d"),))


def test_the_example_of_the_reference_is_a_document() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/machines.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert read_deployment(example).hourly_budget == 12_500_000


@pytest.mark.parametrize(
    ("day", "hour", "covered"),
    [(23, 7, False), (23, 9, True), (23, 18, False), (27, 9, True), (24, 9, False)],
)
def test_a_schedule_applies_on_its_days_in_its_time_zone(day: int, hour: int, covered: bool) -> None:
    machine_type = read_deployment(FULL).types[0]
    moment = datetime(2026, 11, day, hour, 0, tzinfo=ZoneInfo("Europe/Berlin"))
    assert machine_type.idle_machines(moment.timestamp(), ZoneInfo("Europe/Berlin")) == (2 if covered else 0)


def test_a_schedule_past_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    night = IdleSchedule(1, ("fri",), 22 * 60, 6 * 60)
    friday = datetime(2026, 11, 27, 23, 0, tzinfo=UTC)
    assert night.covers(friday)
    assert night.covers(friday.replace(day=28, hour=5))
    assert not night.covers(friday.replace(day=27, hour=5))
    assert not night.covers(friday.replace(day=28, hour=23))


@pytest.mark.parametrize("broken", ["provider: aws", "provider: [", "name: Ü", "currency: 7"])
def test_a_mistake_in_the_document_hides_none_in_its_machine_types(broken: str) -> None:
    key = broken.partition(":")[0]
    text = re.sub(rf"(?m)^{key}: .*$", lambda _: broken, FULL).replace("pool: cpu", "pool: gpuu")
    text = text.replace("max_machines: 4", "max_machines: 4.5")
    if broken.endswith("["):
        text = text.replace("provider: [", "provider: [local]")
    result = problems(text, pools=["gpu"])
    assert any("max_machines" in line for line in result), result
    assert any('there is no pool "gpuu"' in line for line in result), result


AWS_DOCUMENT = """
name: cloud
provider: aws
currency: USD
hour: 40
settings: {region: eu-central-1, instance_profile: gpu-machine, key_pair: ops}
machine_types:
  - name: g5
    pool: gpu
    instance: g5.2xlarge
    gpus: 1
    machine_image: ami-0123456789abcdef0
    disk: 200Gi
    zones: [eu-central-1a, eu-central-1b]
    subnets: {eu-central-1a: subnet-0abc, eu-central-1b: subnet-0def}
    security_groups: [sg-0abc]
    market: spot_first
    price: 1.50
    spot_price: 0.75
"""


def test_a_document_for_aws_reads_back_as_the_same_and_is_all_in_the_request() -> None:
    result = read_deployment(AWS_DOCUMENT)
    assert read_deployment(write_deployment(result)) == result
    machine_type = result.types[0]
    wanted = json.loads(result.request(machine_type, "eu-central-1b", "spot", machine_type.spot_price, "m-1"))
    assert (wanted["machine_image"], wanted["disk"]) == ("ami-0123456789abcdef0", 204_800)
    assert (wanted["subnet"], wanted["security_groups"]) == ("subnet-0def", ["sg-0abc"])
    assert (wanted["settings"], wanted["max_price"]) == (dict(result.settings), 750_000)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("region: eu-central-1, ", "", "the region is missing"),
        ("region: eu-central-1", "region: Frankfurt", '"Frankfurt" is not a region'),
        ("region: eu-central-1", "region: ''", "region is empty"),
        ("key_pair", "key_pairs", 'did you mean "key_pair"?'),
        ("g5.2xlarge", "big-2", "is not an instance type"),
        ("    machine_image: ami-0123456789abcdef0\n", "", 'the machine type "g5" has no machine_image'),
        ("ami-0123456789abcdef0", "ubuntu", '"ubuntu" is not an id; write one such as ami-'),
        ("subnet-0def", "default", '"default" is not an id; write one such as subnet-'),
        ("[sg-0abc]", "[ssh]", '"ssh" is not an id; write one such as sg-'),
        ("zones: [eu-central-1a, eu", "zones: [us-east-1a, eu", '"us-east-1a" is not a zone of eu-central-1'),
        ("zones: [eu-central-1a, eu-central-1b]", "zones: [eu-central-1a]", "of a subnet is not in zones"),
        ("currency: USD", "currency: EUR", "is told to AWS in US dollars"),
        ("hour: 40", "request_timeout: 30", "an answer of AWS may take 50 seconds"),
        ("disk: 200Gi", "disk: 65Ti", "at most 64Ti"),
        ("provider: aws", "provider: local", "the provider local has no machine_image; remove it"),
    ],
)
def test_what_aws_would_refuse_is_told_before(old: str, new: str, message: str) -> None:
    assert old in AWS_DOCUMENT
    result = problems(AWS_DOCUMENT.replace(old, new))
    assert any(message in line for line in result), result


GCP_DOCUMENT = """
name: cloud
provider: gcp
hour: 40
settings: {project: my-project-123, network: gpus, external_ip: "true", max_run_hours: "48"}
machine_types:
  - name: l4
    pool: gpu
    instance: g2-standard-8
    gpus: 1
    machine_image: projects/debian-cloud/global/images/family/debian-12
    disk: 200Gi
    zones: [europe-west4-a, us-central1-b]
    subnets: {europe-west4-a: gpus}
    security_groups: [gpu-machine]
    market: spot_first
    price: 1.50
    spot_price: 0.75
  - name: t4
    pool: gpu
    instance: n1-standard-8
    accelerator: nvidia-tesla-t4
    gpus: 2
    machine_image: projects/my-project-123/global/images/gpu-7
    zones: [europe-west4-a]
    subnets: {europe-west4-a: projects/host-project/regions/europe-west4/subnetworks/gpus}
    price: 0.70
"""


def test_a_document_for_gcp_reads_back_as_the_same_and_is_all_in_the_request() -> None:
    result = read_deployment(GCP_DOCUMENT)
    assert read_deployment(write_deployment(result)) == result
    assert result.location == ("gcp", "my-project-123")
    machine_type = result.types[1]
    wanted = json.loads(result.request(machine_type, "europe-west4-a", "on_demand", machine_type.price, "m-1"))
    assert (wanted["accelerator"], wanted["gpus"], wanted["zone"]) == ("nvidia-tesla-t4", 2, "europe-west4-a")
    assert (wanted["settings"], wanted["subnet"]) == (dict(result.settings), machine_type.subnets["europe-west4-a"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("project: my-project-123, ", "", "the project is missing"),
        ("project: my-project-123", "project: Mine", '"Mine" is not the id of a project'),
        ("network: gpus", "network: ''", "network is empty"),
        ("external_ip", "external_ips", 'did you mean "external_ip"?'),
        ('external_ip: "true"', "external_ip: maybe", '"maybe" is not true or false'),
        ('"48"', '"0"', '"0" is not a number of hours from 1 to 2,880'),
        ('"48"', '"2881"', '"2881" is not a number of hours from 1 to 2,880'),
        ("name: cloud", "name: my.cloud", "which has no dots"),
        ("hour: 40", "request_timeout: 60", "an answer of Google may take 111 seconds; make it 120 or more"),
        ("g2-standard-8", "g5.2xlarge", '"g5.2xlarge" is not a machine type'),
        ("    machine_image: projects/debian-cloud/global/images/family/debian-12\n", "", '"l4" has no machine_image'),
        ("projects/debian-cloud/global/images/family/debian-12", "debian-12", '"debian-12" is not an image'),
        ("    zones: [europe-west4-a, us-central1-b]\n    subnets: {europe-west4-a: gpus}\n", "", '"l4" has no zones'),
        ("[europe-west4-a, us", "[Europe, us", '"Europe" is not a zone'),
        ("{europe-west4-a: gpus}", "{europe-west4-c: gpus}", "of a subnet is not in zones"),
        ("{europe-west4-a: gpus}", "{europe-west4-a: Gpus}", '"Gpus" is not a subnet'),
        ("regions/europe-west4/", "regions/us-central1/", "is not in the region of europe-west4-a"),
        ("[gpu-machine]", "[sg_0abc]", '"sg_0abc" is not a network tag'),
        ("disk: 200Gi", "disk: 65Ti", "at most 64Ti"),
        ("    accelerator: nvidia-tesla-t4\n", "", "n1-standard-8 has no GPUs of its own"),
        ("instance: n1-standard-8", "instance: g2-standard-8", "only N1 types with gpus take an accelerator"),
        (
            "    accelerator: nvidia-tesla-t4\n    gpus: 2\n",
            "    accelerator: nvidia-tesla-t4\n",
            "remove it, or set gpus",
        ),
        ("nvidia-tesla-t4", "T4", '"T4" is not a type of GPUs'),
        ("provider: gcp", "provider: local", "the provider local has no accelerator; remove it"),
        ("provider: gcp", "provider: aws", "machine types of AWS have their GPUs; remove it"),
    ],
)
def test_what_google_would_refuse_is_told_before(old: str, new: str, message: str) -> None:
    assert old in GCP_DOCUMENT
    result = problems(GCP_DOCUMENT.replace(old, new))
    assert any(message in line for line in result), result


def test_what_is_wrong_for_aws_is_told_with_its_line() -> None:
    text = AWS_DOCUMENT.replace("g5.2xlarge", "big").replace("Gi", "Xi").replace("sg-0abc", "web")
    assert [line.split(":")[1] for line in problems(text)] == ["10", "13", "16"]


def test_nodes_of_a_cluster_are_told_nothing_that_only_agents_read() -> None:
    text = """
name: cluster
provider: kubernetes
machine_types:
  - {name: a, pool: gpu, instance: any, gpus: 8, market: spot, spot_price: 1}
  - {name: b, pool: gpu, instance: any, gpus: 8, init_script: "true"}
"""
    with pytest.raises(PolicyInvalid) as refused:
        read_deployment(text)
    market, script = (str(issue) for issue in refused.value.issues)
    assert "the cluster chooses the market; make a pool of its spot nodes by their label" in market
    assert "nodes of the cluster have no init_script; remove it" in script
