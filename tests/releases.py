"""The chart as Helm installs it on the cluster of the tests."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from charts import CHART, JOBS, NAMESPACE, RELEASE, Object, written
from pods import wait_until

from kube_cluster.api import Api
from kube_cluster.cluster import Cluster
from kube_cluster.control_plane import AUDIT_LOG
from kube_cluster.helm import Helm

MONITOR = "servicemonitors.monitoring.coreos.com"
MONITORS: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": MONITOR},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {"kind": "ServiceMonitor", "plural": "servicemonitors", "singular": "servicemonitor"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
SERVICES = "/api/v1/namespaces/{}/services"
SECRETS = "/api/v1/namespaces/{}/secrets"
BUDGETS = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles"
KINDS = (
    DEPLOYMENTS,
    "/apis/apps/v1/namespaces/{}/daemonsets",
    SERVICES,
    SECRETS,
    BUDGETS,
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "/apis/networking.k8s.io/v1/namespaces/{}/ingresses",
    ROLES,
    "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/serviceaccounts",
)
"""The lists of what the chart makes in a namespace, each with a place for its name; an uninstallation empties them."""
CLUSTER_WIDE = "/apis/rbac.authorization.k8s.io/v1/{}"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
CLAIMS = "/api/v1/namespaces/{}/persistentvolumeclaims"


class Installation:
    """A release on the cluster of the tests; Helm keeps its files in `folder`."""

    def __init__(self, helm: Helm, folder: Path, api: Api, name: str = RELEASE, namespace: str = NAMESPACE) -> None:
        self.helm, self.folder, self.api, self.name, self.namespace = helm, folder, api, name, namespace

    @property
    def prefix(self) -> str:
        """How the names of its objects begin."""
        return self.name if RELEASE in self.name else f"{self.name}-{RELEASE}"

    def run(self, verb: str, *arguments: str | Path, values: Object | None = None) -> str:
        """Run a command of Helm on the release and return what it printed; KubeProblem when it fails."""
        files = ("--values", written(self.folder, values)) if values is not None else ()
        chart = (CHART,) if verb in ("install", "upgrade") else ()
        return self.helm.run(verb, self.name, *chart, "--namespace", self.namespace, *arguments, *files)

    def names(self, path: str, namespace: str = "") -> set[str]:
        """Return the names in a list, such as DEPLOYMENTS, of what the chart made."""
        result = self.api.items(
            path.format(namespace or self.namespace), labelSelector="app.kubernetes.io/managed-by=Helm"
        )
        return {one["metadata"]["name"] for one in result}

    def generations(self) -> dict[str, dict[str, int | None]]:
        """Return how often each object of the namespace was changed; Secrets do not tell it, and are left out."""
        return {
            path: {
                one["metadata"]["name"]: one["metadata"].get("generation")
                for one in self.api.items(path.format(self.namespace))
            }
            for path in KINDS
            if path != SECRETS
        }

    def secret(self) -> dict[str, str]:
        """Return the generated Secret, decoded."""
        data = self.api.get(f"{SECRETS.format(self.namespace)}/{self.prefix}")["data"]
        return {name: base64.b64decode(value).decode() for name, value in data.items()}


@contextmanager
def installation(cluster: Cluster, folder: Path, *, make_namespace: bool = True) -> Iterator[Installation]:
    """Yield a release that is not installed, in a namespace of restricted pods; afterwards all of it is gone."""
    api = cluster.api
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    if make_namespace:
        api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": labels}})
    try:
        yield Installation(Helm(folder, cluster.kubeconfig), folder, api)
    finally:
        for name in {NAMESPACE, JOBS} & namespaces(api):
            api.delete(f"/api/v1/namespaces/{name}")
        wait_until(lambda: not {NAMESPACE, JOBS} & namespaces(api), "the namespaces are gone")
        for path in (CLUSTER_WIDE.format("clusterroles"), CLUSTER_WIDE.format("clusterrolebindings"), PRIORITIES):
            for one in api.items(path, labelSelector="app.kubernetes.io/managed-by=Helm"):
                api.delete(f"{path}/{one['metadata']['name']}")


def namespaces(api: Api) -> set[str]:
    """Return the names of the cluster's namespaces."""
    return {one["metadata"]["name"] for one in api.items("/api/v1/namespaces")}


def left_in(api: Api, *spaces: str) -> set[tuple[str, str]]:
    """Return kind and name of all that is in namespaces, but for events and what Kubernetes puts into each."""
    versions = ["/api/v1", *(f"/apis/{one['preferredVersion']['groupVersion']}" for one in api.get("/apis")["groups"])]
    result = {
        (kind["name"], one["metadata"]["name"])
        for version in versions
        for kind in api.get(version)["resources"]
        if kind["namespaced"] and "list" in kind["verbs"] and kind["name"] != "events"
        for space in spaces
        for one in api.items(f"{version}/namespaces/{space}/{kind['name']}")
    }
    return result - {("configmaps", "kube-root-ca.crt"), ("serviceaccounts", "default")}


@contextmanager
def requests(cluster: Cluster, account: str, namespace: str = NAMESPACE) -> Iterator[list[Object]]:
    """Yield a list that, after the block, has what an account of the chart asked of the API server meanwhile."""
    log, result = cluster.folder.logs / AUDIT_LOG, list[Object]()
    begin = log.stat().st_size
    yield result
    with log.open(encoding="utf-8") as lines:
        lines.seek(begin)
        result += [one for one in map(json.loads, lines) if one["user"]["username"] == account_name(account, namespace)]


def account_name(account: str, namespace: str = NAMESPACE) -> str:
    """Return the name of an account of the chart as a user of the API server."""
    return f"system:serviceaccount:{namespace}:{account}"


def rights_used(asked: list[Object]) -> set[tuple[str, str, str]]:
    """Return verb, resource and namespace of requests; no namespace for those of the whole cluster."""
    objects = [(one["verb"], one["objectRef"]) for one in asked if "resource" in one.get("objectRef", {})]
    return {(verb, of["resource"], of.get("namespace", "")) for verb, of in objects}


def safe_pod(name: str, **labels: str) -> Object:
    """Return a pod that the restricted standard allows."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "worker", "image": "example.com/torch:2.9", "securityContext": security}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}}
