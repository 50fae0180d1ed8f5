"""Build the pod manifests of an attempt from the policy in force and the cluster's nodes.

Called by the backend, which creates them. No requests to the API server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ....engine.snapshot import GPU
from ....policy import Document
from ....policy.pod_template import claim_templates_of
from ....values import Place
from ...base import BackendError, BackendUnavailable, NodeStatus, StartOrder
from ..api.client import Object
from ..api.quantities import MIB
from ..cluster.inventory import KubernetesInventory
from ..cluster.nodes import NodeSelector, Toleration, selectors
from .disk import RESOURCE
from .manifest import PodSettings, WorkerResources, worker_pod


class WorkerPods:
    """The manifests of pods, and the nodes in the pools of the document."""

    def __init__(
        self,
        settings: PodSettings,
        inventory: KubernetesInventory,
        tolerations: Sequence[Toleration],
        path: Callable[[str, int, int], str],
    ) -> None:
        """`path` is that of a worker, by job, attempt and number, below the service's address."""
        self._settings = settings
        self._inventory = inventory
        self._tolerations = tuple(tolerations)
        self._path = path
        self._read: Callable[[], Document] | None = None
        self._selected: Document | None = None
        self._selectors: tuple[NodeSelector, ...] = ()

    def follow(self, document: Callable[[], Document]) -> None:
        """Use the document that this returns, from now on and whenever it has changed."""
        self._read = document

    @property
    def document(self) -> Document | None:
        """The document in force; None before there is one."""
        return self._read() if self._read is not None else None

    def nodes(self) -> Mapping[str, NodeStatus]:
        """Return the nodes by name, in the pools of the document; none before there is one."""
        document = self.document
        if document is None:
            return {}
        if document is not self._selected:
            self._selected = document
            self._selectors = selectors(document, self._tolerations)
            self._inventory.select(self._selectors)
        return self._inventory.node_statuses()

    def manifests(
        self, order: StartOrder, tokens: str, annotations: Callable[[str], Mapping[str, str]] = lambda node: {}
    ) -> list[Object]:
        """Return the pods of an attempt, one for each worker; BackendError where their GPUs cannot be requested.

        `annotations`: by node, those by which a pod uses what the cluster's autoscaler provisioned for it.
        """
        marks = [annotations(place.node) for place in order.workers]
        return [self._pod(order, number, tokens, marks[number]) for number in range(len(order.workers))]

    def _pod(self, order: StartOrder, number: int, tokens: str, annotations: Mapping[str, str]) -> Object:
        document = self.document
        if document is None:
            raise BackendUnavailable("the policy document has not been read yet")
        place = order.workers[number]
        selector = self._selector(document, order, place)
        if any(milli % GPU for milli in place.milli):
            resource = selector.resource if selector else "its pool's resource"
            raise BackendError(f"Its profile needs a part of a GPU, and {resource} can only be requested as a whole.")
        facts = document.profile_facts.get(order.profile)
        given = WorkerResources(
            resource=selector.resource if selector else "",
            devices=len(place.devices),
            tolerations=selector.tolerations if selector else self._tolerations,
            template=facts.pod if facts else {},
            disk=facts.disk if facts else 0,
            node_disk=self._inventory.allocatable(place.node, RESOURCE) // MIB,
            annotations=annotations,
        )
        path = self._path(order.workload, order.attempt, number)
        return worker_pod(self._settings, order, number, path, tokens, given)

    def claims(self, order: StartOrder) -> Iterator[tuple[Mapping[str, Any], int, str]]:
        """Return the pod template, the GPUs and the resource of each kind of pod that gets its GPUs by claims."""
        document = self.document
        facts = document.profile_facts.get(order.profile) if document is not None else None
        if document is None or facts is None or not claim_templates_of(facts.pod):
            return
        chosen = ((len(place.devices), self._selector(document, order, place)) for place in order.workers)
        kinds = dict.fromkeys((gpus, one.resource) for gpus, one in chosen if gpus and one is not None)
        yield from ((facts.pod, gpus, resource) for gpus, resource in kinds)

    def _selector(self, document: Document, order: StartOrder, place: Place) -> NodeSelector | None:
        """Return the selector of the pool whose GPUs a worker holds."""
        profile = document.profile(order.profile)
        node = self._inventory.node_statuses().get(place.node)
        served = list(profile.pools if profile else ())
        pools = served if node is None else pools_there(node, place, served)
        known = {one.pool: one for one in self._selected_by(document)}
        return next((known[pool] for pool in pools if pool in known), None)

    def _selected_by(self, document: Document) -> tuple[NodeSelector, ...]:
        return self._selectors if document is self._selected else selectors(document, self._tolerations)


def pools_there(node: NodeStatus, place: Place, served: Sequence[str]) -> list[str]:
    """Return the pools of a node whose GPUs a worker may hold: that of its devices, else those of its profile first."""
    if not node.parts:
        return [node.pool]
    held = [part.pool for part in node.parts if not set(part.devices).isdisjoint(place.devices)]
    there = [part.pool for part in node.parts]
    return held or [pool for pool in served if pool in there] or list(served) or there
