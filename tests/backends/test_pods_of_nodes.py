"""How many pods a node runs at most, and how many of everybody run there, as the inventory of a cluster shows it."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import ApiServer
from makeway_quota.backends.base import NodeStatus, WorkloadPod
from makeway_quota.backends.kubernetes.cluster.inventory import VANISHED_SECONDS, KubernetesInventory
from makeway_quota.backends.kubernetes.cluster.nodes import NodeSelector, project_node
from makeway_quota.control.world.pool_assignment import PoolAssignment
from makeway_quota.control.world.workload_pods import WorkloadPods

LABELS = {"app.kubernetes.io/managed-by": "makeway", "makeway/instance": "here", "makeway/attempt": "1"}


def node(**allocatable: str) -> dict[str, Any]:
    """Return a node of the cluster that offers 8 GPUs."""
    status = {
        "allocatable": {"nvidia.com/gpu": "8", **allocatable},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    return {"metadata": {"name": "n0", "uid": "n", "resourceVersion": "1"}, "spec": {}, "status": status}


def pod(name: str, phase: str = "Running", **labels: str) -> dict[str, Any]:
    """Return a pod without requests on the node."""
    metadata = {"name": name, "namespace": "jobs", "uid": name, "resourceVersion": "2", "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": "n0", "containers": []}, "status": {"phase": phase}}


async def seen(server: ApiServer) -> NodeStatus:
    """Return the node as the inventory shows it."""
    inventory = KubernetesInventory(server, [NodeSelector("gpu", "nvidia.com/gpu")], instance="here")
    await inventory.open()
    result = inventory.node_statuses()["n0"]
    await inventory.close()
    return result


@pytest.mark.covers("F82")
@pytest.mark.parametrize(("allocatable", "most"), [({"pods": "250"}, 250), ({}, 110)])
async def test_every_foreign_pod_counts_also_without_requests(allocatable: dict[str, str], most: int) -> None:
    server = ApiServer()
    ours = pod("ours", **LABELS, **{"makeway/job": "j-1", "makeway/worker": "0"})
    foreign = [pod("dns"), pod("other", **{"makeway/job": "j-2"}), pod("new", "Pending"), pod("done", "Succeeded")]
    server.lists = {"/api/v1/nodes": [node(**allocatable)], "/api/v1/pods": [ours, *foreign]}
    result = await seen(server)
    assert (result.max_pods, result.foreign_pods) == (most, 3)
    assert [item.workload for item in result.pods] == ["j-1"]


@pytest.mark.covers("F82")
def test_a_pod_that_outlives_its_attempt_counts_as_one_that_terminates() -> None:
    kept = WorkloadPods(lambda: 100.0)
    result = kept.shown(
        NodeStatus("n0", "gpu", (0,), max_pods=110, pods=(WorkloadPod("j-1", attempt=1, worker=0),)), {}, (), tuple
    )
    assert [(item.workload, item.pods) for item in result.terminating] == [("j-1", 1)]


@pytest.mark.covers("F82")
def test_the_engine_gets_the_pods_of_a_node() -> None:
    node = NodeStatus("n0", "gpu", (0, 1), max_pods=110, foreign_pods=7)
    (shown,) = PoolAssignment({"n0": (node,)}).as_nodes("n0", ())
    assert (shown.pods, shown.foreign_pods) == (110, 7)


@pytest.mark.covers("F82")
async def test_a_node_stays_in_its_pool_while_its_device_plugin_restarts() -> None:
    slices = "nvidia.com/mig-1g.10gb"
    server = ApiServer()
    server.lists = {"/api/v1/nodes": [node(**{"nvidia.com/gpu": "0", slices: "7"})], "/api/v1/pods": []}
    inventory = KubernetesInventory(server, [NodeSelector("whole", "nvidia.com/gpu"), NodeSelector("slices", slices)])
    await inventory.open()
    for many in (7, 0, 7):
        inventory.nodes.objects["n0"] = project_node(node(**{"nvidia.com/gpu": "0", slices: str(many)}))
        inventory._unread.add("n0")
        result = inventory.node_statuses()["n0"]
        assert (result.pool, len(result.devices)) == ("slices", 7)
    inventory.nodes.objects["n0"] = project_node(node(**{"nvidia.com/gpu": "1", slices: "0"}))
    inventory._unread.add("n0")
    assert inventory.node_statuses()["n0"].pool == "whole", "its GPUs are whole again"
    await inventory.close()


@pytest.mark.covers("F82")
async def test_gpus_that_a_node_does_not_offer_for_a_moment_count_as_before() -> None:
    """A restart of the device plugin or of the kubelet: what is nominated there is not looked for elsewhere."""
    server, now = ApiServer(), 1000.0
    server.lists = {"/api/v1/nodes": [node()], "/api/v1/pods": []}
    inventory = KubernetesInventory(server, [NodeSelector("gpu", "nvidia.com/gpu")], clock=lambda: now)
    await inventory.open()

    def devices(many: str | None = None, uid: str = "n") -> int:
        """Return how many GPUs the node is shown with; `many`: how many it says from now on."""
        if many is not None:
            item = node(**{"nvidia.com/gpu": many})
            item["metadata"]["uid"] = uid
            inventory.nodes.objects["n0"] = project_node(item)
            inventory._unread.add("n0")
        return len(inventory.node_statuses()["n0"].devices)

    assert devices() == 8
    assert devices("7") == 7, "one is broken"
    assert devices("0") == 7
    now += VANISHED_SECONDS - 1.0
    assert (devices(), devices("0")) == (7, 7), "whatever else is new of the node"
    now += 1.0
    assert devices() == 0, "without any news of the node"
    assert devices("0") == 0
    assert devices("8") == 8
    assert devices("0") == 8
    assert devices("0", uid="another") == 0, "it is another machine of the same name"
    devices("8")
    devices("0")
    now -= 10.0
    assert devices() == 0, "the clock was set back"
    await inventory.close()


@pytest.mark.covers("F82")
async def test_a_service_that_starts_while_a_device_plugin_restarts_counts_the_gpus_that_the_node_has() -> None:
    server, now = ApiServer(), 1000.0
    away = node(**{"nvidia.com/gpu": "0"})
    away["status"]["capacity"] = {"nvidia.com/gpu": "8"}
    server.lists = {"/api/v1/nodes": [away], "/api/v1/pods": []}
    inventory = KubernetesInventory(server, [NodeSelector("gpu", "nvidia.com/gpu")], clock=lambda: now)
    await inventory.open()
    assert len(inventory.node_statuses()["n0"].devices) == 8
    now += VANISHED_SECONDS
    for _ in range(2):
        assert inventory.node_statuses()["n0"].devices == ()
        inventory._unread.add("n0")
    await inventory.close()
