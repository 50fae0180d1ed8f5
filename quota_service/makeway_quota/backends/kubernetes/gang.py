"""Describe what the workers of a gang share beside their pods: a Service and a network policy, which go with them."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import StartOrder
from .client import Object
from .manifest import MASTER_PORT, PodSettings, attempt_name, labels_of, owned

PATHS = {
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
"""Of the API server, for lists of the objects of an attempt, by kind."""


def path_of(manifest: Object, namespace: str) -> str:
    """Return the path of the list that an object belongs to."""
    return PATHS[manifest["kind"]].format(namespace)


def gang_objects(settings: PodSettings, order: StartOrder, pods: Sequence[Object]) -> list[Object]:
    """Return what the pods of an attempt share; nothing for one pod. It goes with the first of them."""
    if len(pods) < 2:
        return []
    return [made(settings, order, pods[:1]) for made in (service, network_policy)]


def service(settings: PodSettings, order: StartOrder, owners: Sequence[Object]) -> Object:
    """Return the headless Service by which the workers of a gang find each other, ready or not."""
    key = (order.workload, order.attempt)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owned(attempt_name(*key), labels_of(settings, key), owners),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels_of(settings, key),
            "ports": [{"name": "rendezvous", "port": MASTER_PORT}],
        },
    }


def network_policy(settings: PodSettings, order: StartOrder, owners: Sequence[Object]) -> Object:
    """Return the network policy by which the workers of a gang are reached by each other, and by no other job."""
    key = (order.workload, order.attempt)
    gang = {"podSelector": {"matchLabels": labels_of(settings, key)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owned(attempt_name(*key), labels_of(settings, key), owners),
        "spec": {**gang, "policyTypes": ["Ingress"], "ingress": [{"from": [gang]}]},
    }
