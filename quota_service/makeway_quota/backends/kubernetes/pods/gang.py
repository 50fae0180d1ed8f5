"""Describe what the workers of a gang share beside their pods: a Service and a network policy, which go with them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence

from ...base import StartOrder
from ..api.client import ApiStatusError, Object
from .manifest import MASTER_PORT, PodSettings, attempt_name, labels_of, owned

log = logging.getLogger("makeway.kubernetes")

Create = Callable[[Object], Awaitable[Object]]

UNAUTHORIZED = re.compile(r'User "[^"]*" cannot create')
"""The API server's words where the rights of an account do not allow a request; admission refuses in others."""

PATHS = {
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
"""Of the API server, for lists of the objects of an attempt, by kind."""


def path_of(manifest: Object, namespace: str) -> str:
    """Return the path of the list that an object belongs to."""
    return PATHS[manifest["kind"]].format(namespace)


async def create_shared(
    create: Create, settings: PodSettings, order: StartOrder, pods: Sequence[Object], room: asyncio.Semaphore
) -> None:
    """Create what the pods of an attempt share, which goes with the last of them; nothing for one pod.

    `room` is for the objects that are created at the same time. An account that may not create network policies runs
    gangs all the same, with a warning.
    """
    if len(pods) < 2:
        return
    async with room:
        await create(service(settings, order, pods))
        try:
            await create(network_policy(settings, order, pods))
        except ApiStatusError as refusal:
            if not UNAUTHORIZED.search(refusal.message):
                raise
            log.warning("The gang %s gets no network policy: %s", attempt_name(order.workload, order.attempt), refusal)


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
