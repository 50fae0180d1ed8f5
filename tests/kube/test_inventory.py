"""Hundreds of simulated nodes and their pods become the inventory of the service, and stay it while they change."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from informing import client, soon
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.kubernetes.cluster.inventory import KubernetesInventory
from makeway_quota.backends.kubernetes.cluster.nodes import NodeSelector, project_node, toleration
from makeway_quota.main import main
from pods import PODS, simulated_pod

from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = pytest.mark.kube

NODES = 520
"""More than a page of the API server's list holds"""
GPU = "nvidia.com/gpu"
MODEL = "NVIDIA-H100-80GB-HBM3"
H100 = NodeSelector("h100", GPU, {"nvidia.com/gpu.product": MODEL}, (toleration(SIMULATED),))


@pytest.fixture(scope="module")
def big() -> Iterator[Cluster]:
    """A cluster of its own, because other tests count the nodes of the shared one."""
    with Cluster.start() as cluster:
        cluster.add_simulated_nodes(NODES)
        yield cluster


@pytest.fixture
async def inventory(big: Cluster) -> AsyncIterator[KubernetesInventory]:
    async with client(big) as api:
        made = KubernetesInventory(api, [H100], instance="here")
        await made.open()
        await soon(lambda: all_ready(made), "all nodes are ready, empty, and take pods")
        yield made
        await made.close()
    big.api.delete(PODS, gracePeriodSeconds="0")


def all_ready(found: KubernetesInventory) -> bool:
    """Whether all nodes are there and none is as new nodes are: tainted until a controller has seen it ready."""
    seen = found.node_statuses().values()
    return len(seen) == NODES and all(one.ready and not one.cordoned and not one.foreign_gpus for one in seen)


def node(found: KubernetesInventory, name: str) -> NodeStatus:
    return found.node_statuses()[name]


def owned(name: str, **labels: str) -> dict[str, object]:
    pod = simulated_pod(name, gpus=2)
    pod["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "makeway", "makeway/instance": "here", **labels}
    pod["spec"]["nodeName"] = "simulated-0001"
    return pod


async def test_hundreds_of_nodes_are_read_in_pages(big: Cluster, inventory: KubernetesInventory) -> None:
    seen = inventory.node_statuses()
    assert sorted(seen) == sorted(big.simulated)
    assert {(one.pool, len(one.devices), one.cpu, one.memory, one.model) for one in seen.values()} == {
        ("h100", 8, 96_000, 2**20, MODEL)
    }
    assert all(one.ready and not one.cordoned and not one.foreign_gpus for one in seen.values())
    assert inventory.nodes.counts.pages == 2


async def test_the_inventory_follows_nodes_and_foreign_pods(big: Cluster, inventory: KubernetesInventory) -> None:
    before = dict(inventory.node_statuses())
    path, other = "/api/v1/nodes/simulated-0000", "/api/v1/nodes/simulated-0002"
    big.api.merge(path, {"spec": {"unschedulable": True}})
    await soon(lambda: node(inventory, "simulated-0000").cordoned, "the node is cordoned")
    big.api.merge(path, {"spec": {"unschedulable": False}})
    await soon(lambda: not node(inventory, "simulated-0000").cordoned, "it takes work again")
    taint = {"key": "batch", "value": "no", "effect": "NoSchedule"}
    kept = big.api.get(other)["spec"]["taints"]
    big.api.merge(other, {"spec": {"taints": [*kept, taint]}})
    await soon(lambda: node(inventory, "simulated-0002").cordoned, "the taint keeps pods away")
    assert "batch=no:NoSchedule" in node(inventory, "simulated-0002").taints
    big.api.merge(other, {"spec": {"taints": kept}})
    await soon(lambda: not node(inventory, "simulated-0002").cordoned, "the taint is gone")

    pod = simulated_pod("foreign", gpus=3)
    pod["spec"]["nodeName"] = "simulated-0001"
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1500m", "memory": "1Gi"}
    big.api.create(PODS, pod)
    big.api.create(PODS, owned("job", **{"makeway/job": "j-1", "makeway/attempt": "1", "makeway/worker": "0"}))
    big.api.create(PODS, owned("session", **{"makeway/session": "s-1"}))
    await soon(lambda: len(node(inventory, "simulated-0001").pods) == 2, "the job's and the session's pod are there")
    await soon(lambda: node(inventory, "simulated-0001").foreign_gpus, "the foreign pod is there")
    result = node(inventory, "simulated-0001")
    assert (result.foreign_gpus, result.foreign_cpu, result.foreign_memory) == (3000, 1500, 1024)
    assert [(pod.workload, pod.gpus) for pod in result.pods] == [("j-1", 2000), ("s-1", 2000)]
    for name in ("foreign", "session", "job"):
        big.api.delete(f"{PODS}/{name}")
    await soon(lambda: inventory.node_statuses() == before, "everything is as before")


async def test_pods_that_end_by_themselves_hold_nothing(big: Cluster, inventory: KubernetesInventory) -> None:
    pods = [simulated_pod(f"short-{number}", gpus=8, run_for="1s") for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pod: big.api.create(PODS, pod), pods))
    await soon(lambda: len(big.api.items(PODS, fieldSelector="status.phase=Succeeded")) == 200, "all have succeeded")
    short = {f"default/short-{number}" for number in range(200)}
    await soon(lambda: not inventory.pods.objects.keys() & short, "none of them is followed any more")
    assert sum(one.foreign_gpus for one in inventory.node_statuses().values()) == 0
    assert inventory.pods.counts.events > 0


async def test_another_policy_moves_nodes_to_other_pools(inventory: KubernetesInventory) -> None:
    inventory.select([NodeSelector("mig", "nvidia.com/mig-1g.10gb", H100.labels, H100.tolerations)])
    assert {(one.pool, one.devices) for one in inventory.node_statuses().values()} == {("mig", ())}
    inventory.select([NodeSelector("a100", GPU, {"nvidia.com/gpu.product": "A100"})])
    assert {(one.pool, one.devices) for one in inventory.node_statuses().values()} == {("", ())}


async def test_a_node_is_kept_small(big: Cluster) -> None:
    items = big.api.items("/api/v1/nodes")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = [project_node(item) for item in items]
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(kept) == NODES
    assert used / NODES < len(json.dumps(items[0])) / 2, "less than half of the node as text"


def test_the_command_lists_the_nodes(big: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    labels = {"nvidia.com/gpu.product": MODEL}
    pools = [{"name": "h100", "nodes": {"labels": labels}}, {"name": "none", "nodes": {"labels": {"a": "b"}}}]
    policy.write_text(json.dumps({"version": 1, "pools": pools, "profiles": [], "policies": []}))
    command = ["nodes", "--kubeconfig", str(big.kubeconfig), "--policy", str(policy)]
    assert main([*command, "--tolerate", SIMULATED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NODE", "POOL", "GPUS", "FOREIGN", "MODEL", "CPU", "MEMORY", "STATE"]
    assert lines[1].split() == ["simulated-0000", "h100", "8", "0", MODEL, "96", "1024Gi", "ready"]
    assert lines[-1] == f"h100: {8 * NODES:,} GPUs on {NODES} nodes that take work; foreign pods hold 0."
    assert main(command) == 0
    assert "takes no work: kwok.x-k8s.io/node=fake:NoSchedule" in capsys.readouterr().out
    assert main(["nodes", "--kubeconfig", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
