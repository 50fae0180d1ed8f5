"""One portal for all tests of this folder, installed by an administrator of its two namespaces, which have limits.

Every container in them needs requests and limits of everything, with a minimum. What only an administrator of the
cluster may make, that one makes first, as docs/how-to/on-your-cluster.md says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from charts import JOBS, NAMESPACE, Object
from kube.imitated_site import merged
from pods import wait_until
from portals import PODS, STARTED, VALUES, WORKERS, Portal
from releases import CLUSTER_WIDE, installation, namespaces
from walk import Walk, blocks, file_of, section

from kube_cluster.api import Api
from kube_cluster.cluster import Cluster
from kube_cluster.portal import wait_until_ready

NORA = "nora"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings"
MINIMUM = {"cpu": "50m", "memory": "32Mi", "ephemeral-storage": "1Mi"}
LIMITS = {
    "type": "Container",
    "min": MINIMUM,
    "defaultRequest": {"cpu": "50m", "memory": "64Mi", "ephemeral-storage": "10Mi"},
    "default": {"cpu": "500m", "memory": "256Mi", "ephemeral-storage": "1Gi"},
}
QUOTA = {
    **{f"{which}.cpu": "20" for which in ("requests", "limits")},
    **{f"{which}.memory": "40Gi" for which in ("requests", "limits")},
    **{f"{which}.ephemeral-storage": "900Gi" for which in ("requests", "limits")},
    "requests.nvidia.com/gpu": "8",
    "requests.storage": "900Gi",
}
OF_TWO, WITH_LIMITS = "As an administrator of two namespaces", "In namespaces with quotas and LimitRanges"
CPU = 0.3
"""What the profile requests here: as a limit, a tenth of a processor makes a program start for many seconds."""


def values_of(*titles: str) -> Object:
    """Return the values of the page with those of these sections."""
    result: Object = VALUES
    for title in titles:
        result = merged(result, yaml.safe_load(blocks(section(title), "yaml")[0]))
    return result


def bound(api: Api, namespace: str) -> None:
    """Make Nora an administrator of a namespace, and limit what is in it."""
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": NORA}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"}
    api.create(RBAC.format(namespace), {"metadata": {"name": "nora"}, "roleRef": role, "subjects": [subject]})
    path = f"/api/v1/namespaces/{namespace}"
    api.create(f"{path}/limitranges", {"metadata": {"name": "site"}, "spec": {"limits": [LIMITS]}})
    api.create(f"{path}/resourcequotas", {"metadata": {"name": "site"}, "spec": {"hard": QUOTA}})
    restricted = {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    api.merge(path, {"metadata": restricted})


@pytest.fixture(scope="package")
def administrator(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Return the terminal of the cluster's administrator."""
    return Walk(control_plane, tmp_path_factory.mktemp("administrator"))


@pytest.fixture(scope="package")
def portal(
    control_plane: Cluster, images: dict[str, Path], administrator: Walk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Portal]:
    """Return the portal, once all its pods are ready."""
    folder, api = tmp_path_factory.mktemp("helm"), control_plane.api
    nora = Walk(control_plane, folder, control_plane.kubeconfig_of(NORA))
    policy = yaml.safe_load(file_of(5, "policy.yaml"))
    policy["profiles"][1]["cpu"] = CPU
    administrator.step(3)
    with installation(control_plane, folder, make_namespace=False) as release:
        try:
            administrator.run(blocks(section(OF_TWO), "sh")[0])
            for namespace in (NAMESPACE, JOBS):
                bound(api, namespace)
            nora.write_values(values_of(OF_TWO, WITH_LIMITS))
            (nora.folder / "policy.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
            nora.step(7)
            wait_until_ready(control_plane)
            portal = Portal(control_plane, release, nora)
            wait_until(portal.answers, "the Hub and the service answer through the proxy", STARTED, pause=0.5)
            yield portal
            portal.close()
        finally:
            for kind in ("clusterrolebindings", "clusterroles"):
                api.delete(f"{CLUSTER_WIDE.format(kind)}/makeway-makeway-inventory")
            for pods in (WORKERS, PODS):
                if pods.split("/")[4] in namespaces(api):
                    api.delete(pods, gracePeriodSeconds="0")
