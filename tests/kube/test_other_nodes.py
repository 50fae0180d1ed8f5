"""Jobs that Kubernetes does not place where Makeway planned them go to another node, on simulated nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_service import NAMESPACE, Serving, make_namespace
from job_service import PODS as JOB_PODS
from makeway_quota.backends.kubernetes.attempts.pod_waits import MAX_WAIT_SECONDS
from pods import PODS, phase, simulated_pod, wait_until

from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = pytest.mark.kube

NODES = ("simulated-0040", "simulated-0041")
POLICY = {
    "version": 1,
    "pools": [{"name": "gpu", "nodes": {"labels": {"makeway.test/two": "true"}}}],
    "profiles": [{"name": "gpu1", "gpus": 1, "pools": ["gpu"], "policies": ["rnd"]}],
    "policies": [{"name": "rnd", "groups": ["rnd"], "quotas": [{"pools": ["gpu"], "reserved": 2}]}],
}


def label(cluster: Cluster, value: str | None) -> None:
    """Set the label of the two nodes of the pool, or remove it."""
    for name in NODES:
        cluster.api.merge(f"/api/v1/nodes/{name}", {"metadata": {"labels": {"makeway.test/two": value}}})


@pytest.fixture
def two_nodes(kwok_cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster with two nodes of one pool, of which the first has a pod that wants no job beside it.

    The plan packs jobs onto that node, as it knows nothing of the rule.
    """
    make_namespace(kwok_cluster)
    label(kwok_cluster, "true")
    guest = simulated_pod("unsociable")
    guest["spec"] |= {"nodeName": NODES[0], "affinity": {"podAntiAffinity": {}}}
    term = {"labelSelector": {"matchLabels": {"app.kubernetes.io/name": "makeway-job"}}, "namespaces": [NAMESPACE]}
    rule = [{**term, "topologyKey": "kubernetes.io/hostname"}]
    guest["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] = rule
    kwok_cluster.api.create(PODS, guest)
    wait_until(lambda: phase(kwok_cluster.api, "unsociable") == "Running", "the pod runs")
    yield kwok_cluster
    kwok_cluster.api.delete(f"{PODS}/unsociable", gracePeriodSeconds="0")
    kwok_cluster.api.delete(JOB_PODS, gracePeriodSeconds="0")
    label(kwok_cluster, None)


async def test_a_job_that_kubernetes_does_not_place_follows_to_another_node(
    two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_WAIT_SECONDS, "unschedulable", 2.0)  # type: ignore[misc]
    monkeypatch.setattr("makeway_quota.backends.remote.backend.REPORT_GRACE", 1.0)
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 1.0)
    serving = Serving(two_nodes, tmp_path / "state", json.dumps(POLICY))
    serving.environ |= {"MAKEWAY_KUBE_TOLERATIONS": SIMULATED, "MAKEWAY_KUBE_CHECKPOINT_CLAIM": ""}
    try:
        async with serving.running() as service:
            job = await serving.submit("ana", "follower", "true")

            async def placed() -> bool:
                name = f"makeway-{job.id}-2-0"
                pods = await asyncio.to_thread(two_nodes.api.items, JOB_PODS, fieldSelector=f"metadata.name={name}")
                return [pod["spec"].get("nodeName") for pod in pods] == [NODES[1]]

            await serving.until(placed, lambda: f"its next pod is on {NODES[1]}")
            events = [item.message for item in await serving.client("ana").job_events(job.id)]
            (delayed,) = [message for message in events if "cannot be started yet" in message]
            assert "its pod waited for 2 s: Kubernetes does not place its pod: 0/" in delayed
            assert "anti-affinity rules" in delayed
            row = service.components.store.workload(job.id)
            assert row is not None
            assert (row.state, row.attempt, row.failures, row.infra_failures) == ("starting", 2, 0, 0)
    finally:
        for one in serving.clients.values():
            await one.close()
        serving.reservation.close()
