"""Distinguish nodes that are down from nodes that are out of reach together, and may go on with their jobs.

Called by the backend at each observation. A node is dead once it was not ready for long enough, without a break, while
the cluster could be read. Nothing is concluded where the way to it is the likelier fault: no node is ready, or all
nodes of its pool or zone, or most nodes of the cluster, went down at the same moment. Jobs there wait for the longer
time that is meant for a silent service, by which their launchers have ended them. The only node of its pool is dead
like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

NODE_LOST_AFTER = 300.0
"""Seconds for which a node is not ready until it is dead: Kubernetes evicts its pods after as long."""
LONGEST_STEP = 15.0
"""Seconds that may pass between two observations and still count as observed"""
TOGETHER = 90.0
"""Seconds between the moments at which two nodes went down that the same fault took: Kubernetes notices within 50"""
MANY = 3
"""Nodes that went down together, at least, for their number to say something about the cluster"""


@dataclass(frozen=True, slots=True)
class NodeReadiness:
    """Where a node is, and since when it is not ready (Unix seconds; None: it is, or that is not known)."""

    ready: bool
    pool: str = ""
    zone: str = ""
    down_since: float | None = None


class DeadNodes:
    """Since when nodes are not ready, on a clock that counts observed time only."""

    def __init__(self, after: float = NODE_LOST_AFTER, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.after = after
        self._monotonic = monotonic
        self._observed = 0.0
        self._looked_at = monotonic()
        self._since: dict[str, float] = {}

    def observe(self, nodes: Mapping[str, NodeReadiness], followed: bool) -> None:
        """Note which nodes of pools are ready; `followed`: whether what the cluster says is up to date.

        The time of a node that is cut off with others begins when it no longer is.
        """
        now = self._monotonic()
        passed, self._looked_at = now - self._looked_at, now
        if not followed:
            return
        self._observed += min(LONGEST_STEP, passed)
        down = [name for name, node in nodes.items() if not node.ready]
        alone = [name for name in down if not _is_cut_off(name, nodes)]
        self._since = {name: self._since.get(name, self._observed) for name in alone}

    def dead(self) -> frozenset[str]:
        """Return the nodes that are dead."""
        return frozenset(name for name, since in self._since.items() if self._observed - since >= self.after)


def _is_cut_off(name: str, nodes: Mapping[str, NodeReadiness]) -> bool:
    """Whether a node that is down seems to be out of reach together with others."""
    node, others = nodes[name], [other for key, other in nodes.items() if key != name]
    if not any(other.ready for other in others):
        return True
    together = sum(_fell_together(node, other) for other in others) + 1
    if together >= MANY and 2 * together > len(nodes):
        return True
    pool = [other for other in others if other.pool == node.pool]
    zone = [other for other in others if node.zone and other.zone == node.zone]
    return _fell_with_all(node, pool) or _fell_with_all(node, zone)


def _fell_with_all(node: NodeReadiness, others: Iterable[NodeReadiness]) -> bool:
    """Whether none of the others is ready, and one of them went down at the same moment as a node."""
    others = list(others)
    return not any(other.ready for other in others) and any(_fell_together(node, other) for other in others)


def _fell_together(node: NodeReadiness, other: NodeReadiness) -> bool:
    if other.ready:
        return False
    if node.down_since is None or other.down_since is None:
        return True
    return abs(node.down_since - other.down_since) <= TOGETHER
