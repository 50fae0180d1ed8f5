"""Find what work that is never evicted may take beside free guaranteed GPUs (rule 2).

Non-preemptible work without GPUs, as a session on CPUs, never makes way. So it leaves free guaranteed GPUs the CPU,
memory and pods that the pool's smallest profile needs beside them. Called by placement/fit.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..index.devices import hosts
from ..index.nodes import NodeState, PoolState, WorkerPlacement
from ..request import Need
from ..snapshot import GPU


class Spare:
    """What one request may take of a pool, now or in the future; valid until the next decision.

    Where nodes share CPU, memory and pods with nodes of other pools, the guaranteed GPUs of those keep theirs, too.
    """

    def __init__(self, pool: PoolState, need: Need, in_future: bool) -> None:
        self.pool, self.need = pool, need
        self.times = (True,) if in_future else (False, True)
        """Whether it is looked at in the future, for each time at which GPUs must be left useful."""
        self._budgets: dict[tuple[str, bool], int] = {}

    def admits(self, parts: Iterable[WorkerPlacement]) -> bool:
        """Whether the guaranteed GPUs of the pool, and of those beside it, keep what they need beside these workers."""
        many: dict[int, int] = {}
        for part in parts:
            many[part.node.position] = many.get(part.node.position, 0) + 1
        counts = [(self.pool.nodes[at], count) for at, count in many.items()]
        for in_future in self.times:
            losses: dict[PoolState, int] = {}
            for node, count in counts:
                for host_node in node.host:
                    losses[host_node.pool] = losses.get(host_node.pool, 0) + self._loss(host_node, count, in_future)
            if not all(self._has(pool, loss, in_future) for pool, loss in losses.items()):
                return False
        return True

    def workers(self, node: NodeState, limit: int) -> int:
        """Return how many of at most so many workers a node may host; of a gang, without any loss of useful GPUs."""
        for many in range(min(limit, self.need.min_workers), 0, -1):
            losses = [(other.pool, self._loss(other, many, at), at) for other in node.host for at in self.times]
            if all(not loss or (self.need.min_workers == 1 and self._has(pool, loss, at)) for pool, loss, at in losses):
                return many
        return 0

    def _has(self, pool: PoolState, loss: int, in_future: bool) -> bool:
        """Whether a pool can lose the use of so many milli-GPUs."""
        known = pool.pool.name, in_future
        if loss and known not in self._budgets:
            self._budgets[known] = 0 if pool.guaranteed() >= pool.total else surplus(pool, in_future)
        return not loss or loss <= self._budgets[known]

    def _loss(self, node: NodeState, many: int, in_future: bool) -> int:
        return useful(node, in_future) - useful(node, in_future, many, self.need)


_NOTHING = Need(0, 1, 1, 0, 0)


def surplus(pool: PoolState, in_future: bool) -> int:
    """Return how many useful free milli-GPUs a pool has beyond those that are guaranteed; negative: it lacks some."""
    return sum(useful(node, in_future) for node in pool.nodes) - pool.guaranteed()


def useful(node: NodeState, in_future: bool, many: int = 0, need: Need = _NOTHING) -> int:
    """Return the free milli-GPUs that the pool's smallest profile could use on a node, beside so many workers more."""
    smallest = node.pool.smallest(node.node.model) if node.usable else None
    if smallest is None:
        return 0
    devices, cpu, memory, pods = _without_holds(node)
    if not in_future:
        cpu, memory, pods = min(cpu, node.cpu_unused), min(memory, node.memory_unused), min(pods, node.pods_unused)
        devices = [max(0, min(pair)) for pair in zip(devices, node.unused, strict=True)]
    cpu, memory, pods = cpu - many * need.cpu, memory - many * need.memory, pods - many
    return smallest.gpus * hosts(smallest, devices, devices.count(GPU), cpu, memory, pods)


def _without_holds(node: NodeState) -> tuple[list[int], int, int, int]:
    """Return the future devices, CPU, memory and pods of a node; what is only held, for a while, is free."""
    devices, cpu, memory = list(node.free_later), node.cpu_free_later, node.memory_free_later
    for host_node in node.host:
        for part, need in host_node.pool.held:
            if part.node is host_node:
                cpu, memory = cpu + need.cpu, memory + need.memory
                for at in part.devices if host_node is node else ():
                    devices[at] += part.milli_per_device
    return devices, cpu, memory, node.pods_free_later
