"""Share the CPU, memory and pods of one machine among its nodes, each in another pool.

A host is a machine that is several nodes to the engine, one for each kind of device on it: whole GPUs and MIG slices,
say. Its nodes have the same `Node.host`; a machine with one kind of device is one node, and no host.

A node knows what is left of its host: what the others take, now and in the future, is subtracted there as it changes.
Called by `NodeState`, and as nodes come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..request import Need
from ..snapshot import GPU

if TYPE_CHECKING:
    from .nodes import NodeState

NOTHING_SHARED: tuple[int, ...] = (0,) * 6
"""CPU now and later, memory now and later, pods now and later."""


def share_with(node: NodeState, others: Iterable[NodeState]) -> None:
    """Share CPU, memory and pods of a node with other nodes of its host from now on."""
    for other in others:
        node.host_peers, other.host_peers = (*node.host_peers, other), (*other.host_peers, node)
        _count_pair(node, other, 1)
        subtract(node, other.own)
        subtract(other, node.own)


def stop_sharing(node: NodeState) -> None:
    """Return what a node takes to the other nodes of its host, with which it shares nothing any more."""
    for other in node.host_peers:
        other.host_peers = tuple([neighbour for neighbour in other.host_peers if neighbour is not node])
        _count_pair(node, other, -1)
        subtract(other, node.own, -1)
    node.host_peers = ()


def _count_pair(node: NodeState, other: NodeState, sign: int) -> None:
    """Count two nodes of one host among those that link their pools (-1: no more)."""
    for pool, beside in ((node.pool, other.pool), (other.pool, node.pool)):
        count = pool.peer_pools.get(beside.pool.name, 0) + sign
        pool.peer_pools[beside.pool.name] = count
        if not count:
            del pool.peer_pools[beside.pool.name]


class Shortage(NamedTuple):
    """Whether a node has too little CPU, memory and pods for the workers that its devices could take."""

    cpu: bool
    memory: bool
    pods: bool

    def is_held_by(self, need: Need) -> bool:
        """Whether a worker with this request holds some of that."""
        return self.pods or bool((self.cpu and need.cpu) or (self.memory and need.memory))


def shortage_on(node: NodeState, need: Need, returned: Sequence[Need] = ()) -> Shortage | None:
    """Return what a node lacks in the future for a request (with GPUs); None where it shares nothing or lacks nothing.

    What other nodes of its host give back is then of use. `returned`: the requests of workers on the host that count
    as if they were still there.
    """
    if not node.host_peers:
        return None
    devices = len(node.free_later)
    by_devices = devices // need.whole_devices if need.whole_devices else devices * (GPU // max(1, need.gpus))
    workers = min(need.min_workers, by_devices)
    cpu, memory, pods = node.cpu_free_later, node.memory_free_later, node.pods_free_later - len(returned)
    for other in returned:
        cpu, memory = cpu - other.cpu, memory - other.memory
    result = Shortage(cpu < workers * need.cpu, memory < workers * need.memory, pods < workers)
    return result if True in result else None


def take(node: NodeState, cpu: int, memory: int, pods: int, now: int, later: int, for_a_while: bool = False) -> None:
    """Count what a node takes on its host, `now` and `later` times (each -1, 0 or 1), as what the others have less."""
    taken = (now * cpu, later * cpu, now * memory, later * memory, now * pods, later * pods)
    node.own = tuple([before + more for before, more in zip(node.own, taken, strict=True)])
    for other in node.host_peers:
        subtract(other, taken, 1, for_a_while)


def give_back(node: NodeState) -> None:
    """Return all that a node takes to the others, as when it is emptied."""
    for other in node.host_peers:
        subtract(other, node.own, -1)
    node.own = NOTHING_SHARED


def subtract(node: NodeState, taken: Sequence[int], sign: int = 1, for_a_while: bool = False) -> None:
    """Subtract what another node of the host takes of CPU, memory and pods (-1: add it)."""
    node.pool.touch(node)
    if not for_a_while:
        node.pool.moved.append(node)
    cpu_unused, cpu_free_later, memory_unused, memory_free_later, pods_unused, pods_free_later = taken
    node.cpu_unused -= sign * cpu_unused
    node.cpu_free_later -= sign * cpu_free_later
    node.memory_unused -= sign * memory_unused
    node.memory_free_later -= sign * memory_free_later
    node.pods_unused -= sign * pods_unused
    node.pods_free_later -= sign * pods_free_later
