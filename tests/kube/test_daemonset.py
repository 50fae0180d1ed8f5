"""The device plugin's DaemonSet offers virtual GPUs on labelled nodes alone, from its image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pods import PODS, phase, wait_until

from kube_cluster import image_build
from kube_cluster.api import GPU, Api
from kube_cluster.cluster import Cluster
from kube_cluster.images import host_pod
from kube_cluster.node import Node
from kube_cluster.problems import NotHere

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

MANIFEST = Path(__file__).parents[2] / "helm" / "device-plugin.yaml"
DAEMON_SETS = "/apis/apps/v1/namespaces/kube-system/daemonsets"
LABEL = {"makeway.io/virtual-gpus": "true"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Return a cluster of its own with a real node that offers no GPU and has the image."""
    try:
        archives = image_build.build(["device-plugin"])
    except NotHere as reason:
        pytest.skip(str(reason))
    with Cluster.start() as result:
        try:
            result.add_node(gpus=0).import_image(archives["device-plugin"])
        except NotHere as reason:
            pytest.skip(str(reason))
        yield result


def gpus(api: Api, node: Node) -> str:
    """Return how many GPUs the node offers; "" where it knows of none."""
    return str(api.get(f"/api/v1/nodes/{node.name}")["status"]["allocatable"].get(GPU, ""))


def test_the_daemonset_offers_virtual_gpus_on_labelled_nodes(cluster: Cluster) -> None:
    api, (node,) = cluster.api, cluster.nodes
    api.create(DAEMON_SETS, yaml.safe_load(MANIFEST.read_text(encoding="utf-8")))
    seen = f"{DAEMON_SETS}/makeway-device-plugin"
    wait_until(lambda: api.get(seen)["status"].get("observedGeneration") == 1, "the controller has seen the DaemonSet")
    assert api.get(seen)["status"]["desiredNumberScheduled"] == 0
    assert gpus(api, node) == ""
    api.merge(f"/api/v1/nodes/{node.name}", {"metadata": {"labels": LABEL}})
    wait_until(lambda: gpus(api, node) == "8", "the node offers the GPUs")
    api.create(PODS, host_pod("one", ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], gpus=2))
    wait_until(lambda: phase(api, "one") == "Succeeded", "a pod has run with two of them")
    assert api.text(f"{PODS}/one/log") == "0,1\n"
    api.delete(seen)
    wait_until(lambda: gpus(api, node) == "0", "the GPUs are gone with the DaemonSet")
