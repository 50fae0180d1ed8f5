"""Share the CPU, memory and pods of one node among its parts, each in another pool.

A node knows what is left of its host: what the others take, now and in the future, is subtracted there as it changes.
Called by `NodeState`, and as nodes come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes import NodeState

NOTHING_SHARED: tuple[int, ...] = (0,) * 6
"""CPU now and later, memory now and later, pods now and later."""


def share_with(node: NodeState, others: Iterable[NodeState]) -> None:
    """Have a node share CPU, memory and pods with other nodes of its host, from now on."""
    for other in others:
        node.beside, other.beside = (*node.beside, other), (*other.beside, node)
        subtract(node, other.own)
        subtract(other, node.own)


def part_from(node: NodeState) -> None:
    """Return what a node takes to the other nodes of its host, and have it share nothing any more."""
    for other in node.beside:
        other.beside = tuple([each for each in other.beside if each is not node])
        subtract(other, node.own, -1)
    node.beside = ()


def take(node: NodeState, cpu: int, memory: int, pods: int, now: int, later: int, for_a_while: bool = False) -> None:
    """Count what a node takes on its host, `now` and `later` times (each -1, 0 or 1), as what the others have less."""
    taken = (now * cpu, later * cpu, now * memory, later * memory, now * pods, later * pods)
    node.own = tuple([before + more for before, more in zip(node.own, taken, strict=True)])
    for other in node.beside:
        subtract(other, taken, 1, for_a_while)


def give_back(node: NodeState) -> None:
    """Return all that a node takes to the others, as when it is emptied."""
    for other in node.beside:
        subtract(other, node.own, -1)
    node.own = NOTHING_SHARED


def subtract(node: NodeState, taken: Sequence[int], sign: int = 1, for_a_while: bool = False) -> None:
    """Subtract what another node of the host takes of CPU, memory and pods (-1: add it)."""
    node.pool.touch(node)
    if not for_a_while:
        node.pool.moved.append(node)
    cpu_open, cpu_future, memory_open, memory_future, pods_open, pods_future = taken
    node.cpu_open -= sign * cpu_open
    node.cpu_future -= sign * cpu_future
    node.memory_open -= sign * memory_open
    node.memory_future -= sign * memory_future
    node.pods_open -= sign * pods_open
    node.pods_future -= sign * pods_future
