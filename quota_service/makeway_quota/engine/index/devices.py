"""The devices of one node: which there are, how many workers fit on what is left of them, and which of them they get.

What is left is a list of milli-GPUs by position; nothing here knows what holds the rest (nodes.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Need
from ..snapshot import GPU, Node, Placed

UNLIMITED = 1 << 60
"""The CPU, memory or pods of a node that does not limit them."""


def hosts(need: Need, devices: Sequence[int], whole: int, cpu: int, memory: int, pods: int = UNLIMITED) -> int:
    """Return how many workers fit on devices with these milli-GPUs `left` (`whole` of them untouched)."""
    if need.gpus >= GPU:
        count = whole // need.whole_devices
    elif need.gpus:
        count = sum(free // need.gpus for free in devices if free > 0)
    else:
        count = UNLIMITED
    if need.cpu and count * need.cpu > cpu:
        count = cpu // need.cpu
    if need.memory and count * need.memory > memory:
        count = memory // need.memory
    if count > pods:
        count = pods
    return count if count > 0 else 0


def devices_of(node: Node) -> Sequence[int]:
    """List the device indices of a node."""
    return node.devices or range(node.first_device, node.first_device + node.gpus)


def finds_devices(node: Node, placed: Placed, gpus: int) -> bool:
    """Whether the devices of a worker with so many milli-GPUs are known on its node.

    Where a node only counts its devices, as a device plugin does, an index that it no longer shows means nothing: the
    worker holds one of those that are left.
    """
    if not gpus:
        return True
    if not placed.devices or node.devices:
        return bool(placed.devices)
    first, end = node.first_device, node.first_device + node.gpus
    return not [index for index in placed.devices if not first <= index < end]


def pick(need: Need, remaining: list[int], avoid: Sequence[int] | None = None) -> tuple[tuple[int, ...], int]:
    """Return devices and milli-GPUs for one worker from what is `remaining` on a node, and subtract them there.

    A share goes to the device that it fills best. Whole devices: lowest position first, those with less in
    `avoid` (what is free already) before others, so that a nomination waits for terminating GPUs, not on idle ones.
    """
    if not need.gpus:
        return (), GPU
    if need.gpus < GPU:
        best = min((at for at, free in enumerate(remaining) if free >= need.gpus), key=lambda at: (remaining[at], at))
        remaining[best] -= need.gpus
        return (best,), need.gpus
    able = [at for at, free in enumerate(remaining) if free == GPU]
    if avoid is not None:
        able.sort(key=lambda at: (avoid[at], at))
    chosen = tuple(sorted(able[: need.whole_devices]))
    for at in chosen:
        remaining[at] = 0
    return chosen, GPU


def stand_in(node: Node, placed: Placed, need: Need, remaining: list[int]) -> tuple[tuple[int, ...], int]:
    """Return devices and milli-GPUs for a worker whose devices are not known, and take them from `remaining`.

    It keeps those of its devices that the node shows; the others stand for the last free ones, and where only the node
    is known, the lowest free ones. A worker that finds too few holds all devices of its node: more is in use there than
    the node shows, and none of it is free before that worker ends.
    """
    many = len(placed.devices)
    if many and need.gpus >= GPU:
        at = {index: position for position, index in enumerate(devices_of(node))}
        kept = [at[index] for index in placed.devices if index in at and remaining[at[index]] == GPU]
        free = [i for i in reversed(range(len(remaining))) if remaining[i] == GPU and i not in kept]
        if len(kept) + len(free) >= many:
            chosen = tuple(sorted([*kept, *free[: many - len(kept)]]))
            for position in chosen:
                remaining[position] = 0
            return chosen, GPU
    elif (
        remaining.count(GPU) >= need.whole_devices if need.gpus >= GPU else any(free >= need.gpus for free in remaining)
    ):
        return pick(need, remaining)
    return tuple(range(len(remaining))), GPU
