"""Claims of the cluster get folders of this machine, and lose them when they are deleted."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from pods import PODS, phase, wait_until

from kube_cluster.api import Api, Object
from kube_cluster.cluster import Cluster
from kube_cluster.images import host_pod
from kube_cluster.provisioner import VOLUMES, name_of

pytestmark = pytest.mark.kube

CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"


@pytest.fixture(params=[None, "nfs"], ids=["no class", "some class"])
def claim(api: Api, real_node: object, request: pytest.FixtureRequest) -> Iterator[Object]:
    spec: Object = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    if request.param:
        spec["storageClassName"] = request.param
    yield api.create(CLAIMS, {"metadata": {"name": "data"}, "spec": spec})
    api.delete(CLAIMS)
    wait_until(lambda: not api.items(CLAIMS), "the claim is gone")


def test_a_claim_gets_a_folder_that_pods_write_and_that_goes_with_it(
    api: Api, claim: Object, control_plane: Cluster
) -> None:
    folder = control_plane.volumes / name_of(claim)
    pod = host_pod("writer", ["sh", "-c", "echo kept > /mnt/file"])
    pod["spec"]["securityContext"] = {"runAsUser": 1000}
    pod["spec"]["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": "data"}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "data", "mountPath": "/mnt"})
    api.create(PODS, pod)
    wait_until(lambda: phase(api, "writer") == "Succeeded", "the pod has written")
    assert (folder / "file").read_text() == "kept\n"
    api.delete(f"{PODS}/writer", gracePeriodSeconds="0")
    api.delete(f"{CLAIMS}/data")
    wait_until(lambda: not folder.exists(), "the folder is removed")
    wait_until(
        lambda: not api.items(VOLUMES, fieldSelector=f"metadata.name={name_of(claim)}"), "the volume is removed, too"
    )


def test_a_folder_that_cannot_be_made_is_made_later(
    api: Api, control_plane: Cluster, real_node: object, caplog: pytest.LogCaptureFixture
) -> None:
    volumes, away = control_plane.volumes, control_plane.volumes.with_name("away")
    volumes.rename(away)
    try:
        with caplog.at_level(logging.WARNING, "kube_cluster.provisioner"):
            spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
            made = api.create(CLAIMS, {"metadata": {"name": "later"}, "spec": spec})
            wait_until(lambda: "The claim later gets no volume yet" in caplog.text, "it is said")
    finally:
        away.rename(volumes)
    wait_until(lambda: (volumes / name_of(made)).is_dir(), "the folder is there")
    api.delete(f"{CLAIMS}/later")
    wait_until(lambda: not api.items(CLAIMS), "the claim is gone")
    wait_until(lambda: not (volumes / name_of(made)).exists(), "the folder is removed")
