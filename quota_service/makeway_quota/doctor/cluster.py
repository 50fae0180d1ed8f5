"""What the checks of a cluster share: the API server, the settings, the policy, and answers that may be forbidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..backends.kubernetes.api.client import ApiClient, ApiStatusError, Object
from ..backends.kubernetes.cluster.nodes import ClusterNode, NodeSelector, project_node, selectors, toleration
from ..backends.kubernetes.settings import KubernetesSettings
from ..policy import Document

UNKNOWN = (401, 403, 404)
"""Answers after which a check knows nothing: the account need not have the right to look"""


@dataclass(slots=True)
class ClusterAccess:
    """One cluster as the account of the service, or of the Hub (`hub`), sees it."""

    client: ApiClient
    settings: KubernetesSettings
    document: Document | None
    """None where there is no policy yet"""
    clock: Callable[[], float]
    as_hub: bool = False
    """Whether the account is the Hub's, which creates notebooks, and not the service's"""
    asks_for_nodes: bool = False
    """Whether a deployment asks for nodes by ProvisioningRequests"""
    unread: set[str] = field(default_factory=set)
    """The resources that the account may not read, for which checks are left out"""
    _nodes: list[ClusterNode] | None = field(default=None)

    @property
    def jobs_namespace(self) -> str:
        """The namespace of the pods of jobs."""
        return self.settings.namespace or self.client.connection.namespace

    @property
    def work_namespace(self) -> str:
        """The namespace of the pods that the account creates: notebooks for the Hub, else jobs."""
        return self.client.connection.namespace if self.as_hub else self.jobs_namespace

    @property
    def selectors(self) -> tuple[NodeSelector, ...]:
        """The pools of the policy, as they select nodes."""
        given = [toleration(text) for text in self.settings.tolerations]
        return selectors(self.document, given) if self.document is not None else ()

    async def nodes(self) -> list[ClusterNode]:
        """Return the nodes, sorted by name; what was read once is kept."""
        if self._nodes is None:
            answer = await self.client.get("/api/v1/nodes")
            self._nodes = sorted((project_node(item) for item in answer.get("items") or ()), key=lambda item: item.name)
        return self._nodes

    async def list_objects(self, path: str) -> list[Object] | None:
        """Return the objects of a list; None where the account may not look."""
        try:
            return list((await self.client.get(path)).get("items") or ())
        except ApiStatusError as refusal:
            self._unknown(path, refusal)
            return None

    async def existing(self, path: str) -> Object | bool | None:
        """Return an object, False where it does not exist, None where the account may not look."""
        try:
            return await self.client.get(path)
        except ApiStatusError as refusal:
            if refusal.status == 404:
                return False
            self._unknown(path, refusal)
            return None

    def _unknown(self, path: str, refusal: ApiStatusError) -> None:
        """Note what the account may not read; raise any other refusal."""
        if refusal.status not in UNKNOWN:
            raise refusal
        if refusal.status != 404:
            self.unread.add(_resource(path))


def _resource(path: str) -> str:
    """Return the resource that a path of the API names: `/api/v1/namespaces/jobs/secrets/x` is of `secrets`."""
    parts = path.strip("/").split("/")
    if "namespaces" in parts[:-2]:
        return parts[parts.index("namespaces") + 2]
    return parts[2 if parts[0] == "api" else 3]
