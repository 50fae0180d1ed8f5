"""Allocations and nominations of a snapshot on the nodes of a cluster, and their changes between decisions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from heapq import heappush
from math import inf

from ..request import Need, need_of
from ..snapshot import ADMITTED, GPU, LIVE, Node, Placed, Pool, Workload
from .cluster_state import ClusterState
from .devices import devices_of, finds_devices, stand_in
from .hosts import share_with, stop_sharing
from .nodes import Allocation, NodeState, PoolState, WorkerPlacement, placement_of

_AT_WORK = ("starting", "running")


def build(cluster: ClusterState, nodes: Iterable[Node], workloads: Iterable[Workload]) -> None:
    """Build a cluster's nodes and allocations; workloads with known devices are placed first."""
    stuck_before = cluster.stuck_before
    for node in sorted(nodes, key=lambda n: (n.pool, n.name)):
        pool = cluster.pools.get(node.pool)
        if pool is None:
            pool = cluster.pools[node.pool] = PoolState(Pool(node.pool))
            cluster.pool_usage[node.pool] = cluster.future_pool_usage[node.pool] = 0
        state = NodeState(node, pool, len(pool.nodes), stuck_before)
        if node.terminating:
            note_outlived(cluster, node)
        pool.nodes.append(state)
        cluster.nodes[node.name] = state
        join_host(cluster, state)
    for pool in cluster.pools.values():
        cluster.know(pool)
        pool.index()
    for name, profile in cluster.profiles.items():
        _count(cluster, name, need_of(Workload("", "", name), profile), 1)
    change(cluster, workloads, ())
    for state in cluster.nodes.values():
        if state.node.foreign_gpus and not state.placed:
            repack(cluster, state)


def join_host(cluster: ClusterState, state: NodeState) -> None:
    """Have a node share CPU, memory and pods with the others of its host; one without a host shares nothing."""
    if state.node.host:
        others = cluster.hosts.setdefault(state.node.host, [])
        share_with(state, others)
        others.append(state)


def leave_host(cluster: ClusterState, state: NodeState) -> None:
    """Undo `join_host`."""
    if state.node.host:
        stop_sharing(state)
        cluster.hosts[state.node.host].remove(state)
        if not cluster.hosts[state.node.host]:
            del cluster.hosts[state.node.host]


def change(cluster: ClusterState, workloads: Iterable[Workload], gone: Iterable[str]) -> set[str]:
    """Apply changed and removed workloads; return the ids whose nomination this may change.

    Called between decisions, when the cluster has no nomination in force.
    """
    crowded: dict[str, NodeState] = {}
    preemptors: set[str] = set()
    changed = list(workloads)
    same = _same_requests(cluster, changed)
    allocated = [(w, cluster.allocations[w.id]) for w in changed if w.id in cluster.allocations]
    kept = {w.id: allocation for w, allocation in allocated if _is_unchanged(cluster, w, allocation)}
    for allocation in [allocation for name, allocation in cluster.fresh.items() if name not in kept]:
        cluster.withdraw(allocation)
    for name in [*(w.id for w in changed), *gone]:
        old = cluster.workloads.pop(name, None)
        if old is not None:
            if name not in same:
                _count(cluster, old.profile, cluster.need(old), -1)
            cluster.nominees.pop(name, None)
            if old.state in ADMITTED:
                ids = cluster.terminating if old.state == "checkpointing" else cluster.running
                del ids[bisect_left(ids, name)]
            if name in cluster.allocations and name not in kept:
                _remove(cluster, cluster.allocations[name], crowded)
                preemptors.add(old.evicted_for or "")
            if old.state in ADMITTED and name not in kept:
                _note_absent(cluster, old, False)
            cluster.yielding.discard(name)
    for workload in changed:
        if workload.state not in LIVE:
            continue
        cluster.workloads[workload.id] = workload
        _time(cluster, workload)
        if workload.id not in same:
            _count(cluster, workload.profile, cluster.need(workload), 1)
        if workload.nomination and workload.state not in ("running", "starting"):
            cluster.nominees[workload.id] = workload
        if workload.state in ADMITTED:
            insort(cluster.terminating if workload.state == "checkpointing" else cluster.running, workload.id)
            if workload.id in kept:
                _keep(cluster, kept[workload.id], workload)
                continue
            _allocate(cluster, workload, crowded)
            preemptors.add(workload.evicted_for or "")
    for node in crowded.values():
        repack(cluster, node)
    return preemptors


def _same_requests(cluster: ClusterState, changed: Iterable[Workload]) -> set[str]:
    """Return the ids of workloads whose request and profile are unchanged: the pools count them already."""
    result = set()
    for workload in changed:
        old = cluster.workloads.get(workload.id)
        same = old is not None and workload.state in LIVE and old.profile == workload.profile
        if old is not None and same and cluster.need(old) is cluster.need(workload):
            result.add(workload.id)
    return result


def _is_unchanged(cluster: ClusterState, workload: Workload, allocation: Allocation) -> bool:
    """Whether a workload's allocation is still right: its placement and all that the rules read are unchanged."""
    if not allocation.parts or workload.state not in _AT_WORK:
        return False
    old = allocation.workload
    if allocation.started_in_plan:
        same = workload.placement == placement_of(allocation.parts) and old.evicted_for is None
    else:
        same = workload.placement == old.placement and old.state in _AT_WORK
    same = same and workload.evicted_for == old.evicted_for and cluster.need(workload) is allocation.need
    if not same or _counts_as(workload) != _counts_as(old) or any(part.node.crowded for part in allocation.parts):
        return False
    return (_yields_from(cluster, workload) <= cluster.now) == (workload.id in cluster.yielding)


def _counts_as(workload: Workload) -> tuple[object, ...]:
    w = workload
    return w.team, w.profile, w.owner, w.non_preemptible, w.priority


def _keep(cluster: ClusterState, allocation: Allocation, workload: Workload) -> None:
    """Keep an allocation with the newer workload record; its expected end may have changed."""
    allocation.workload = workload
    if allocation.started_in_plan:
        allocation.started_in_plan = False
        del cluster.fresh[workload.id]
    for part in allocation.parts:
        part.node.placed[workload.id] = allocation
        part.node.pool.moved.append(part.node)
        for other in part.node.host_peers:
            other.pool.moved.append(other)
    cluster.note(allocation)


def _yields_from(cluster: ClusterState, workload: Workload) -> float:
    """Return the time from which a workload counts one priority lower (`yields_after`); infinite if never."""
    after = cluster.settings.yields_after
    if not after or workload.non_preemptible or workload.kind != "job":
        return inf
    if workload.earlier_runtime >= after:
        return -inf
    if workload.state not in _AT_WORK or workload.started_at is None:
        return inf
    return workload.started_at + after - workload.earlier_runtime


def _time(cluster: ClusterState, workload: Workload) -> None:
    """Record whether a workload counts one priority lower, or from when on; and when it is stuck."""
    if workload.state == "checkpointing" and workload.deadline is not None and not cluster.is_stuck(workload):
        heappush(cluster.late.workloads, (workload.deadline + cluster.settings.stuck_after, workload.id))
    at = _yields_from(cluster, workload)
    if at <= cluster.now:
        cluster.yielding.add(workload.id)
    elif at < inf:
        heappush(cluster.yields_at, (at, workload.id))
        if len(cluster.yields_at) > 4 * len(cluster.workloads) + 64:  # most of them have ended or were entered again
            cluster.yields_at = sorted({entry for entry in cluster.yields_at if _is_current(cluster, *entry)})


def _is_current(cluster: ClusterState, at: float, name: str) -> bool:
    """Whether a known workload will count one priority lower from just this time on."""
    workload = cluster.workloads.get(name)
    return workload is not None and _yields_from(cluster, workload) == at


def _allocate(cluster: ClusterState, workload: Workload, crowded: dict[str, NodeState]) -> None:
    """Allocate admitted work; a node with unknown devices is repacked afterwards."""
    need = cluster.need(workload)
    _note_absent(cluster, workload, True)
    parts, unknown = _read(cluster.nodes, workload.placement, need)
    pool = parts[0].node.pool if parts else next(iter(cluster.pools_of(workload)), None)
    if pool is None:
        return
    allocation = Allocation(workload, need, pool, parts, 0)
    if workload.state == "checkpointing":
        allocation.stuck = cluster.is_stuck(workload)
        allocation.terminating = not allocation.stuck
    cluster.allocations[workload.id] = allocation
    _record(cluster, allocation, 1)
    for part in parts:
        part.node.shift(part, need, -1, 0 if allocation.terminating else -1)
        part.node.allocations[workload.id] = allocation
    for name in {placed.node for placed in workload.placement}:
        node = cluster.nodes.get(name)
        if node is not None:
            node.placed[workload.id] = allocation
            node.guessed += name in unknown
            if node.crowded:
                crowded[name] = node
    if workload.state == "checkpointing" and workload.evicted_for is not None:
        cluster.terminating_for.setdefault(workload.evicted_for, []).append(allocation)


def _note_absent(cluster: ClusterState, workload: Workload, there: bool) -> None:
    """Record, or forget, that a placement names nodes outside the inventory: they may come (back)."""
    for placed in workload.placement:
        ids = cluster.absent.get(placed.node)
        if there and placed.node not in cluster.nodes:
            cluster.absent.setdefault(placed.node, set()).add(workload.id)
        elif not there and ids is not None:
            ids.discard(workload.id)
            if not ids:
                del cluster.absent[placed.node]


def _remove(cluster: ClusterState, allocation: Allocation, crowded: dict[str, NodeState]) -> None:
    """Remove a workload's allocation from its nodes and quota lines."""
    workload = allocation.workload
    del cluster.allocations[workload.id]
    _record(cluster, allocation, -1)
    for part in allocation.parts:
        part.node.shift(part, allocation.need, 1, 0 if allocation.terminating else 1)
        part.node.allocations.pop(workload.id, None)
    for name in {placed.node for placed in workload.placement}:
        node = cluster.nodes.get(name)
        if node is not None:
            if node.crowded:
                crowded[name] = node
            node.placed.pop(workload.id, None)
            node.guessed -= _guessed(allocation, node)
    terminating = cluster.terminating_for.get(workload.evicted_for or "")
    if terminating and allocation in terminating:
        terminating.remove(allocation)
        if not terminating:
            del cluster.terminating_for[workload.evicted_for or ""]


def _record(cluster: ClusterState, allocation: Allocation, sign: int) -> None:
    """Add an allocation of the snapshot to the ledger (1), or remove it (-1)."""
    if sign > 0:
        _count_request(cluster, allocation)
    amount = sign * allocation.milli_gpus
    cluster.record(allocation, usage=amount, terminating=amount if allocation.terminating else 0)
    cluster.count(allocation, sign)


def note_outlived(cluster: ClusterState, node: Node, there: bool = True) -> None:
    """Record, or forget, what ended attempts hold on a node, and when that is stuck."""
    cluster.late.nodes.discard(node.name)
    if there and node.terminating:
        cluster.late.nodes.add(node.name)
        for deadline in {pod.deadline for pod in node.terminating if pod.deadline > cluster.stuck_before}:
            heappush(cluster.late.nodes_at, (deadline + cluster.settings.stuck_after, node.name))


def _count_request(cluster: ClusterState, allocation: Allocation) -> None:
    """Count what an allocation was started with, whatever its nodes show, in the pools where its nodes are now.

    A worker whose node is gone counts with the first of the others.
    """
    workload, need = allocation.workload, allocation.need
    served = cluster.serving(workload.profile)
    if len(workload.placement) == 1 and allocation.parts:
        (placed,) = workload.placement
        allocation.pool = allocation.parts[0].node.pool
        allocation.milli_gpus = placed.milli_per_device * len(placed.devices) if placed.devices else need.gpus
        allocation.shares, allocation.all_or_nothing = (), allocation.pool not in served
        return
    there = [(placed, cluster.nodes.get(placed.node)) for placed in workload.placement]
    known = [node.pool for _, node in there if node is not None]
    allocation.pool = known[0] if known else allocation.pool
    amounts: dict[PoolState, int] = {}
    for placed, node in there:
        pool = allocation.pool if node is None else node.pool
        held = placed.milli_per_device * len(placed.devices) if placed.devices and node is not None else need.gpus
        amounts[pool] = amounts.get(pool, 0) + held
    allocation.milli_gpus = sum(amounts.values()) if workload.placement else need.total
    allocation.shares = tuple(amounts.items()) if len(amounts) > 1 else ()
    allocation.all_or_nothing = len(amounts) > 1 or allocation.pool not in served


def repack(cluster: ClusterState, node: NodeState, shown: Node | None = None) -> None:
    """Assign a node's devices again: allocations with known devices first, the others by age, then foreign pods."""
    placed = sorted(node.placed.values(), key=lambda t: t.workload.id)
    placed.sort(key=lambda t: (True, t.workload.started_at or 0.0) if _guessed(t, node) else (False, 0.0))
    for allocation in placed:
        _record(cluster, allocation, -1)
    with node.inadmissible():
        node.empty(shown or node.node, cluster.stuck_before)
        for allocation in placed:
            here = _on(node, allocation.workload, allocation.need)
            _rearrange(allocation, node, here)
            for part in here:
                node.shift(part, allocation.need, -1, 0 if allocation.terminating else -1)
                node.allocations[allocation.workload.id] = allocation
        node.see_overfull()
        _place_foreign(node)
    for allocation in placed:
        _record(cluster, allocation, 1)


def _guessed(allocation: Allocation, node: NodeState) -> bool:
    """Whether devices of an allocation on a node are unknown."""
    name, gpus = node.node.name, allocation.need.gpus
    for placed in allocation.workload.placement:
        if placed.node == name and not finds_devices(node.node, placed, gpus):
            return True
    return False


def _rearrange(allocation: Allocation, node: NodeState, here: Iterable[WorkerPlacement]) -> None:
    """Replace an allocation's parts on one node."""
    by_worker = {p.worker: p for p in allocation.parts if p.node is not node} | {p.worker: p for p in here}
    order = [placed.worker for placed in allocation.workload.placement]
    allocation.parts = tuple(by_worker[worker] for worker in order if worker in by_worker)


def _on(node: NodeState, workload: Workload, need: Need) -> tuple[WorkerPlacement, ...]:
    return parts_of({node.node.name: node}, workload.placement, need)


def parts_of(nodes: Mapping[str, NodeState], placement: Iterable[Placed], need: Need) -> tuple[WorkerPlacement, ...]:
    """Return a placement's parts; where devices are not known, `stand_in` chooses some."""
    return _read(nodes, placement, need)[0]


def _read(
    nodes: Mapping[str, NodeState], placement: Iterable[Placed], need: Need
) -> tuple[tuple[WorkerPlacement, ...], Collection[str]]:
    """Return a placement's parts, and the names of the nodes whose devices are not all known."""
    parts = []
    taken: dict[str, list[int]] = {}
    for placed in placement:
        node = nodes.get(placed.node)
        if node is None:
            continue
        if finds_devices(node.node, placed, need.gpus):
            at = {index: position for position, index in enumerate(devices_of(node.node))}
            devices = tuple(at[d] for d in placed.devices if d in at)
            parts.append(WorkerPlacement(placed.worker, node, devices, placed.milli_per_device))
            continue
        remaining = taken.setdefault(placed.node, list(node.free))
        parts.append(WorkerPlacement(placed.worker, node, *stand_in(node.node, placed, need, remaining)))
    return tuple(parts), taken


def _count(cluster: ClusterState, name: str, need: Need, sign: int) -> None:
    """Count a request in the mix of the pools that serve it: one for each profile, and for each live workload."""
    pools = cluster.serving(name)
    shape = need.shape
    for pool in pools:
        many = pool.mix.get(shape, 0) + sign * need.min_workers
        pool.mix[shape] = many
        if not many:
            del pool.mix[shape]
        pool.mixed += 1


def _place_foreign(node: NodeState) -> None:
    """Take what foreign pods hold off the free devices, from the last one down."""
    rest = node.node.foreign_gpus
    for at in range(len(node.unused) - 1, -1, -1):
        if rest <= 0:
            break
        taken = min(rest, max(0, node.unused[at]))
        if node.unused[at] == GPU or rest < GPU:
            node.unused[at] -= taken
            node.free_later[at] -= taken
            node.free[at] = min(node.unused[at], node.free_later[at])
            rest -= taken
    node.whole_free = node.free.count(GPU)
    node.whole_free_later = node.free_later.count(GPU)
