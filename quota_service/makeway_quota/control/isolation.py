"""Plan without the workloads and nodes with which the engine fails.

Called by `Planner` where a plan failed. The engine is pure, so trying is free of effects: the shortest beginning of the
list of nodes, admitted and pending workloads with which planning fails ends with a faulty one. It is left out, and the
search goes on until the rest can be planned. A faulty workload that holds GPUs stays, as simple as can be, or as
devices that are taken on its nodes: what it holds is never given to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ..engine.incremental import IncrementalEngine
from ..engine.plan import Plan
from ..engine.snapshot import ADMITTED, GPU, Node, Snapshot, Workload
from .quarantine import Kind, reason_of

MOST_FAULTY = 16
"""Faulty workloads and nodes that are searched for in one cycle"""

Item = tuple[Kind, str]
Plans = Callable[[Snapshot], tuple[IncrementalEngine, Plan]]


@dataclass(slots=True)
class Faulty:
    """What is left out, why, and what stands in for workloads that hold GPUs."""

    reasons: dict[Item, Exception] = field(default_factory=dict)
    stand_ins: dict[str, Workload] = field(default_factory=dict)
    """of workloads that the engine takes in a simpler form"""
    taken: dict[str, Workload] = field(default_factory=dict)
    """workloads whose devices count as foreign"""


class Unplannable(Exception):
    """Planning fails, and not by some workloads or nodes: the error is the cause."""


def plan_without_faulty(
    snapshot: Snapshot, plans: Plans, suspects: Collection[Item] = ()
) -> tuple[IncrementalEngine, Plan, Faulty]:
    """Return the plan of what can be planned, the engine that made it, and what is left out.

    `suspects` were left out before, and are tried first. Unplannable where that finds nothing.
    """
    faulty = Faulty()
    error = _try(snapshot, plans, faulty)
    if not isinstance(error, Exception):
        return *error, faulty
    there = set(_items(snapshot))
    if known := [item for item in suspects if item in there]:
        again = Faulty(dict.fromkeys(known, error))
        _stand_in(snapshot, again, plans)
        found = _try(snapshot, plans, again)
        if not isinstance(found, Exception):
            return *found, again
    for _ in range(MOST_FAULTY):
        item = _first_faulty(snapshot, plans, faulty)
        if item is None:
            break
        faulty.reasons[item] = error
        _stand_in(snapshot, faulty, plans)
        found = _try(snapshot, plans, faulty)
        if not isinstance(found, Exception):
            return *found, faulty
        error = found
    raise Unplannable(reason_of(error)) from error


def without(snapshot: Snapshot, faulty: Faulty) -> Snapshot:
    """Return a snapshot as it is planned: without what is faulty, with what stands in for it."""
    if not faulty.reasons:
        return snapshot
    out = faulty.reasons
    workloads = [
        faulty.stand_ins.get(each.id, each)
        for each in snapshot.workloads
        if ("workload", each.id) not in out or each.id in faulty.stand_ins
    ]
    nodes = [with_taken(node, faulty.taken) for node in snapshot.nodes if ("node", node.name) not in out]
    return replace(snapshot, nodes=tuple(nodes), workloads=tuple(workloads))


def with_taken(node: Node, taken: Mapping[str, Workload]) -> Node:
    """Return a node on which the devices of some workloads are taken."""
    whole, shares = set(node.foreign_devices), node.foreign_gpus
    for workload in taken.values():
        for place in workload.placement:
            if place.node == node.name and place.milli >= GPU:
                whole |= set(place.devices)
            elif place.node == node.name:
                shares += place.milli
    if (tuple(sorted(whole)), shares) == (node.foreign_devices, node.foreign_gpus):
        return node
    return replace(node, foreign_devices=tuple(sorted(whole)), foreign_gpus=shares)


def _try(snapshot: Snapshot, plans: Plans, faulty: Faulty) -> tuple[IncrementalEngine, Plan] | Exception:
    try:
        return plans(without(snapshot, faulty))
    except Exception as error:
        return error


def _items(snapshot: Snapshot) -> list[Item]:
    """List what may be faulty: nodes, then what runs, then what waits, each by name."""
    order = sorted(snapshot.workloads, key=lambda each: (each.state not in ADMITTED, each.id))
    nodes: list[Item] = [("node", name) for name in sorted(node.name for node in snapshot.nodes)]
    return [*nodes, *(("workload", each.id) for each in order)]


def _first_faulty(snapshot: Snapshot, plans: Plans, faulty: Faulty) -> Item | None:
    """Return the last item of the shortest list with which planning fails; None where it fails with nothing, too."""
    items = [item for item in _items(snapshot) if item not in faulty.reasons]

    def fails(number: int) -> bool:
        kept = set(items[:number]) | {("workload", id) for id in faulty.stand_ins}
        part = replace(
            snapshot,
            nodes=tuple(node for node in snapshot.nodes if ("node", node.name) in kept),
            workloads=tuple(each for each in snapshot.workloads if ("workload", each.id) in kept),
        )
        return isinstance(_try(part, plans, faulty), Exception)

    low, high = 0, len(items)
    if fails(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return items[high - 1] if items else None


def _stand_in(snapshot: Snapshot, faulty: Faulty, plans: Plans) -> None:
    """Choose how the faulty workloads that hold GPUs are counted: in a simple form that can be planned, or as taken."""
    for each in snapshot.workloads:
        known = each.id in faulty.stand_ins or each.id in faulty.taken
        if ("workload", each.id) not in faulty.reasons or known or each.state not in ADMITTED:
            continue
        simple = simplest(each)
        alone = replace(snapshot, workloads=(simple,))
        nodes = Faulty({item: error for item, error in faulty.reasons.items() if item[0] == "node"})
        if simple != each and not isinstance(_try(alone, plans, nodes), Exception):
            faulty.stand_ins[each.id] = simple
        else:
            faulty.taken[each.id] = each


def simplest(workload: Workload) -> Workload:
    """Return a workload that holds what it holds, and of which nothing else is known: it is not evicted."""
    return replace(
        workload,
        state="running",
        preemptible=False,
        started_at=None,
        last_checkpoint_at=None,
        evicted_for=None,
        deadline=None,
        nomination=(),
        failed_node=None,
        min_workers=None,
        time_limit=None,
        expected=None,
        ran=0.0,
        avoid=(),
    )
