"""Read the nodes of a Kubernetes cluster once and tabulate them as the service sees them, for `makeway-quota nodes`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

from makeway_api.quantities import count
from makeway_api.tables import Column, text_table

from ....engine.snapshot import GPU
from ....policy import Document
from ....wording.unassigned import unassigned_sentences
from ...base import BackendError, NodeStatus
from ..api.client import ApiClient
from ..api.connection import connection
from .inventory import KubernetesInventory
from .nodes import NodeSelector, Toleration, selectors, usual_tolerations
from .unassigned_slices import slice_sentences

SECONDS = 60.0
"""How long the first lists may take."""
CPU = 1000
"""Milli-cores of one CPU"""


def nodes_command(
    document: Document | None, resource: str, kubeconfig: Path | None, context: str, tolerations: Sequence[Toleration]
) -> str:
    """Return a table of a cluster's nodes; without a document all of them are in one pool of this resource."""
    chosen: Sequence[NodeSelector]
    if document is not None:
        chosen = selectors(document, tolerations)
    else:
        chosen = [NodeSelector("all", resource, {}, (*usual_tolerations(resource), *tolerations))]
    nodes, slices = asyncio.run(_read(chosen, kubeconfig, context))
    return "\n".join([table(nodes), *slices])


async def _read(
    chosen: Sequence[NodeSelector], kubeconfig: Path | None, context: str
) -> tuple[list[NodeStatus], list[str]]:
    """Return the nodes, and a sentence for each driver whose GPUs are in no node's resources."""
    client = ApiClient(connection(kubeconfig, context))
    inventory = KubernetesInventory(client, chosen)
    try:
        async with asyncio.timeout(SECONDS):
            await inventory.open()
        return sorted(inventory.node_statuses().values(), key=lambda node: node.name), await slice_sentences(
            client, inventory.dra_devices()
        )
    except TimeoutError:
        server = client.connection.server
        raise BackendError(f"The nodes of {server} cannot be read: {inventory.problem or 'no answer'}.") from None
    finally:
        await inventory.close()
        await client.close()


def table(nodes: Sequence[NodeStatus]) -> str:
    """Return one line for each node in each of its pools, one for each pool, and one for each resource of no pool."""
    parts = [part for node in nodes for part in node.by_pool()]
    pools = dict.fromkeys(part.pool for part in parts if part.pool)
    sums = [_sum(pool, [part for part in parts if part.pool == pool]) for pool in pools]
    return "\n".join(
        [text_table(COLUMNS, parts), "", *sums, *unassigned_sentences({node.name: node.unassigned for node in nodes})]
    )


def state(node: NodeStatus) -> str:
    """Return whether a node takes work, and if not, why not."""
    if not node.ready:
        return "not ready"
    if not node.pool:
        return "in no pool"
    if node.cordoned:
        return f"takes no work: {', '.join(node.taints) or 'cordoned'}"
    return "ready"


COLUMNS: Sequence[Column[NodeStatus, str]] = (
    Column("NODE", lambda node: node.name),
    Column("POOL", lambda node: node.pool or "-"),
    Column("GPUS", lambda node: str(len(node.devices))),
    Column("FOREIGN", lambda node: f"{node.foreign_gpus / GPU:g}"),
    Column("MODEL", lambda node: node.model or "-"),
    Column("CPU", lambda node: f"{node.cpu / CPU:g}"),
    Column("MEMORY", lambda node: f"{node.memory / 1024:.0f}Gi"),
    Column("STATE", state),
)


def _sum(pool: str, nodes: Iterable[NodeStatus]) -> str:
    usable = [node for node in nodes if node.ready and not node.cordoned]
    gpus = sum(len(node.devices) for node in usable)
    foreign = sum(node.foreign_gpus for node in usable) / GPU
    nodes_that = f"{count(len(usable), 'node')} that {'takes' if len(usable) == 1 else 'take'} work"
    return f"{pool}: {count(gpus, 'GPU')} on {nodes_that}; foreign pods hold {foreign:g}."
