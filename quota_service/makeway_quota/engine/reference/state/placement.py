"""Find nodes and devices for a workload (engine rule 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...index.capacity import NodeCapacity, free_pods
from ...index.devices import UNLIMITED, devices_of, pick
from ...placement.pack_index import rounded
from ...placement.packing import Packing
from ...request import Need, Shape, may_run, need_of
from ...snapshot import GPU, Node, Workload
from .cluster import Cluster, FreeResources, WorkerPlacement
from .quota import static_quota
from .spare import Limit, limit_of, spares

Room = Mapping[str, FreeResources]
"""What is free on the nodes of one pool: by name, in the order of the inventory."""


def find(cluster: Cluster, pool: str, need: Need, in_future: bool = False) -> tuple[WorkerPlacement, ...]:
    """Return a placement for `min_workers` workers, on what is free now or in the future; empty if there is none.

    The strategy `pack` keeps free GPUs as useful as possible to the pool's mix of workloads (packing.py); with
    `in_future`, it takes the node with the fewest free whole devices. `fill` always does. `spread` takes the node with
    the most. A gang gets as few nodes as possible, and is placed as a whole or not at all.
    """
    parts = _find(cluster, pool, need, in_future, None)
    if need.only_spare and parts and not spares(cluster, pool, need, parts, in_future):
        return _find(cluster, pool, need, in_future, limit_of(cluster, pool, need, in_future))
    return parts


def _find(cluster: Cluster, pool: str, need: Need, in_future: bool, limit: Limit | None) -> tuple[WorkerPlacement, ...]:
    """Return a placement; with a `limit`, at most so many workers on each node."""
    room = {name: cluster.remaining(name, in_future) for name in cluster.nodes_of(pool) if cluster.usable(name)}
    strategy = cluster.pools[pool].strategy
    if need.min_workers > 1:
        chosen = _gang(cluster, room, need, in_future, limit)
    elif strategy == "pack" and not in_future and not need.avoid and (mix := _mix(cluster, pool)):
        return _packed(cluster, room, need, mix, limit)
    else:
        name = _single_node(cluster, room, need, strategy != "spread", limit)
        chosen = [(name, 1)] if name else []
    parts: list[WorkerPlacement] = []
    for name, count in chosen:
        devices = list(room[name].devices)
        idle = cluster.free(name).devices if in_future else None
        parts += [WorkerPlacement(len(parts) + at, name, *pick(need, devices, idle)) for at in range(count)]
    return tuple(parts)


def find_when_ready(cluster: Cluster, chain: Sequence[str], pool: str, need: Need) -> tuple[WorkerPlacement, ...]:
    """Return a placement as soon as nodes that boot make it possible, with the fewest workers on other nodes.

    Those use no GPUs that another team's static quota keeps free.
    """
    names = cluster.nodes_of(pool)
    ready = [name for name in names if cluster.suits(name, need)]
    booting = [node for node in map(cluster.nodes.__getitem__, names) if node.boots and may_run(need, node)]
    booting.sort(key=lambda node: (node.ready_at or 0.0, node.name))
    booting_names = [node.name for node in booting if node.name not in need.avoid]
    for count in range(1, len(booting_names) + 1):
        room = {name: cluster.free_later(name) for name in (*booting_names[:count], *ready)}
        if sum(free.workers(need) for free in room.values()) < need.min_workers:
            continue
        parts: list[WorkerPlacement] = []
        for name, free in room.items():
            idle, devices = cluster.free(name).devices if name in ready else None, list(free.devices)
            for _ in range(min(free.workers(need), need.min_workers - len(parts))):
                parts.append(WorkerPlacement(len(parts), name, *pick(need, devices, idle)))
        on_ready = sum(part.node in ready for part in parts)
        if static_quota(cluster, chain, pool, on_ready * need.gpus, True) is None:
            return tuple(parts)
    return ()


def count_workers(cluster: Cluster, pool: str, need: Need, in_future: bool) -> int:
    """Return how many workers fit into a pool."""
    nodes = [name for name in cluster.nodes_of(pool) if cluster.suits(name, need)]
    return sum(cluster.remaining(name, in_future).workers(need) for name in nodes)


def _nodes_with_room(cluster: Cluster, room: Room, need: Need, limit: Limit | None) -> dict[str, int]:
    """Return the nodes with room, each with the number of workers that it has room for."""
    suited = {name: free.workers(need) for name, free in room.items() if cluster.suits(name, need)}
    candidates = suited if limit is None else {name: limit(name, count) for name, count in suited.items()}
    return {name: count for name, count in candidates.items() if count}


def _single_node(cluster: Cluster, room: Room, need: Need, fullest: bool, limit: Limit | None) -> str | None:
    order = {name: at for at, name in enumerate(room)}

    def key(name: str) -> tuple[int, int, int]:
        free = room[name]
        best = min((milli for milli in free.devices if milli >= need.gpus), default=0) if 0 < need.gpus < GPU else 0
        return best, free.whole if fullest else -free.whole, order[name]

    return min(_nodes_with_room(cluster, room, need, limit), key=key, default=None)


def _gang(cluster: Cluster, room: Room, need: Need, in_future: bool, limit: Limit | None) -> list[tuple[str, int]]:
    """Take the node with room for the most workers, until some have room for the rest: then the one with the least."""
    position = {name: at for at, name in enumerate(room)}
    idle = {name: cluster.free(name).whole for name in room} if in_future else {n: g.whole for n, g in room.items()}
    candidates = [(count, name) for name, count in _nodes_with_room(cluster, room, need, limit).items()]
    candidates.sort(key=lambda item: (-item[0], idle[item[1]], position[item[1]]))
    chosen: list[tuple[str, int]] = []
    missing = need.min_workers
    while candidates and missing:
        enough = [option for option in candidates if option[0] >= missing]
        count, name = min(enough, key=lambda item: item[0]) if enough else candidates[0]
        candidates.remove((count, name))
        chosen.append((name, min(count, missing)))
        missing -= min(count, missing)
    return chosen if not missing else []


def _packed(
    cluster: Cluster, room: Room, need: Need, mix: dict[Shape, int], limit: Limit | None
) -> tuple[WorkerPlacement, ...]:
    nodes = cluster.nodes_of(cluster.nodes[next(iter(room))].pool) if room else []
    if not nodes:
        return ()
    packing = Packing([_empty_capacity(cluster, cluster.nodes[name]) for name in nodes], rounded(mix))
    for at, name in enumerate(nodes):
        free, node = cluster.free(name), cluster.nodes[name]
        cpu = max(0, free.cpu) if cluster.usable(name) and free.pods > 0 else -1
        packing.see(at, NodeCapacity(free.devices, cpu, max(0, free.memory), node.model))
    fitting = _nodes_with_room(cluster, room, need, limit)
    positions = [at for at, name in enumerate(nodes) if name in fitting]
    best = packing.best(need.shape, positions if limit is not None or need.session else None)
    if best is None:
        return ()
    name = nodes[best[0]]
    if 0 < need.gpus < GPU:
        return (WorkerPlacement(0, name, (best[1],), need.gpus),)
    return (WorkerPlacement(0, name, *pick(need, list(room[name].devices))),)


def _empty_capacity(cluster: Cluster, node: Node) -> NodeCapacity:
    devices = [0 if d in node.foreign_devices else GPU for d in devices_of(node)]
    cpu = node.cpu - node.foreign_cpu if node.cpu else UNLIMITED
    memory = node.memory - node.foreign_memory if node.memory else UNLIMITED
    takes = cluster.usable(node.name) and free_pods(node) > 0
    return NodeCapacity(devices, max(0, cpu) if takes else -1, max(0, memory), node.model)


def _mix(cluster: Cluster, pool: str) -> dict[Shape, int]:
    """Count the workers of each shape that the pool serves: one workload of each profile, and all that are live."""
    known = [(name, need_of(Workload("", "", name), profile)) for name, profile in cluster.profiles.items()]
    live = [(w.profile, cluster.need(w)) for w in cluster.live.values()]
    mix: dict[Shape, int] = {}
    for profile, need in (*known, *live):
        if pool in cluster.serving(profile):
            mix[need.shape] = mix.get(need.shape, 0) + need.min_workers
    return mix
