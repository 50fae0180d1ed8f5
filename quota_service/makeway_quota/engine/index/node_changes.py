"""Add, change and remove nodes of a cluster that is kept between decisions, touching only the node's own rows.

Called by `IncrementalEngine` between decisions, when nothing is nominated and no start of the last plan is left.
Afterwards the cluster is what a new one would be, built from the same nodes and workloads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from heapq import heappop

from ..snapshot import ADMITTED, Node, Workload
from .allocations import change, join_host, leave_host, note_outlived, repack
from .capacity import emptied
from .cluster import Cluster
from .nodes import NodeState, PoolState


def known_pool(cluster: Cluster, node: Node) -> bool:
    """Whether the snapshot named the pool of a node; a pool that only its nodes name comes and goes with them."""
    return node.pool in cluster.declared


def put(cluster: Cluster, node: Node) -> set[str]:
    """Add or change a node; return the ids whose nomination this may change."""
    state = cluster.nodes.get(node.name)
    if state is None:
        return _add(cluster, node)
    old = state.node
    if (old.pool, old.host, old.gpus, old.devices, old.first_device) != (
        node.pool,
        node.host,
        node.gpus,
        node.devices,
        node.first_device,
    ):
        return remove(cluster, node.name) | _add(cluster, node)
    if old != node:
        _change_node(cluster, state, node)
    return set()


def _change_node(cluster: Cluster, state: NodeState, node: Node) -> None:
    """Change a node: readiness, cordon, model, size or foreign pods."""
    room = emptied(state)
    cluster.capacities.subtract(state)
    note_outlived(cluster, node)
    repack(cluster, state, node)
    cluster.capacities.add(state)
    packing = state.pool.packing
    if packing is not None and room != emptied(state) and not packing.renew(state):
        state.pool.packing = None


def _add(cluster: Cluster, node: Node) -> set[str]:
    pool = cluster.pools[node.pool]
    at = bisect_left(pool.nodes, node.name, key=lambda state: state.node.name)
    state = NodeState(node, pool, at, cluster.stuck_before)
    note_outlived(cluster, node)

    def insert() -> None:
        _catch_up(pool)
        pool.nodes.insert(at, state)
        _renumber(pool, at, 1)
        cluster.nodes[node.name] = state
        join_host(cluster, state)
        pool.widen(len(state.unused))
        pool.add(state)
        state.indexed = True
        pool.touch(state)
        pool.moved.append(state)
        if pool.packing is not None and not pool.packing.insert(state):
            pool.packing = None
        cluster.capacities.add(state)

    here = [cluster.workloads[id] for id in cluster.absent.get(node.name, ()) if id in cluster.workloads]
    others = _reallocate(cluster, [workload for workload in here if workload.state in ADMITTED], insert)
    if node.foreign_gpus and not state.placed:
        repack(cluster, state)
    return others


def take_stuck_off_future(cluster: Cluster, check_all: bool) -> None:
    """Take what ended attempts hold longer than they may off what is free later on its nodes; `check_all`: of all."""
    due = set(cluster.late.nodes) if check_all else set()
    while cluster.late.nodes_at and cluster.late.nodes_at[0][0] <= cluster.now:
        due.add(heappop(cluster.late.nodes_at)[1])
    for name in sorted(due & cluster.late.nodes):
        _change_node(cluster, cluster.nodes[name], cluster.nodes[name].node)


def remove(cluster: Cluster, name: str) -> set[str]:
    """Remove a node from its pool; return the ids whose nomination this may change.

    Its workloads count on their other nodes, else on the first pool of their profile.
    """
    state = cluster.nodes.get(name)
    if state is None:
        return set()

    def remove_state() -> None:
        pool = state.pool
        note_outlived(cluster, state.node, there=False)
        cluster.capacities.subtract(state)
        cluster.capacities.forget(state)
        leave_host(cluster, state)
        _catch_up(pool)
        pool.drop(state)
        pool.touched.clear()
        pool.bounds.clear()
        pool.first.clear()
        state.indexed = state.listed = False
        del pool.nodes[state.position], cluster.nodes[name]
        _renumber(pool, state.position, -1)
        if pool.packing is not None:
            pool.packing.remove(state.position)

    return _reallocate(cluster, [allocation.workload for allocation in state.placed.values()], remove_state)


def _reallocate(cluster: Cluster, workloads: Iterable[Workload], change_nodes: Callable[[], None]) -> set[str]:
    """Remove workloads from their nodes, call `change_nodes`, and allocate them again by their placement."""
    again = sorted(workloads, key=lambda workload: workload.id)
    others = change(cluster, (), [workload.id for workload in again])
    change_nodes()
    return others | change(cluster, again, ())


def _catch_up(pool: PoolState) -> None:
    """Apply pending changes to the packing before positions are renumbered."""
    if pool.packing is not None:
        pool.packing.catch_up()
        pool.packing.seen = 0
    pool.touched.clear()
    pool.bounds.clear()
    pool.first.clear()


def _renumber(pool: PoolState, at: int, step: int) -> None:
    """Shift the positions from `at` on by `step`, after a node was added or removed there."""
    for position in range(at, len(pool.nodes)):
        pool.nodes[position].position = position
    for buckets in (pool.by_free, pool.by_free_later):
        for bucket in buckets:
            bucket[:] = [position + step if position >= at else position for position in bucket]
