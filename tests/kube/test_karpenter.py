"""Karpenter with its kwok provider adds a node for a job that waits, and removes it; all but the cloud is real.

The jobs' pods run on simulated nodes: stand-ins exchange with the service what their launchers would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from informing import soon
from job_service import NAMESPACE, PODS, Serving, make_namespace
from makeway_api.models import Job, SessionRequest
from makeway_quota.autoscale.machine import Machine

from kube_cluster import karpenter, stand_in_launchers
from kube_cluster.api import Object
from kube_cluster.cluster import Cluster

pytestmark = [pytest.mark.kube, pytest.mark.slow, pytest.mark.timeout(2400)]  # Karpenter may have to be built

POOL = "makeway.test/pool"
REGISTRATION = 6
"""Seconds after which a node of Karpenter joins"""
DEPLOYMENT = """
version: 1
name: grows
provider: kubernetes
poll_interval: 1
request_timeout: 60
machine_types:
  - {name: none, pool: cloud, instance: no-such-type, gpus: 2, idle_timeout: 3}
  - {name: large, pool: cloud, instance: gpu-4, gpus: 4, cpu: 8, memory: 16Gi, idle_timeout: 3}
"""
POLICY = {
    "version": 1,
    "pools": [{"name": "cloud", "kind": "autoscaled", "nodes": {"labels": {POOL: "cloud"}}}],
    "profiles": [{"name": "gpu2", "gpus": 2, "pools": ["cloud"], "policies": ["rnd"], "grace": 20}],
    "policies": [{"name": "rnd", "groups": ["rnd"], "quotas": [{"pools": ["cloud"], "reserved": 0, "limit": 8}]}],
}
NODE_POOL = {
    "apiVersion": "karpenter.sh/v1",
    "kind": "NodePool",
    "metadata": {"name": "cloud"},
    "spec": {
        "template": {
            "metadata": {"labels": {POOL: "cloud", "type": "kwok"}},
            "spec": {
                "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
                "requirements": [{"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["gpu-4"]}],
                "expireAfter": "Never",
                "terminationGracePeriod": "5m",
            },
        },
        "disruption": {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "2s"},
    },
}
NODE_CLASS = {
    "apiVersion": "karpenter.kwok.sh/v1alpha1",
    "kind": "KWOKNodeClass",
    "metadata": {"name": "default"},
    "spec": {"nodeRegistrationDelay": f"{REGISTRATION}s"},
}


@pytest.fixture
async def growing(control_plane: Cluster, tmp_path: Path) -> AsyncIterator[Serving]:
    """Return a service for a pool of which Karpenter adds the nodes; neither runs yet."""
    make_namespace(control_plane)
    control_plane.simulate()
    await asyncio.to_thread(karpenter.karpenter)  # it may have to be built
    made = Serving(control_plane, tmp_path / "state", json.dumps(POLICY))
    made.environ |= {"MAKEWAY_BACKEND": "kubernetes,machines"}
    del made.environ["MAKEWAY_KUBE_CHECKPOINT_CLAIM"]
    yield made
    for one in made.clients.values():
        await one.close()
    made.reservation.close()


@pytest.fixture
def cluster(growing: Serving, control_plane: Cluster) -> Iterator[Cluster]:
    """Return the cluster with Karpenter, whose pool has no node, and with stand-ins for launchers."""
    api, url = control_plane.api, urlsplit(growing.url)
    address = f"{url.scheme}://{url.netloc}"
    with karpenter.running(control_plane, {"gpu-4": 4}):
        api.create(karpenter.NODE_CLASSES, NODE_CLASS)
        api.create(karpenter.POOLS, NODE_POOL)
        with stand_in_launchers.running(control_plane.kubeconfig, address, NAMESPACE):
            yield control_plane
        api.delete(PODS, gracePeriodSeconds="0")


def nodes(cluster: Cluster) -> list[Object]:
    return cluster.api.items("/api/v1/nodes", labelSelector=f"{POOL}=cloud")


def claims(cluster: Cluster) -> list[Object]:
    return cluster.api.items(karpenter.CLAIMS)


def objects(cluster: Cluster) -> list[str]:
    """Return the names of what there is of machines and jobs."""
    records = cluster.api.items(f"/api/v1/namespaces/{NAMESPACE}/configmaps", labelSelector="makeway/machine")
    return [one["metadata"]["name"] for one in (*cluster.api.items(PODS), *records)]


async def reasons_until(growing: Serving, job: Job, true: Callable[[], object], what: str) -> list[str]:
    """Return what the job's owner was told until it is true, each once."""
    told: list[str] = []
    for _ in range(600):
        if true():
            return list(dict.fromkeys(told))
        reason = (await growing.client("ana").job(job.id)).reason
        told.append(reason.message if reason else "")
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{what}: {told[-1:]}")


@pytest.mark.covers("F71", "F83")
async def test_karpenter_adds_a_node_for_a_job_and_removes_it_when_the_job_is_over(
    growing: Serving, cluster: Cluster
) -> None:
    async with growing.running() as service:
        store = service.components.store
        store.deployments.save("grows", DEPLOYMENT, 0, "root", 1.0)
        job = await growing.submit("ana", "fit", "train", profile="gpu2")

        def rows() -> list[Machine]:
            return list(store.machines.live())

        def ready() -> bool:
            return [row.type for row in rows() if row.state == "ready"] == ["large"]

        told = await reasons_until(growing, job, ready, "a machine is ready")
        assert any(one.startswith("Waiting for a machine: booting.") for one in told), told
        (claim,), (node,) = claims(cluster), nodes(cluster)
        name = node["metadata"]["name"]
        assert claim["status"]["nodeName"] == name
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "4"
        assert rows()[0].cluster_node == name

        def placed() -> bool:
            pods = cluster.api.items(PODS, labelSelector=f"makeway/job={job.id}")
            return [one["spec"].get("nodeName") for one in pods] == [name]

        await soon(placed, "its pod is on the new node")
        done = await growing.reaches(job, "succeeded", "failed")  # after 20 s: Karpenter consolidates after two
        assert (done.state.value, done.attempt) == ("succeeded", 1)
        assert [one["metadata"]["name"] for one in nodes(cluster)] == [name], "no other one was added"
        await soon(lambda: not claims(cluster) and not nodes(cluster), "Karpenter removes the node")
        await soon(lambda: not rows(), "the machine is gone")
        await soon(lambda: not objects(cluster), "nothing of it is left")
        assert (await growing.client("ana").job(job.id)).state.value == "succeeded"


@pytest.mark.covers("F83")
async def test_a_job_saves_and_goes_on_elsewhere_when_karpenter_disrupts_its_node(
    growing: Serving, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in_launchers, "RUN_SECONDS", 600.0)
    async with growing.running() as service:
        store = service.components.store
        store.deployments.save("grows", DEPLOYMENT, 0, "root", 1.0)
        job = await growing.submit("ana", "fit", "train", profile="gpu2")
        await growing.reaches(job, "running")
        (claim,), (node,) = claims(cluster), nodes(cluster)
        (machine,) = store.machines.live()
        (pod,) = cluster.api.items(PODS, labelSelector=f"makeway/job={job.id}")
        slow = {
            "metadata": {"annotations": {"makeway.test/terminating-for": "5s"}}
        }  # else it is gone before it can save
        cluster.api.merge(f"{PODS}/{pod['metadata']['name']}", slow)
        cluster.api.delete(f"{karpenter.CLAIMS}/{claim['metadata']['name']}")

        def disrupted() -> bool:
            taints = [one["key"] for each in nodes(cluster) for one in each["spec"].get("taints", ())]
            return "karpenter.sh/disrupted" in taints

        await soon(disrupted, "Karpenter taints the node")
        again = await growing.reaches(job, "running", attempt=2)
        assert again.attempt == 2
        log = [(one.machine, one.state, one.reason) for one in store.machine_log.events("grows")]
        assert (machine.id, "draining", "spot") in log, log
        attempt = store.attempts(job.id)[0]
        assert attempt.exit_code == 75, "it was told, and saved"
        assert attempt.outcome == "preempted", "by Makeway's notice, or by Karpenter's eviction, which is as fast"
        (second,) = [one for one in store.machines.live() if one.state == "ready"]
        assert second.cluster_node != node["metadata"]["name"]
        await soon(lambda: len(nodes(cluster)) == 1, "Karpenter has removed the first one")
        await growing.client("ana").cancel(job.id)
        await soon(lambda: not claims(cluster) and not store.machines.live(), "all of it is gone")


@pytest.mark.covers("F83")
async def test_a_notebook_waits_for_its_node_in_the_queue_where_no_time_out_counts(
    growing: Serving, cluster: Cluster
) -> None:
    async with growing.running() as service:
        store = service.components.store
        store.deployments.save("grows", DEPLOYMENT, 0, "root", 1.0)
        spawner, told = growing.client("spawner"), []
        wanted = SessionRequest(user="ana", server="", profile="gpu2", team="rnd", preemptible=True)
        session = await spawner.request_session(wanted)
        for _ in range(240):
            session = await spawner.renew(session.id)
            if session.phase == "granted":
                break
            assert not session.state.ended, session.reason
            told.append((session.phase, session.reason.message if session.reason else ""))
            await asyncio.sleep(0.5)
        (node,) = nodes(cluster)
        assert [worker.node for worker in session.placement] == [node["metadata"]["name"]]
        assert any(phase == "node" and one.startswith("Waiting for a machine: booting.") for phase, one in told), told
        await spawner.release(session.id)
        await soon(lambda: not claims(cluster) and not store.machines.live(), "all of it is gone")
