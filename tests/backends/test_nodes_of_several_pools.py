"""A node that offers several kinds of GPUs is in a pool for each: inventory, engine, pods, and changes under work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from api_server import ApiServer
from makeway_quota import policy
from makeway_quota.backends.base import NodeStatus, WorkloadPod
from makeway_quota.backends.kubernetes.cluster.inventory import KubernetesInventory
from makeway_quota.backends.kubernetes.cluster.nodes import selectors
from makeway_quota.backends.kubernetes.cluster.nodes_table import table
from makeway_quota.backends.kubernetes.pods.worker_pods import pools_there
from makeway_quota.control.world.pool_assignment import PoolAssignment, divide
from makeway_quota.control.world.workload_pods import WorkloadPods
from makeway_quota.engine import Node, Placed
from makeway_quota.values import MAX_DEVICES, Place, ordinal

LABELS = {"app.kubernetes.io/managed-by": "makeway", "makeway/instance": "here", "makeway/attempt": "1"}
MIG = "nvidia.com/mig-1g.10gb"
DOCUMENT = policy.read_policy("""
version: 1
pools:
- {name: whole, nodes: {labels: {gpu: h100}}}
- {name: slices, resource: nvidia.com/mig-1g.10gb, nodes: {labels: {gpu: h100}}}
- {name: shared, resource: nvidia.com/gpu.shared, nodes: {labels: {gpu: h100}}}
profiles:
- {name: one, gpus: 1, pools: [whole]}
- {name: slice, gpus: 1, pools: [slices]}
policies: []
""")


def node(**offered: str) -> dict[str, Any]:
    """Return a node of the cluster with 6 whole GPUs and 7 slices."""
    amounts = {"nvidia.com/gpu": "6", MIG: "7", "nvidia.com/gpu.shared": "0", "cpu": "64", "memory": "64Gi"} | offered
    metadata = {"name": "n0", "uid": "n", "resourceVersion": "1", "labels": {"gpu": "h100"}}
    conditions = [{"type": "Ready", "status": "True"}]
    return {"metadata": metadata, "spec": {}, "status": {"allocatable": amounts, "conditions": conditions}}


def pod(name: str, job: str = "", **requests: str) -> dict[str, Any]:
    """Return a pod on the node, of a job of ours or foreign."""
    ours = {**LABELS, "makeway/job": job, "makeway/worker": "0"} if job else {}
    metadata = {"name": name, "namespace": "jobs", "uid": name, "resourceVersion": "2", "labels": ours}
    containers = [{"name": "main", "resources": {"requests": requests}}]
    return {"metadata": metadata, "spec": {"nodeName": "n0", "containers": containers}, "status": {"phase": "Running"}}


class Cluster:
    """An API server with the node, and an inventory of it."""

    def __init__(self, *pods: dict[str, Any], **offered: str) -> None:
        self.server = ApiServer()
        self.server.lists = {"/api/v1/nodes": [node(**offered)], "/api/v1/pods": list(pods)}
        self.inventory = KubernetesInventory(self.server, selectors(DOCUMENT), instance="here")

    async def seen(self) -> NodeStatus:
        await self.inventory.open()
        result = self.inventory.node_statuses()["n0"]
        await self.inventory.close()
        return result


def as_nodes(seen: NodeStatus) -> dict[str, Node]:
    return {item.pool: item for item in divide([seen], DOCUMENT).as_nodes("n0", [])}


@pytest.mark.covers("F02")
async def test_each_resource_is_offered_to_its_pool_and_cpu_memory_and_pods_to_all() -> None:
    requests = {"nvidia.com/gpu": "2", MIG: "1", "cpu": "4", "memory": "1Gi"}
    seen = await Cluster(pod("foreign", **requests)).seen()
    assert [(part.pool, len(part.devices), part.foreign_gpus) for part in seen.parts] == [
        ("whole", 6, 2000),
        ("slices", 7, 1000),
    ]
    result = as_nodes(seen)
    assert {pool: (item.name, item.gpus, item.foreign_gpus) for pool, item in result.items()} == {
        "whole": ("n0/whole", 6, 2000),
        "slices": ("n0/slices", 7, 1000),
    }
    for item in result.values():
        shared = (item.host, item.cpu, item.memory, item.foreign_cpu, item.foreign_memory, item.pods, item.foreign_pods)
        assert shared == ("n0", 64_000, 65_536, 4000, 1024, 110, 1)
    assert seen.unassigned == ()


@pytest.mark.covers("F02")
async def test_a_worker_is_of_the_pool_whose_devices_it_was_given() -> None:
    seen = await Cluster().seen()
    assignment = divide([seen], DOCUMENT)
    whole, slices = as_nodes(seen)["whole"], as_nodes(seen)["slices"]
    for part in (whole, slices):
        index = part.first_device + 2
        place = Place("n0", (index,), (1000,))
        assert assignment.pool_of(place) == part.pool
        assert assignment.placement([place]) == (Placed(0, part.name, (index,), 1000),)
        assert ordinal(index) == 2, "as people and programs are shown it"
    assert {whole.first_device % MAX_DEVICES, slices.first_device % MAX_DEVICES} == {0}


@pytest.mark.covers("F02")
async def test_work_that_was_placed_while_the_node_was_in_one_pool_counts_in_that_of_its_profile() -> None:
    assignment = divide([await Cluster().seen()], DOCUMENT)
    before = Place("n0", (0, 1), (1000, 1000))
    assert assignment.pool_of(before, ("slices",)) == "slices"
    assert assignment.pool_of(before, ("shared", "whole")) == "whole"
    assert assignment.placement([before], ("slices",))[0].node == "n0/slices"


@pytest.mark.covers("F02")
async def test_a_pool_whose_last_gpus_were_cut_up_keeps_the_work_that_still_runs_there() -> None:
    running = pod("ours", job="j-1", **{"nvidia.com/gpu": "1"})
    seen = await Cluster(running, **{"nvidia.com/gpu": "0", MIG: "14"}).seen()
    assert [(part.pool, len(part.devices)) for part in seen.parts] == [("whole", 0), ("slices", 14)]
    assert [item.pool for item in seen.pods] == ["whole"]
    gone = await Cluster(**{"nvidia.com/gpu": "0", MIG: "14"}).seen()
    assert (gone.pool, gone.parts, len(gone.devices)) == ("slices", (), 14)


@pytest.mark.covers("F02")
async def test_the_taint_of_one_resource_does_not_close_the_others() -> None:
    cluster = Cluster(**{"amd.com/gpu": "2"})
    tainted = node(**{"amd.com/gpu": "2"})
    tainted["spec"]["taints"] = [{"key": "amd.com/gpu", "value": "present", "effect": "NoSchedule"}]
    cluster.server.lists["/api/v1/nodes"] = [tainted]
    amd = "- {name: amd, resource: amd.com/gpu, nodes: {labels: {gpu: h100}}}\n"
    document = policy.read_policy(f"version: 1\npools:\n- {{name: whole, nodes: {{labels: {{gpu: h100}}}}}}\n{amd}"
                           "profiles: []\npolicies: []\n")  # fmt: skip
    cluster.inventory.select(selectors(document))
    seen = await cluster.seen()
    assert {part.pool: part.cordoned for part in seen.parts} == {"whole": True, "amd": False}
    assert not seen.cordoned
    assert {item.pool: item.cordoned for item in divide([seen], document).nodes} == {"whole": True, "amd": False}


@pytest.mark.covers("F02", "F82")
async def test_what_outlives_its_attempt_holds_devices_of_its_own_pool_and_cpu_once() -> None:
    late = pod("late", job="j-1", **{MIG: "2", "cpu": "3"})
    seen = await Cluster(late).seen()
    shown = WorkloadPods(lambda: 100.0).shown(seen, {}, (), tuple)
    result = as_nodes(shown)
    held = {pool: [device for item in part.terminating for device in item.devices] for pool, part in result.items()}
    assert held["whole"] == []
    assert len(held["slices"]) == 2
    assert set(held["slices"]) <= set(range(result["slices"].first_device, result["slices"].first_device + 7))
    every = [item for part in result.values() for item in part.terminating]
    assert (sum(item.cpu for item in every), sum(item.pods for item in every)) == (3000, 1)


@pytest.mark.covers("F02")
async def test_a_pod_that_holds_more_than_its_plan_is_foreign_in_its_own_pool() -> None:
    seen = await Cluster().seen()
    first = as_nodes(seen)["slices"].first_device
    kept = WorkloadPods(lambda: 100.0)
    pods = tuple(WorkloadPod("s-1", 3000, pool="slices", attempt=None) for _ in range(1))

    class Row:
        id, kind, live, state, attempt = "s-1", "session", True, "running", 1
        placement = (Place("n0", (first,), (1000,)),)

    shown = kept.shown(replace(seen, pods=pods), {"s-1": Row()}, [Row()], tuple)  # type: ignore[dict-item, list-item]
    assert {pool: item.foreign_gpus for pool, item in as_nodes(shown).items()} == {"whole": 0, "slices": 2000}


@pytest.mark.covers("F02")
async def test_a_pod_of_ours_with_two_kinds_of_gpus_counts_in_both_pools() -> None:
    seen = await Cluster(pod("ours", job="j-1", **{"nvidia.com/gpu": "1", MIG: "2"})).seen()
    assert [(item.pool, item.gpus) for item in seen.pods] == [("whole", 1000)]
    assert {part.pool: part.foreign_gpus for part in seen.parts} == {"whole": 0, "slices": 2000}


async def test_nodes_lists_a_node_in_each_of_its_pools() -> None:
    lines = table([await Cluster(pod("foreign", **{MIG: "3"})).seen()]).splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [["n0", "whole", "6", "0"], ["n0", "slices", "7", "3"]]
    assert "whole: 6 GPUs on 1 node that takes work; foreign pods hold 0." in lines
    assert "slices: 7 GPUs on 1 node that takes work; foreign pods hold 3." in lines


def test_an_assignment_without_parts_is_as_before() -> None:
    (shown,) = PoolAssignment({"n0": (NodeStatus("n0", "whole", (0, 1), anonymous_devices=True),)}).as_nodes("n0", ())
    assert (shown.name, shown.host, shown.first_device) == ("n0", "", 0)


@pytest.mark.covers("F02", "F81")
async def test_a_workers_pod_requests_the_resource_of_the_devices_that_it_was_given() -> None:
    seen = await Cluster().seen()
    for part in seen.parts:
        place = Place("n0", part.devices[:2], (1000, 1000))
        assert pools_there(seen, place, ["whole", "slices"]) == [part.pool]
    before = Place("n0", (0,), (1000,))
    assert pools_there(seen, before, ["shared", "slices"]) == ["slices"], "placed while the node was in one pool"
    assert pools_there(seen, Place("n0"), ["slices", "whole"]) == ["slices", "whole"]
    assert pools_there(replace(seen, parts=()), before, ["slices"]) == ["whole"], "a node of one pool"
