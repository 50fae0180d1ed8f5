"""Pods and rights for tests with a spawner of their own process against the real API server."""

from __future__ import annotations

from typing import Any

from pods import simulated_pod

NAMESPACED = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
VERBS = ["get", "list", "watch", "create"]


BINDING = {
    "metadata": {"name": "hub"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "hub"},
    "subjects": [{"kind": "ServiceAccount", "name": "hub", "namespace": "default"}],
}


def notebook(**annotations: str) -> dict[str, Any]:
    """Return ana's pod as the Hub's watch finds it."""
    pod = simulated_pod("jupyter-ana", **annotations)
    pod["metadata"]["labels"] = {"component": "singleuser-server"}
    return pod
