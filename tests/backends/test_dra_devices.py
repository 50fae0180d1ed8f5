"""Devices that drivers offer by dynamic resource allocation (DRA) are counted, and so are the claims on them (K8)."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import ApiServer
from makeway_quota.backends.base import NodeSeen
from makeway_quota.backends.kubernetes.api.client import ApiRefusal
from makeway_quota.backends.kubernetes.cluster.dra_devices import (
    CLAIMS,
    CLASSES,
    EXTENDED_RESOURCE_CLAIM,
    IMPLICIT_RESOURCE_PREFIX,
    SLICES,
    project_class,
    project_slice,
)
from makeway_quota.backends.kubernetes.cluster.inventory import KubernetesInventory
from makeway_quota.backends.kubernetes.cluster.nodes import NodeSelector

DRIVER = "gpu.nvidia.com"
GPU, MIG = "example.com/gpu", f"{IMPLICIT_RESOURCE_PREFIX}mig"
LABELS = {"app.kubernetes.io/managed-by": "makeway", "makeway/instance": "here", "makeway/attempt": "1"}


def meta(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "uid": name, "resourceVersion": "1", **more}


def node(**offered: str) -> dict[str, Any]:
    status = {"allocatable": {"cpu": "64", **offered}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": meta("n0"), "spec": {}, "status": status}


def pod(name: str, job: str = "", **requests: str) -> dict[str, Any]:
    ours = {**LABELS, "makeway/job": job, "makeway/worker": "0"} if job else {}
    containers = [{"name": "main", "resources": {"requests": requests}}]
    spec = {"nodeName": "n0", "containers": containers}
    return {"metadata": meta(name, namespace="jobs", labels=ours), "spec": spec, "status": {"phase": "Running"}}


def device_class(name: str, *expressions: str, resource: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": text}} for text in expressions]}
    return {"metadata": meta(name), "spec": spec | ({"extendedResourceName": resource} if resource else {})}


def device_slice(*devices: tuple[str, str], name: str = "s", generation: int = 1, where: Any = None) -> dict[str, Any]:
    """Return a slice of devices, each with its type."""
    made = [{"name": each, "attributes": {"type": {"string": kind}, "whole": {"bool": True}}} for each, kind in devices]
    pool = {"name": "n0", "generation": generation, "resourceSliceCount": 1}
    return {
        "metadata": meta(name),
        "spec": {"driver": DRIVER, "pool": pool, "devices": made, **(where or {"nodeName": "n0"})},
    }


def claim(name: str, *devices: str, pods: tuple[str, ...] = (), extended: bool = False) -> dict[str, Any]:
    results = [{"request": "r", "driver": DRIVER, "pool": "n0", "device": each} for each in devices]
    reserved = [{"resource": "pods", "name": each, "uid": each} for each in pods]
    metadata = meta(name, namespace="jobs", annotations={EXTENDED_RESOURCE_CLAIM: "true"} if extended else {})
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}
    return {"metadata": metadata, "spec": {}, "status": status}


CLASS = device_class("gpu", f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'", resource=GPU)
SLICED = device_class("mig", f'device.driver == "{DRIVER}"', f'device.attributes["{DRIVER}"].type == "mig"')
DEVICES = device_slice(*((f"g{at}", "gpu") for at in range(4)), *((f"m{at}", "mig") for at in range(7)))


async def seen(lists: dict[str, list[Any]], *pods: dict[str, Any], selectors: Any = None, **offered: str) -> NodeSeen:
    """Return the node as the inventory shows it."""
    server = ApiServer()
    server.lists = {"/api/v1/nodes": [node(**offered)], "/api/v1/pods": list(pods), **lists}
    chosen = selectors or [NodeSelector("whole", GPU), NodeSelector("slices", MIG)]
    inventory = KubernetesInventory(server, chosen, instance="here")
    await inventory.open()
    found = inventory.seen()["n0"]
    await inventory.close()
    return found


def amounts(found: NodeSeen) -> dict[str, tuple[int, int]]:
    """Return the devices of each pool, and the milli-GPUs that others hold of them."""
    return {each.pool: (len(each.devices), each.foreign_gpus) for each in found.by_pool()}


@pytest.mark.covers("F02", "F82")
async def test_devices_of_a_class_are_the_gpus_of_the_pool_with_its_resource() -> None:
    found = await seen({CLASSES: [CLASS, SLICED], SLICES: [DEVICES]})
    assert amounts(found) == {"whole": (4, 0), "slices": (7, 0)}
    only = await seen(
        {CLASSES: [CLASS, SLICED], SLICES: [DEVICES]}, selectors=[NodeSelector("a", f"{IMPLICIT_RESOURCE_PREFIX}gpu")]
    )
    assert amounts(only) == {"a": (4, 0)}, "every class has a resource of its own name"


@pytest.mark.covers("F02", "F82")
async def test_what_claims_of_others_hold_is_foreign_and_what_requests_say_counts_once() -> None:
    lists = {
        CLASSES: [CLASS, SLICED],
        SLICES: [DEVICES],
        CLAIMS: [
            claim("theirs", "g0", "g1", pods=("theirs",)),
            claim("waiting", "m0"),
            claim("ours", "m1", pods=("ours",)),
            claim("shared", "m2", pods=("ours", "theirs")),
            claim("made-for-requests", "g2", pods=("asks",), extended=True),
            claim("elsewhere", "x9", pods=("theirs",)),
            {"metadata": meta("pending", namespace="jobs"), "spec": {}},
        ],
    }
    found = await seen(lists, pod("theirs"), pod("ours", job="j-1"), pod("asks", **{GPU: "1"}))
    assert amounts(found) == {"whole": (4, 3000), "slices": (7, 2000)}


@pytest.mark.covers("F02", "F82")
async def test_our_pods_request_the_classes_resource_as_that_of_a_device_plugin() -> None:
    lists = {CLASSES: [CLASS], SLICES: [DEVICES], CLAIMS: [claim("c", "g0", pods=("ours",), extended=True)]}
    found = await seen(lists, pod("ours", job="j-1", **{GPU: "1"}), selectors=[NodeSelector("whole", GPU)])
    assert amounts(found) == {"whole": (4, 0)}
    assert [(each.workload, each.gpus) for each in found.pods] == [("j-1", 1000)]


@pytest.mark.covers("F02", "F82")
async def test_only_what_can_be_allocated_whole_on_one_node_is_counted() -> None:
    odd = device_slice(("a", "gpu"), ("b", "gpu"), ("c", "gpu"), name="odd", generation=2)
    odd["spec"]["devices"][0]["consumesCounters"] = [{"counterSet": "x", "counters": {}}]
    odd["spec"]["devices"][1]["taints"] = [{"key": "broken", "effect": "NoExecute"}]
    anywhere = device_slice(("d", "gpu"), name="anywhere", generation=2, where={"allNodes": True})
    lists = {CLASSES: [CLASS], SLICES: [DEVICES, odd, anywhere]}
    found = await seen(lists, selectors=[NodeSelector("whole", GPU)])
    assert amounts(found) == {"whole": (1, 0)}, "an older generation is void"


@pytest.mark.covers("F02")
async def test_a_device_plugin_goes_before_a_class_of_the_same_resource() -> None:
    found = await seen({CLASSES: [CLASS], SLICES: [DEVICES]}, selectors=[NodeSelector("whole", GPU)], **{GPU: "2"})
    assert amounts(found) == {"whole": (2, 0)}


@pytest.mark.parametrize(
    ("expression", "understood"),
    [
        ("device.driver == 'gpu.nvidia.com'", True),
        ("device.driver=='gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].whole == true", True),
        ("device.driver == 'gpu.nvidia.com' || device.driver == 'other'", False),
        ("device.attributes['gpu.nvidia.com'].productName.matches('H100')", False),
        ("device.driver == 'gpu.nvidia.com' && device.driver == 'other'", False),
        ("device.driver == 'gpu.nvidia.com' && (true)", False),
        ("", False),
    ],
)
def test_a_class_that_is_not_understood_has_no_devices(expression: str, understood: bool) -> None:
    made, kept = project_class(device_class("c", expression)), project_slice(DEVICES)
    assert made.understood is understood
    assert kept is not None
    assert any(made.selects(kept.driver, attributes) for _, attributes in kept.devices) is understood


@pytest.mark.parametrize("status", [403, 404])
async def test_a_cluster_without_the_api_has_the_gpus_of_its_device_plugins(status: int) -> None:
    server = ApiServer()
    server.lists = {"/api/v1/nodes": [node(**{GPU: "2"})]}

    def refuse(method: str, path: str) -> None:
        if "resource.k8s.io" in path:
            raise ApiRefusal(status, "", "no")

    server.answer = refuse
    inventory = KubernetesInventory(server, [NodeSelector("whole", GPU)], instance="here")
    await inventory.open()
    assert amounts(inventory.seen()["n0"]) == {"whole": (2, 0)}
    assert inventory.synced
    assert not inventory.problem
    await inventory.close()
