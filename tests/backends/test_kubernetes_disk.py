"""What the pods of jobs may write to the disk of their node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from makeway_quota.backends.base import BackendError, StartOrder
from makeway_quota.backends.kubernetes.cluster.pod_requests import pod_requests
from makeway_quota.backends.kubernetes.pods.disk import Disk, parse_disk
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings, WorkerResources, worker_pod
from makeway_quota.policy import read_policy
from makeway_quota.policy.write import write_policy
from makeway_quota.settings import load
from makeway_quota.values import Place

GIB = 1024
EPHEMERAL = "ephemeral-storage"
SETTINGS = PodSettings("jobs", "here", "http://makeway:8765", "makeway:1", "notebook:1", disk=Disk(GIB, 50 * GIB))
LARGE = 400 * GIB
"""MiB that a node offers of its disk"""


def spec(given: WorkerResources, settings: PodSettings = SETTINGS, **order: Any) -> Any:
    places = (Place("n0", (0,), (1000,)),)
    made = StartOrder("j-1", 1, "fit", "ana", "rnd", "gpu1", ("python", "train.py"), {}, places, grace=30)
    return worker_pod(settings, replace(made, **order), 0, "path", "tokens", given)["spec"]


def sizes(spec: Any) -> dict[str, Any]:
    return {one["name"]: one["emptyDir"].get("sizeLimit") for one in spec["volumes"] if "emptyDir" in one}


def resources(spec: Any, name: str = "worker") -> tuple[Any, Any]:
    result = next(one for one in spec["containers"] if one["name"] == name)["resources"]
    return result.get("requests", {}).get(EPHEMERAL), result.get("limits", {}).get(EPHEMERAL)


def test_each_pod_has_a_request_and_a_limit_and_no_volume_of_its_own_is_larger() -> None:
    result = spec(WorkerResources(node_disk=LARGE), memory=2048)
    assert resources(result) == ("1024Mi", "51200Mi")
    assert sizes(result) == {"makeway": "51200Mi", "checkpoints": "51200Mi", "shm": "2048Mi"}


def test_no_pod_may_use_more_than_half_of_a_small_disk() -> None:
    result = spec(WorkerResources(node_disk=20 * GIB))
    assert resources(result) == ("1024Mi", "10240Mi")
    assert resources(spec(WorkerResources(node_disk=GIB))) == ("512Mi", "512Mi"), "its request is no larger"


def test_a_node_that_counts_no_disk_takes_a_pod_with_a_limit() -> None:
    result = spec(WorkerResources(node_disk=0))
    assert resources(result) == ("0Mi", "51200Mi"), "without a request the limit would be the request"
    assert EPHEMERAL not in pod_requests(result)


def test_a_profile_has_its_own_disk_on_every_node() -> None:
    given = WorkerResources(disk=100 * GIB, node_disk=20 * GIB)
    assert resources(spec(given)) == ("102400Mi", "102400Mi"), "Kubernetes says that the node is too small"
    assert resources(spec(replace(given, node_disk=0))) == ("0Mi", "102400Mi")


def test_the_limit_is_that_of_the_whole_pod() -> None:
    beside = {"name": "beside", "image": "b", "resources": {"limits": {EPHEMERAL: "10Gi"}}}
    template = {"spec": {"containers": [beside]}}
    result = spec(WorkerResources(node_disk=LARGE, template=template))
    assert resources(result) == ("1024Mi", f"{40 * GIB}Mi")
    assert sizes(result)["makeway"] == "51200Mi"
    with pytest.raises(BackendError, match="raise disk in the profile"):
        spec(WorkerResources(disk=10 * GIB, node_disk=LARGE, template=template))


def test_a_template_says_it_otherwise() -> None:
    worker = {"name": "worker", "resources": {"limits": {EPHEMERAL: "200Gi"}}}
    volumes = [{"name": "makeway", "emptyDir": {"sizeLimit": "3Gi"}}, {"name": "scratch", "emptyDir": {}}]
    template = {"spec": {"containers": [worker], "volumes": volumes}}
    result = spec(WorkerResources(node_disk=LARGE, template=template))
    assert resources(result) == (None, "200Gi")
    assert sizes(result) == {
        "makeway": "3Gi",
        "scratch": f"{200 * GIB}Mi",
        "checkpoints": f"{200 * GIB}Mi",
        "shm": None,
    }


def test_without_settings_nothing_is_bounded() -> None:
    result = spec(WorkerResources(node_disk=LARGE), replace(SETTINGS, disk=Disk()))
    assert resources(result) == (None, None)
    assert set(sizes(result).values()) == {None}


@pytest.mark.parametrize(
    ("request_", "limit", "found"),
    [("1Gi", "50Gi", Disk(1024, 51200)), ("", "", Disk()), ("500M", "", Disk(477)), (" ", "1Gi", Disk(0, 1024))],
)
def test_the_settings_are_quantities(request_: str, limit: str, found: Disk) -> None:
    assert parse_disk(request_, limit) == found


@pytest.mark.parametrize(("request_", "limit"), [("2Gi", "1Gi"), ("much", ""), ("1Gi", "-")])
def test_other_settings_are_refused(request_: str, limit: str) -> None:
    with pytest.raises(ValueError, match=r"quantity of Kubernetes|more of a disk than they may use"):
        parse_disk(request_, limit)


def test_the_default_is_safe() -> None:
    result = load(environ={}).kubernetes
    assert parse_disk(result.disk_request, result.disk_limit) == Disk(1024, 50 * 1024)


def test_a_profile_keeps_its_disk_in_the_document() -> None:
    parts = ("version: 1", "pools: [{name: p}]", "policies: [{name: rnd, users: [ana]}]")
    text = "\n".join((*parts, "profiles: [{name: gpu1, gpus: 1, disk: 100Gi}]"))
    document = read_policy(text)
    assert document.profile_facts["gpu1"].disk == 100 * 1024
    assert read_policy(write_policy(document)) == document
