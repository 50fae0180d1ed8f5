"""Notebooks as pods where the quota service reads the nodes of the cluster, and knows the pods of its sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kube.notebooks import Notebooks, add_nodes, full, notebooks
from makeway_api.models import Pool
from pods import PODS, wait_until
from running import SAMPLE

from kube_cluster.api import GPU
from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = pytest.mark.kube

NODES = ("notebooks-1", "notebooks-2")
LABEL = {"makeway.test/notebooks": "yes"}
POLICY = SAMPLE.read_text(encoding="utf-8").replace("local: {gpus: all}", "labels: {makeway.test/notebooks: 'yes'}")
GPU1 = {"profile": "gpu1", "team": "rnd"}


@pytest.fixture(scope="module")
def portal(kwok_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebooks]:
    root = tmp_path_factory.mktemp("portal")
    (root / "policy.yaml").write_text(POLICY, encoding="utf-8")
    add_nodes(kwok_cluster, NODES, **LABEL)
    settings = {
        "MAKEWAY_POLICY_FILE": str(root / "policy.yaml"),
        "MAKEWAY_BACKEND": "kubernetes",
        "MAKEWAY_KUBECONFIG": str(kwok_cluster.kubeconfig),
        "MAKEWAY_KUBE_NAMESPACE": "default",
        "MAKEWAY_KUBE_LAUNCHER_IMAGE": "none",
        "MAKEWAY_KUBE_TOLERATIONS": SIMULATED,
    }
    with notebooks(root, kwok_cluster, **settings) as portal:
        yield portal
    for name in NODES:
        kwok_cluster.api.delete(f"/api/v1/nodes/{name}")


@pytest.fixture(autouse=True)
def nothing_left(portal: Notebooks) -> Iterator[None]:
    yield
    portal.clear()


def pool(portal: Notebooks) -> Pool:
    with portal.client() as client:
        (found,) = client.pools()
    return found


@pytest.mark.covers("N06", "F26")
def test_a_session_is_placed_on_a_node_of_the_cluster_and_its_pod_is_not_foreign(portal: Notebooks) -> None:
    wait_until(lambda: (pool(portal).total, pool(portal).free) == (10, 10), "both nodes are seen, and nothing else")
    pod = portal.running("ana", **GPU1)
    assert pod["spec"]["nodeName"] in NODES
    assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    (session,) = portal.live_sessions()
    assert not session.virtual
    assert session.placement[0].node == pod["spec"]["nodeName"]
    second = portal.running("bo", profile="gpu1", team="devops")
    assert second["metadata"]["labels"]["makeway/session"] != session.id
    assert (pool(portal).used, pool(portal).free) == (2, 8), "the pods hold what the leases say, not twice as much"
    portal.api.delete(f"{PODS}/{pod['metadata']['name']}")
    wait_until(lambda: pool(portal).free == 9, "the GPU is free once pod and lease are gone")


def test_a_session_goes_where_the_pods_of_others_leave_room(portal: Notebooks) -> None:
    for taken, left in (NODES, NODES[::-1]):
        with full(portal.api, [taken]):
            wait_until(lambda: pool(portal).free == 5, "the service sees the pods of others")
            assert portal.running("ana", **GPU1)["spec"]["nodeName"] == left
            portal.stop_server("ana")
