"""Keep the packing of a pool (placement/packing.py) in step with the pool's nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from math import log

from ..index.capacity import NodeCapacity, emptied
from ..index.nodes import NodeState, PoolState
from ..request import Need, Shape
from .packing import Packing

_STEP = 1.125


class PackIndex:
    """The packing of one pool, brought up to date at each query."""

    def __init__(self, pool: PoolState) -> None:
        self.pool = pool
        self.mix = rounded(pool.mix)
        self.packing = Packing([emptied(node) for node in pool.nodes], self.mix)
        for node in pool.nodes:
            self.packing.see(node.position, _remaining(node))
        self.seen = len(pool.touched)
        self.mixed = pool.mixed

    def best(self, need: Need, among: Collection[int] | None = None) -> tuple[NodeState, int] | None:
        """Return the node for one worker that starts now (`among` these positions), and the device for a share."""
        self.catch_up()
        best = self.packing.best(need.shape, among)
        return None if best is None else (self.pool.nodes[best[0]], best[1])

    def renew(self, node: NodeState) -> bool:
        """Apply a node's new size; False if the packing has to be rebuilt."""
        return self.packing.renew(node.position, emptied(node))

    def insert(self, node: NodeState) -> bool:
        """Insert a node at its position; False if the packing has to be rebuilt."""
        return self.packing.insert(node.position, emptied(node))

    def remove(self, position: int) -> None:
        """Remove the node at a position, which has left the pool."""
        self.packing.remove(position)

    def catch_up(self) -> None:
        """Apply the nodes that were touched since the last query."""
        for position in set(self.pool.touched[self.seen :]):
            self.packing.see(position, _remaining(self.pool.nodes[position]))
        self.seen = len(self.pool.touched)
        if self.mixed != self.pool.mixed:
            self.mixed = self.pool.mixed
            mix = rounded(self.pool.mix)
            if mix != self.mix:
                self.mix = mix
                self.packing.learn(mix)


def rounded(mix: Mapping[Shape, int]) -> dict[Shape, int]:
    """Round the counts of a mix to steps of an eighth, so that a small change leaves the prices as they are."""
    return {shape: _step(count) for shape, count in mix.items() if count > 0}


@lru_cache(maxsize=10_000)
def _step(count: int) -> int:
    return round(_STEP ** round(log(count, _STEP)))


def _remaining(node: NodeState) -> NodeCapacity:
    cpu, memory = min(node.cpu_unused, node.cpu_free_later), min(node.memory_unused, node.memory_free_later)
    takes = node.usable and min(node.pods_unused, node.pods_free_later) > 0
    return NodeCapacity(node.free, max(0, cpu) if takes else -1, max(0, memory), node.node.model)
