"""A mixed-MIG node beside a time-sliced one, on simulated nodes: a pool for each resource, and a reclaim in one (K3).

The scheduler of Kubernetes places the pods, so that what is planned beyond a node's CPU would not run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_service import PODS as JOB_PODS
from job_service import Serving, make_namespace

from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = [pytest.mark.kube, pytest.mark.covers("F02", "F15", "F81")]

MIXED, TIMED = "simulated-0050", "simulated-0051"
MIG, SHARED = "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"
OFFERS: dict[str, dict[str, str]] = {
    MIXED: {"nvidia.com/gpu": "2", MIG: "4", "cpu": "11"},
    TIMED: {"nvidia.com/gpu": "0", SHARED: "4", "amd.com/gpu": "1", "cpu": "12"},
}
POOLS = {
    "whole": ("nvidia.com/gpu", MIXED),
    "slices": (MIG, MIXED),
    "shared": (SHARED, TIMED),
    "amd": ("amd.com/gpu", TIMED),
}
POLICY = {
    "version": 1,
    "pools": [
        {"name": name, "resource": resource, "nodes": {"labels": {"makeway.test/node": node}}}
        for name, (resource, node) in POOLS.items()
    ],
    "profiles": [
        {"name": f"{name}1", "gpus": 1, "cpu": 2, "pools": [name], "policies": [["rnd", "devops"]]} for name in POOLS
    ],
    "policies": [
        {"name": "rnd", "groups": ["rnd"], "quotas": [{"pools": ["slices"], "reserved": 2}, {"pools": ["whole"]}]},
        {"name": "devops", "groups": ["devops"], "quotas": [{"pools": ["slices"], "reserved": 2}]},
    ],
}


@pytest.fixture
def two_kinds(kwok_cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster with the two nodes."""
    make_namespace(kwok_cluster)
    before = {}
    for name, offered in OFFERS.items():
        path = f"/api/v1/nodes/{name}"
        before[name] = kwok_cluster.api.get(path)["status"]["allocatable"]
        kwok_cluster.api.merge(path, {"metadata": {"labels": {"makeway.test/node": name}}})
        amounts = {**before[name], **offered}
        kwok_cluster.api.merge(f"{path}/status", {"status": {"allocatable": amounts, "capacity": amounts}})
    yield kwok_cluster
    kwok_cluster.api.delete(JOB_PODS, gracePeriodSeconds="0")
    for name, offered in OFFERS.items():
        path = f"/api/v1/nodes/{name}"
        amounts = {**dict.fromkeys(offered, None), **before[name]}
        kwok_cluster.api.merge(f"{path}/status", {"status": {"allocatable": amounts, "capacity": amounts}})
        kwok_cluster.api.merge(path, {"metadata": {"labels": {"makeway.test/node": None}}})


async def test_work_runs_in_each_pool_and_a_job_in_quota_gets_the_slice_that_was_lent(
    two_kinds: Cluster, tmp_path: Path
) -> None:
    serving = Serving(two_kinds, tmp_path / "state", json.dumps(POLICY))
    serving.environ |= {"MAKEWAY_KUBE_TOLERATIONS": SIMULATED, "MAKEWAY_KUBE_CHECKPOINT_CLAIM": ""}

    async def placed() -> dict[str, tuple[str | None, dict[str, Any]]]:
        """Return the node of each job's pod, and the extended resources that it requests."""
        pods = await asyncio.to_thread(two_kinds.api.items, JOB_PODS)
        found = {}
        for pod in pods:
            asked = next(c for c in pod["spec"]["containers"] if c["name"] == "worker")["resources"]["requests"]
            gpus = {name: many for name, many in asked.items() if "/" in name}
            found[pod["metadata"]["labels"]["makeway/job"]] = pod["spec"].get("nodeName"), gpus
        return found

    try:
        async with serving.running() as service:
            jobs = {}
            for name, profile in [(pool, f"{pool}1") for pool in POOLS] + [(f"s{at}", "slices1") for at in range(3)]:
                job = await serving.submit("ana", name, "sleep", "600", profile=profile)
                jobs[name] = job.id

            async def all_bound() -> bool:
                nodes = await placed()
                return len(nodes) == len(jobs) and all(node for node, _ in nodes.values())

            await serving.until(all_bound, lambda: f"the pods are bound: {jobs}")
            found = await placed()
            for name, id in jobs.items():
                resource, node = POOLS.get(name, POOLS["slices"])
                assert found[id] == (node, {resource: "1"}), name
            waits = await serving.submit("ana", "cpu", "true", profile="whole1")
            other = await serving.submit("bo", "mine", "sleep", "600", profile="slices1")

            async def makes_way() -> bool:
                nodes = await placed()
                return other.id in nodes and nodes[other.id] == (MIXED, {MIG: "1"})

            await serving.until(makes_way, lambda: "bo's job has the slice that was lent")
            rows = {name: service.components.store.workload(id) for name, id in jobs.items()}
            assert [name for name, row in rows.items() if row and row.state in ("pending", "checkpointing")] == ["s2"]
            row = service.components.store.workload(waits.id)
            assert row is not None
            assert row.state == "pending", "work of both its pools uses 10 of the node's 11 cores"
    finally:
        for one in serving.clients.values():
            await one.close()
        serving.reservation.close()
