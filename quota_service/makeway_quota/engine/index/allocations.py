"""Keep running workloads on their nodes, and follow what changes between decisions.

Called by `Cluster` when it is built and by `IncrementalEngine` for changes. The result depends on the workloads alone,
not on the order of the changes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from heapq import heappush
from math import inf
from typing import TYPE_CHECKING

from ..request import Need, need_of
from ..state import ADMITTED, GPU, LIVE, Node, Placed, Pool, Workload
from .nodes import Allocation, NodeState, Part, PoolState, devices_of, pick, placement_of

if TYPE_CHECKING:
    from .cluster import Cluster

_AT_WORK = ("starting", "running")


def build(cluster: Cluster, nodes: Iterable[Node], workloads: Iterable[Workload]) -> None:
    """Enter all nodes into their pools and all workloads on their nodes: first where the devices are known."""
    for node in sorted(nodes, key=lambda n: (n.pool, n.name)):
        pool = cluster.pools.get(node.pool)
        if pool is None:
            pool = cluster.pools[node.pool] = PoolState(Pool(node.pool))
            cluster.pool_now[node.pool] = cluster.pool_future[node.pool] = 0
        state = NodeState(node, pool, len(pool.nodes))
        pool.nodes.append(state)
        cluster.nodes[node.name] = state
    for pool in cluster.pools.values():
        pool.index()
    for name, profile in cluster.profiles.items():
        _count(cluster, name, need_of(Workload("", "", name), profile), 1)
    change(cluster, workloads, ())
    for state in cluster.nodes.values():
        if state.node.foreign_gpus and not state.placed:
            repack(cluster, state)


def change(cluster: Cluster, news: Iterable[Workload], gone: Iterable[str]) -> set[str]:
    """Place workloads where they are now; return the ids whose nomination came or went with them.

    Nothing may be nominated meanwhile.
    """
    crowded: dict[str, NodeState] = {}
    beneficiaries: set[str] = set()
    changed = list(news)
    same = _same_need(cluster, changed)
    seated = [(w, cluster.allocations[w.id]) for w in changed if w.id in cluster.allocations]
    kept = {w.id: allocation for w, allocation in seated if _keeps_allocation(cluster, w, allocation)}
    for allocation in [allocation for name, allocation in cluster.fresh.items() if name not in kept]:
        cluster.withdraw(allocation)
    for name in [*(w.id for w in changed), *gone]:
        old = cluster.workloads.pop(name, None)
        if old is not None:
            if name not in same:
                _count(cluster, old.profile, cluster.need(old), -1)
            cluster.nominees.pop(name, None)
            if old.state in ADMITTED:
                ids = cluster.terminating if old.state == "checkpointing" else cluster.staying
                del ids[bisect_left(ids, name)]
            if name in cluster.allocations and name not in kept:
                _rise(cluster, cluster.allocations[name], crowded)
                beneficiaries.add(old.evicted_for or "")
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
            insort(cluster.terminating if workload.state == "checkpointing" else cluster.staying, workload.id)
            if workload.id in kept:
                _stay(cluster, kept[workload.id], workload)
                continue
            _sit(cluster, workload, crowded)
            beneficiaries.add(workload.evicted_for or "")
    for node in crowded.values():
        repack(cluster, node)
    return beneficiaries


def _same_need(cluster: Cluster, changed: Iterable[Workload]) -> set[str]:
    """Return the ids of the workloads whose need and pools are what they were, so that no mix changes."""
    found = set()
    for workload in changed:
        old = cluster.workloads.get(workload.id)
        alike = old is not None and workload.state in LIVE and old.profile == workload.profile
        if old is not None and alike and cluster.need(old) is cluster.need(workload):
            found.add(workload.id)
    return found


def _keeps_allocation(cluster: Cluster, workload: Workload, allocation: Allocation) -> bool:
    """Whether all that counts about a placed workload is what it was: then its allocation stays."""
    if not allocation.parts or workload.state not in _AT_WORK:
        return False
    old = allocation.workload
    if allocation.fresh:
        alike = workload.placement == placement_of(allocation.parts) and old.evicted_for is None
    else:
        alike = workload.placement == old.placement and old.state in _AT_WORK
    alike = alike and workload.evicted_for == old.evicted_for and cluster.need(workload) is allocation.need
    if not alike or _counts_as(workload) != _counts_as(old) or any(part.node.crowded for part in allocation.parts):
        return False
    return (_yields_from(cluster, workload) <= cluster.now) == (workload.id in cluster.yielding)


def _counts_as(workload: Workload) -> tuple[object, ...]:
    w = workload
    return w.policy, w.profile, w.owner, w.non_preemptible, w.priority


def _stay(cluster: Cluster, allocation: Allocation, workload: Workload) -> None:
    """Keep an allocation for the changed workload; its expected end may be another."""
    allocation.workload = workload
    if allocation.fresh:
        allocation.fresh = False
        del cluster.fresh[workload.id]
    for part in allocation.parts:
        part.node.placed[workload.id] = allocation
        part.node.pool.moved.append(part.node)
    cluster.note(allocation)


def _yields_from(cluster: Cluster, workload: Workload) -> float:
    """Return the time from which a workload yields because it ran so long; infinite while it never does."""
    after = cluster.settings.yields_after
    if not after or workload.non_preemptible or workload.kind != "job":
        return inf
    if workload.ran >= after:
        return -inf
    if workload.state not in _AT_WORK or workload.started_at is None:
        return inf
    return workload.started_at + after - workload.ran


def _time(cluster: Cluster, workload: Workload) -> None:
    """Note whether a workload yields, or when it will."""
    at = _yields_from(cluster, workload)
    if at <= cluster.now:
        cluster.yielding.add(workload.id)
    elif at < inf:
        heappush(cluster.yields_at, (at, workload.id))
        if len(cluster.yields_at) > 4 * len(cluster.workloads) + 64:  # a workload may be entered many times
            cluster.yields_at = sorted(set(cluster.yields_at))


def _sit(cluster: Cluster, workload: Workload, crowded: dict[str, NodeState]) -> None:
    """Place a running workload; where devices are not known, the whole node is assigned anew afterwards."""
    need = cluster.need(workload)
    _note_absent(cluster, workload, True)
    parts = _parts(cluster, workload, need)
    allocation = (
        Allocation(workload, need, parts[0].node.pool, parts, 0) if parts else _unplaced(cluster, workload, need)
    )
    if allocation is None:
        return
    cluster.allocations[workload.id] = allocation
    _book(cluster, allocation, 1)
    for part in parts:
        part.node.shift(part, need, -1, 0 if allocation.terminating else -1)
        part.node.allocations[workload.id] = allocation
    vague = allocation.vague
    for name in {placed.node for placed in workload.placement}:
        node = cluster.nodes.get(name)
        if node is not None:
            node.placed[workload.id] = allocation
            node.guessed += vague
            if node.crowded:
                crowded[name] = node
    if workload.state == "checkpointing" and workload.evicted_for is not None:
        cluster.promised_by.setdefault(workload.evicted_for, []).append(allocation)


def _note_absent(cluster: Cluster, workload: Workload, there: bool) -> None:
    """Note, or forget, that a placement names nodes that are not in the inventory: they may come (back)."""
    for placed in workload.placement:
        ids = cluster.absent.get(placed.node)
        if there and placed.node not in cluster.nodes:
            cluster.absent.setdefault(placed.node, set()).add(workload.id)
        elif not there and ids is not None:
            ids.discard(workload.id)
            if not ids:
                del cluster.absent[placed.node]


def _unplaced(cluster: Cluster, workload: Workload, need: Need) -> Allocation | None:
    """Return an allocation on the first pool of its profile for a workload whose node is gone."""
    pools = cluster.pools_of(workload)
    return Allocation(workload, need, pools[0], (), 0) if pools else None


def _rise(cluster: Cluster, allocation: Allocation, crowded: dict[str, NodeState]) -> None:
    """Take a workload off its nodes and lines."""
    workload, vague = allocation.workload, allocation.vague
    del cluster.allocations[workload.id]
    _book(cluster, allocation, -1)
    for part in allocation.parts:
        part.node.shift(part, allocation.need, 1, 0 if allocation.terminating else 1)
        part.node.allocations.pop(workload.id, None)
    for name in {placed.node for placed in workload.placement}:
        node = cluster.nodes.get(name)
        if node is not None:
            if node.crowded:
                crowded[name] = node
            node.placed.pop(workload.id, None)
            node.guessed -= vague
    promised = cluster.promised_by.get(workload.evicted_for or "")
    if promised and allocation in promised:
        promised.remove(allocation)
        if not promised:
            del cluster.promised_by[workload.evicted_for or ""]


def _book(cluster: Cluster, allocation: Allocation, sign: int) -> None:
    """Count an allocation of the snapshot in the ledger (sign 1), or no longer (sign -1)."""
    if sign > 0:
        allocation.terminating = allocation.workload.state == "checkpointing"
        allocation.amount = (
            sum(p.milli * len(p.devices) for p in allocation.parts) if allocation.parts else allocation.need.total
        )
    amount = sign * allocation.amount
    cluster.record(allocation, now=amount, terminating=amount if allocation.terminating else 0)
    cluster.count(allocation, sign)


def repack(cluster: Cluster, node: NodeState, shown: Node | None = None) -> None:
    """Assign the devices of a node anew: known devices first, then other allocations by age, then foreign GPUs."""
    placed = sorted(node.placed.values(), key=lambda t: t.workload.id)
    placed.sort(key=lambda t: (True, t.workload.started_at or 0.0) if _guessed(t) else (False, 0.0))
    for allocation in placed:
        _book(cluster, allocation, -1)
    with node.inadmissible():
        node.empty(shown or node.node)
        for allocation in placed:
            here = _on(node, allocation.workload, allocation.need)
            _rearrange(cluster, allocation, node, here)
            for part in here:
                node.shift(part, allocation.need, -1, 0 if allocation.terminating else -1)
                node.allocations[allocation.workload.id] = allocation
        _take_foreign(node)
    for allocation in placed:
        _book(cluster, allocation, 1)


def _guessed(allocation: Allocation) -> bool:
    return not all(placed.devices for placed in allocation.workload.placement)


def _rearrange(cluster: Cluster, allocation: Allocation, node: NodeState, here: Iterable[Part]) -> None:
    """Replace the parts that an allocation has on one node."""
    by_worker = {p.worker: p for p in allocation.parts if p.node is not node} | {p.worker: p for p in here}
    order = [placed.worker for placed in allocation.workload.placement]
    allocation.parts = tuple(by_worker[worker] for worker in order if worker in by_worker)
    if allocation.parts:
        allocation.pool = allocation.parts[0].node.pool
    else:
        found = _unplaced(cluster, allocation.workload, allocation.need)
        allocation.pool = found.pool if found else allocation.pool


def _parts(cluster: Cluster, workload: Workload, need: Need) -> tuple[Part, ...]:
    return parts_of(cluster.nodes, workload.placement, need)


def _on(node: NodeState, workload: Workload, need: Need) -> tuple[Part, ...]:
    return parts_of({node.node.name: node}, workload.placement, need)


def parts_of(nodes: Mapping[str, NodeState], placement: Iterable[Placed], need: Need) -> tuple[Part, ...]:
    """Read a placement; where only the node is known, the lowest devices that are free are taken."""
    parts = []
    taken: dict[str, list[int]] = {}
    for placed in placement:
        node = nodes.get(placed.node)
        if node is None:
            continue
        if placed.devices or not need.gpus:
            at = {index: position for position, index in enumerate(devices_of(node.node))}
            devices = tuple(at[d] for d in placed.devices if d in at)
            parts.append(Part(placed.worker, node, devices, placed.milli))
            continue
        left = taken.setdefault(placed.node, list(node.free))
        if any(free >= min(need.gpus, GPU) for free in left):
            devices, milli = pick(need, left)
            parts.append(Part(placed.worker, node, devices, milli))
    return tuple(parts)


def _count(cluster: Cluster, name: str, need: Need, sign: int) -> None:
    """Count a need in the mix of its pools: the shapes of profiles, and of all live workloads."""
    pools = cluster.serving(name)
    shape = need.shape
    for pool in pools:
        many = pool.mix.get(shape, 0) + sign * need.least
        pool.mix[shape] = many
        if not many:
            del pool.mix[shape]
        pool.mixed += 1


def _take_foreign(node: NodeState) -> None:
    """Take foreign GPUs on unknown devices off the devices that are free, from the last one down."""
    rest = node.node.foreign_gpus
    for at in range(len(node.open) - 1, -1, -1):
        if rest <= 0:
            break
        taken = min(rest, max(0, node.open[at]))
        if node.open[at] == GPU or rest < GPU:
            node.open[at] -= taken
            node.future[at] -= taken
            node.free[at] = min(node.open[at], node.future[at])
            rest -= taken
    node.whole_free = node.free.count(GPU)
    node.whole_future = node.future.count(GPU)
