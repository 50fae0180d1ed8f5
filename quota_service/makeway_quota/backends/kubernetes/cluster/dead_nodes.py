"""Distinguish nodes that are down from nodes that are out of reach together, and may go on with their jobs.

Called by the backend at each observation. A node is dead once it was not ready for long enough, without a break, while
the cluster could be read. Nothing is concluded where the way to it is the likelier fault: no node is ready, or all
nodes of its zone or of one of its pools, or most nodes of the cluster, went down at the same moment. Jobs there wait
for the longer time that is meant for a silent service, by which their launchers have ended them. The only node of its
pool is dead like any other.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

NODE_LOST_AFTER = 300.0
"""Seconds for which a node is not ready until it is dead: Kubernetes evicts its pods after as long."""
MAX_STEP = 15.0
"""Seconds that may pass between two observations and still count as observed"""
SAME_FAULT_WITHIN = 90.0
"""Seconds between the moments at which two nodes went down that the same fault took: Kubernetes notices within 50"""
MIN_DOWN_TOGETHER = 3
"""Nodes that went down together, at least, for their number to say something about the cluster"""


@dataclass(frozen=True, slots=True)
class NodeReadiness:
    """The pools and zone of a node, and since when it is not ready (Unix seconds; None: it is, or not known)."""

    ready: bool
    pools: tuple[str, ...] = ()
    zone: str = ""
    down_since: float | None = None


class DeadNodes:
    """Since when nodes are not ready, on a clock that counts observed time only."""

    def __init__(self, after: float = NODE_LOST_AFTER, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.after = after
        self._monotonic = monotonic
        self._observed = 0.0
        self._observed_at = monotonic()
        self._since: dict[str, float] = {}

    def observe(self, nodes: Mapping[str, NodeReadiness], up_to_date: bool) -> None:
        """Note which nodes of pools are ready; `up_to_date`: whether the cluster could be read.

        The time of a node that is cut off with others begins when it no longer is.
        """
        now = self._monotonic()
        elapsed, self._observed_at = now - self._observed_at, now
        if not up_to_date:
            return
        self._observed += min(MAX_STEP, elapsed)
        cluster = _Cluster(nodes)
        alone = [name for name, node in nodes.items() if not node.ready and not cluster.is_cut_off(node)]
        self._since = {name: self._since.get(name, self._observed) for name in alone}

    def dead(self) -> frozenset[str]:
        """Return the nodes that are dead."""
        return frozenset(name for name, since in self._since.items() if self._observed - since >= self.after)


class _Group:
    """Some nodes: how many are ready, and when the others went down."""

    def __init__(self) -> None:
        self.ready = 0
        self._moments: list[float] = []
        self._unknown = 0

    def add(self, node: NodeReadiness) -> None:
        """Count a node."""
        if node.ready:
            self.ready += 1
        elif node.down_since is None:
            self._unknown += 1
        else:
            self._moments.append(node.down_since)

    def sort(self) -> None:
        """Sort the moments, once all nodes are counted; before that `went_down_with` is wrong."""
        self._moments.sort()

    def went_down_with(self, node: NodeReadiness) -> int:
        """Return how many nodes went down with one that is in the group, itself counted."""
        if node.down_since is None:
            return len(self._moments) + self._unknown
        first = bisect_left(self._moments, node.down_since - SAME_FAULT_WITHIN)
        return bisect_right(self._moments, node.down_since + SAME_FAULT_WITHIN) - first + self._unknown

    def is_down_as_a_whole(self, node: NodeReadiness) -> bool:
        """Whether none is ready, and at least one other went down at the same moment as this one."""
        return not self.ready and self.went_down_with(node) > 1


class _Cluster:
    """The nodes of the pools as they are at one moment, by pool and by zone."""

    def __init__(self, nodes: Mapping[str, NodeReadiness]) -> None:
        self._size = len(nodes)
        self._all = _Group()
        self._pools: defaultdict[str, _Group] = defaultdict(_Group)
        self._zones: defaultdict[str, _Group] = defaultdict(_Group)
        for node in nodes.values():
            for group in (self._all, *(self._pools[pool] for pool in node.pools), self._zones[node.zone]):
                group.add(node)
        for group in (self._all, *self._pools.values(), *self._zones.values()):
            group.sort()

    def is_cut_off(self, node: NodeReadiness) -> bool:
        """Whether a node that is down seems to be out of reach together with others."""
        if not self._all.ready:
            return True
        together = self._all.went_down_with(node)
        if together >= MIN_DOWN_TOGETHER and 2 * together > self._size:
            return True
        in_zone = bool(node.zone) and self._zones[node.zone].is_down_as_a_whole(node)
        return in_zone or any(self._pools[pool].is_down_as_a_whole(node) for pool in node.pools)
