"""Count what the pods of ended workloads hold as foreign, until their containers have ended.

A workload holds what was planned for it. Its pod can outlive that: a notebook that saves, a lease that expired, a node
out of reach, a process that cannot be killed. What such a pod holds is not free: Kubernetes places nothing else there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..backends.base import NodeSeen, WorkloadPod
from ..store.records import Workload


def with_ended(node: NodeSeen, rows: Mapping[str, Workload] | None) -> NodeSeen:
    """Return a node with what pods of ours hold there without their workload as foreign; `rows` None: not known yet."""
    ended = () if rows is None else [pod for pod in node.pods if not _placed(pod, rows.get(pod.workload), node.name)]
    if not ended:
        return node
    return replace(
        node,
        foreign_gpus=node.foreign_gpus + sum(pod.gpus for pod in ended),
        foreign_cpu=node.foreign_cpu + sum(pod.cpu for pod in ended),
        foreign_memory=node.foreign_memory + sum(pod.memory for pod in ended),
    )


def _placed(pod: WorkloadPod, row: Workload | None, node: str) -> bool:
    if row is None or pod.attempt not in (None, row.attempt):
        return False
    return any(place.node == node for place in row.placement)
