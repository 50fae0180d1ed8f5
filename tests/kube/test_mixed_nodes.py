"""Whole GPUs, MIG slices and GPUs that are shared by time: a pool for each resource, and a reclaim in one of them (K3).

On simulated nodes, where the scheduler of Kubernetes places the pods, so that what is planned beyond a node's CPU would
not run; and on a real one, whose kubelet hands out the devices of several device plugins.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from job_service import PODS as JOB_PODS
from job_service import TRAIN, Serving, make_namespace, weights
from makeway_api.models import Job, SessionRequest
from second_plugins import MIG, SHARED, offered

from kube_cluster.api import GPU
from kube_cluster.cluster import Cluster
from kube_cluster.node import Node
from kube_cluster.simulated import SIMULATED

pytestmark = [pytest.mark.kube, pytest.mark.covers("F02", "F15", "F81")]

MIXED, TIMED = "simulated-0050", "simulated-0051"
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
    for name, kinds in OFFERS.items():
        path = f"/api/v1/nodes/{name}"
        before[name] = kwok_cluster.api.get(path)["status"]["allocatable"]
        kwok_cluster.api.merge(path, {"metadata": {"labels": {"makeway.test/node": name}}})
        amounts = {**before[name], **kinds}
        kwok_cluster.api.merge(f"{path}/status", {"status": {"allocatable": amounts, "capacity": amounts}})
    yield kwok_cluster
    kwok_cluster.api.delete(JOB_PODS, gracePeriodSeconds="0")
    for name, kinds in OFFERS.items():
        path = f"/api/v1/nodes/{name}"
        amounts = {**dict.fromkeys(kinds, None), **before[name]}
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
        result = {}
        for pod in pods:
            asked = next(c for c in pod["spec"]["containers"] if c["name"] == "worker")["resources"]["requests"]
            gpus = {name: many for name, many in asked.items() if "/" in name}
            result[pod["metadata"]["labels"]["makeway/job"]] = pod["spec"].get("nodeName"), gpus
        return result

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
            result = await placed()
            for name, id in jobs.items():
                resource, node = POOLS.get(name, POOLS["slices"])
                assert result[id] == (node, {resource: "1"}), name
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


KINDS = {"whole": GPU, "slices": MIG, "shared": SHARED}


@pytest.fixture
def three_kinds(control_plane: Cluster, real_node: Node, jobs_policy: str) -> Iterator[str]:
    """Return a policy with a pool for each kind of GPU that the real node offers."""
    document = json.loads(jobs_policy)
    (profile,) = [one for one in document["profiles"] if one["name"] == "gpu1"]
    pool = document["pools"][0]
    document["pools"] = [{**pool, "name": name, "resource": resource} for name, resource in KINDS.items()]
    document["profiles"] = [{**profile, "name": f"{name}1", "pools": [name]} for name in KINDS]
    for team in document["policies"]:
        team["quotas"] = [{"pools": [name], "reserved": 1, "limit": 2} for name in KINDS]
    with ExitStack() as plugins:
        for resource in (MIG, SHARED):
            plugins.enter_context(offered(control_plane, real_node, resource))
        yield json.dumps(document)


async def test_a_slice_that_was_lent_is_reclaimed_for_a_notebook_and_the_job_resumes_on_a_real_node(
    control_plane: Cluster, three_kinds: str, tmp_path: Path
) -> None:
    serving = Serving(control_plane, tmp_path / "state", three_kinds)
    renewals: list[asyncio.Task[None]] = []

    async def trains(pool: str, seconds: str) -> Job:
        steps = ["--steps", "400", "--every", "5000", "--seconds", seconds]
        return await serving.submit("ana", pool, "python3", "train.py", *steps, files=[TRAIN], profile=f"{pool}1")

    async def renewed(lease: str) -> None:
        """Renew the lease as the spawner of a running notebook does: without renewals it ends after 15 s."""
        while True:
            await serving.client("spawner").renew(lease)
            await asyncio.sleep(3)

    async def granted(user: str) -> str:
        spawner = serving.client("spawner")
        request = SessionRequest(user=user, profile="slices1", team={"ana": "rnd", "bo": "devops"}[user])
        lease = await spawner.request_session(request)

        async def there() -> bool:
            return (await spawner.session(lease.id)).phase in ("granted", "running")

        await serving.until(there, lambda: f"{user} has a slice")
        renewals.append(asyncio.create_task(renewed(lease.id)))
        result = await spawner.session(lease.id)
        assert (result.resource, len(result.placement[0].devices)) == (MIG, 1)
        return str(lease.id)

    try:
        async with serving.running():
            await granted("ana")
            jobs = {pool: await trains(pool, "0.15" if pool == "slices" else "0") for pool in KINDS}
            lent = jobs["slices"]
            await serving.says(lent, "step 100")
            pod = control_plane.api.get(f"{JOB_PODS}/makeway-{lent.id}-1-0")
            (worker,) = [one for one in pod["spec"]["containers"] if one["name"] == "worker"]
            assert {name: many for name, many in worker["resources"]["limits"].items() if "/" in name} == {MIG: "1"}
            assert (await serving.client("ana").job(lent.id)).over_quota
            mine = await granted("bo")
            evicted = await serving.client("root").job(lent.id)
            assert (evicted.preemptions, evicted.attempts[0].outcome) == (1, "preempted")
            for pool in ("whole", "shared"):
                assert (await serving.reaches(jobs[pool], "succeeded", "failed")).preemptions == 0, "in other pools"
            renewals.pop().cancel()
            await serving.client("spawner").release(mine)
            done = await serving.reaches(lent, "succeeded", "failed", attempt=2)
            assert [one.outcome for one in done.attempts] == ["preempted", "succeeded"]
            step = done.attempts[0].checkpoint
            assert step is not None
            assert f"going on at step {step.step} of 400" in await serving.log(lent, 2)
            assert weights(await serving.log(lent, 2)) == weights(await serving.log(jobs["whole"]))
            await serving.no_pod_left()
            assert not any(one.done() for one in renewals), "the lease of the first notebook lives"
    finally:
        for renewal in renewals:
            renewal.cancel()
        for one in serving.clients.values():
            await one.close()
        serving.reservation.close()
