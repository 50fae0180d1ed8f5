"""Count what the pods of ended sessions hold as foreign, until their containers have ended.

A session holds by its lease what was planned for it. Its pod can outlive the lease: a notebook that saves, a node out
of reach, a lease that expired. What such a pod holds is not free, and Kubernetes places nothing else there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..backends.base import NodeSeen
from ..store.records import Workload


def with_ended(node: NodeSeen, rows: Mapping[str, Workload] | None) -> NodeSeen:
    """Return a node with what pods of sessions hold there without a lease as foreign; `rows` None: not known yet."""
    ended = () if rows is None else [pod for pod in node.sessions if not _placed(rows.get(pod.session), node.name)]
    if not ended:
        return node
    return replace(
        node,
        foreign_gpus=node.foreign_gpus + sum(pod.gpus for pod in ended),
        foreign_cpu=node.foreign_cpu + sum(pod.cpu for pod in ended),
        foreign_memory=node.foreign_memory + sum(pod.memory for pod in ended),
    )


def _placed(row: Workload | None, node: str) -> bool:
    return row is not None and any(place.node == node for place in row.placement)
