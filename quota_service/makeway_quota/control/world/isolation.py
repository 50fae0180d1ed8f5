"""Plan without the workloads, nodes, teams, pools and profiles with which the engine fails.

Called by `Planner` where a plan failed. The engine is pure, so trying is free of effects: the shortest beginning of the
list of pools, teams, profiles, nodes, admitted and pending workloads with which planning fails ends with a faulty one.
It is left out, and the search goes on until the rest can be planned. A workload that is left out and holds GPUs stays,
as simple as can be, or as devices that are taken on its nodes: what it holds is never given to another.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...engine.incremental import IncrementalEngine
from ...engine.plan import Plan
from ...engine.snapshot import ADMITTED, GPU, Node, Snapshot, TeamQuota, Workload
from ...quarantine import Kind, reason_of
from .engine_view import EngineChanges

MAX_FAULTY = 32
"""Faulty things that are searched for in one cycle"""
SEARCH_SECONDS = 20.0
"""Seconds of a search; the next cycle goes on where it ended"""
MIN_WIDENED = 3
"""Faulty workloads of one queue after which the queue is left out; and faulty queues of one team or profile"""

Item = tuple[Kind, str]
NO_SUSPECTS: Mapping[Item, Exception] = {}
MakePlan = Callable[[Snapshot], tuple[IncrementalEngine, Plan]]


@dataclass(slots=True)
class Faulty:
    """What is left out, why, and what stands in for workloads that hold GPUs."""

    reasons: dict[Item, Exception] = field(default_factory=dict)
    stand_ins: dict[str, Workload] = field(default_factory=dict)
    """of workloads that the engine takes in a simpler form"""
    taken: dict[str, Workload] = field(default_factory=dict)
    """workloads whose devices count as foreign"""
    nodes: dict[str, Node] = field(default_factory=dict)
    """the nodes of those, as they are without them"""
    _taken_on: dict[str, list[Workload]] | None = None

    def taken_on(self, node: str) -> Sequence[Workload]:
        """Return the workloads whose devices on a node count as foreign."""
        if self._taken_on is None:
            self._taken_on = on_nodes(self.taken.values())
        return self._taken_on.get(node, ())

    def of(self, workload: Workload) -> Exception | None:
        """Return why a workload is left out, by itself or with its queue, team or profile; None if it is not."""
        if not self.reasons:
            return None
        items = items_of(workload.id, workload.team, workload.profile)
        return next((self.reasons[item] for item in items if item in self.reasons), None)

    def has_node(self, node: Node) -> bool:
        """Whether a node is left out, by itself or with its pool."""
        return ("node", node.name) in self.reasons or ("pool", node.pool) in self.reasons


class Unplannable(Exception):
    """Planning fails, and not by what was found so far (`faulty`): the error is the cause."""

    def __init__(self, reason: str, faulty: Faulty) -> None:
        super().__init__(reason)
        self.faulty = faulty


def plan_without_faulty(
    snapshot: Snapshot,
    make_plan: MakePlan,
    suspects: Mapping[Item, Exception] = NO_SUSPECTS,
    due: Collection[Item] = (),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[IncrementalEngine, Plan, Faulty]:
    """Return the plan of what can be planned, the engine that made it, and what is left out.

    `suspects` were left out before, and stay so; those that are `due` are tried again. Unplannable where that finds
    nothing, or not in time.
    """
    ends = clock() + SEARCH_SECONDS
    there = set(_items(snapshot)) | {("queue", queue_of(workload)) for workload in snapshot.workloads}
    kept = {item: error for item, error in suspects.items() if item in there}
    faulty, result = _tried_again(snapshot, make_plan, kept, [item for item in kept if item in due])
    while isinstance(result, Exception):
        item = None
        if len(faulty.reasons) < MAX_FAULTY and clock() < ends:
            item = _first_faulty(snapshot, make_plan, faulty)
        if item is None:
            raise Unplannable(reason_of(result), faulty) from result
        faulty = _stand_ins(snapshot, _widened({**faulty.reasons, item: result}, snapshot), make_plan)
        result = _try(snapshot, make_plan, faulty)
    return *result, faulty


def _tried_again(
    snapshot: Snapshot, make_plan: MakePlan, kept: Mapping[Item, Exception], due: Collection[Item]
) -> tuple[Faulty, tuple[IncrementalEngine, Plan] | Exception]:
    """Plan without what was left out before, but with what is due: all of it, else what passes one by one."""
    reasons = dict(kept)
    for some in (due, *([item] for item in due if len(due) > 1)):
        trial = _stand_ins(snapshot, {item: error for item, error in reasons.items() if item not in some}, make_plan)
        result = _try(snapshot, make_plan, trial)
        if not isinstance(result, Exception):
            reasons = trial.reasons
            if some is due:
                return trial, result
        elif len(due) == 1:
            reasons[next(iter(due))] = result
    faulty = _stand_ins(snapshot, reasons, make_plan)
    return faulty, _try(snapshot, make_plan, faulty)


def without(snapshot: Snapshot, faulty: Faulty) -> Snapshot:
    """Return a snapshot as it is planned: without what is faulty, with what stands in for it."""
    reasons = faulty.reasons
    if not reasons:
        return snapshot
    shown = (faulty.stand_ins.get(workload.id, workload) for workload in snapshot.workloads)
    workloads = tuple(workload for workload in shown if workload.id in faulty.stand_ins or faulty.of(workload) is None)
    nodes = tuple(with_taken(node, faulty.taken_on(node.name)) for node in snapshot.nodes if not faulty.has_node(node))
    if not any(kind in ("team", "pool", "profile") for kind, _ in reasons):
        return replace(snapshot, nodes=nodes, workloads=workloads)
    return replace(
        snapshot,
        nodes=nodes,
        workloads=workloads,
        pools=tuple(pool for pool in snapshot.pools if ("pool", pool.name) not in reasons),
        policies=tuple(policy for policy in snapshot.policies if ("team", policy.name) not in reasons),
        profiles=tuple(profile for profile in snapshot.profiles if ("profile", profile.name) not in reasons),
    )


def on_nodes(workloads: Iterable[Workload]) -> dict[str, list[Workload]]:
    """Return workloads by the nodes that they are placed on."""
    result: defaultdict[str, list[Workload]] = defaultdict(list)
    for workload in workloads:
        for node in {place.node for place in workload.placement}:
            result[node].append(workload)
    return dict(result)


def followed(changes: EngineChanges, faulty: Faulty) -> tuple[EngineChanges, Faulty] | None:
    """Return changes with the nodes on which workloads that are left out hold something else now, and what is left out.

    None where something stands in for a workload that holds something else: that is chosen anew. The cost is that of
    the nodes and workloads that changed.
    """
    if not (faulty.stand_ins or faulty.taken):
        return changes, faulty
    now: dict[str, Workload | None] = dict.fromkeys(changes.gone)
    now |= {workload.id: workload for workload in changes.changed}
    if any(_holds(faulty.stand_ins[id]) != _holds(workload) for id, workload in now.items() if id in faulty.stand_ins):
        return None
    known = {node.name: node for node in changes.nodes if node.name in faulty.nodes}
    moved = {
        id: workload
        for id, workload in now.items()
        if id in faulty.taken and _holds(faulty.taken[id]) != _holds(workload)
    }
    if not moved:
        return changes, replace(faulty, nodes=faulty.nodes | known) if known else faulty
    if any(_holds(workload) for workload in moved.values()):
        return None
    freed = {place.node for id in moved for place in faulty.taken[id].placement}
    nodes = faulty.nodes | known
    shown = {node.name for node in changes.nodes} | set(changes.gone_nodes)
    again = [nodes[name] for name in sorted(freed - shown) if name in nodes]
    taken = {id: workload for id, workload in faulty.taken.items() if id not in moved}
    return (
        replace(changes, nodes=[*changes.nodes, *again]),
        replace(faulty, taken=taken, nodes=nodes, _taken_on=None),
    )


def _holds(workload: Workload | None) -> object:
    """Return what a workload holds, and for whom; None if it holds nothing."""
    if workload is None or workload.state not in ADMITTED:
        return None
    return workload.placement, workload.team, workload.profile, workload.kind


def changes_without(changes: EngineChanges, faulty: Faulty) -> EngineChanges:
    """Return changes as they are planned; what stands in for something stays as it was."""
    reasons = faulty.reasons
    if not reasons:
        return changes
    if changes.whole:
        return replace(changes, snapshot=without(changes.snapshot, faulty))
    return replace(
        changes,
        snapshot=without(changes.snapshot, faulty),
        changed=[workload for workload in changes.changed if faulty.of(workload) is None],
        gone=[id for id in changes.gone if ("workload", id) not in reasons or id in faulty.stand_ins],
        nodes=[with_taken(node, faulty.taken_on(node.name)) for node in changes.nodes if not faulty.has_node(node)],
        gone_nodes=[name for name in changes.gone_nodes if ("node", name) not in reasons],
    )


def with_taken(node: Node, taken: Sequence[Workload]) -> Node:
    """Return a node on which the devices of some workloads are taken."""
    if not taken:
        return node
    whole, shares = set(node.foreign_devices), node.foreign_gpus
    for workload in taken:
        for place in workload.placement:
            if place.node == node.name and place.milli_per_device >= GPU:
                whole |= set(place.devices)
            elif place.node == node.name:
                shares += place.milli_per_device
    if (tuple(sorted(whole)), shares) == (node.foreign_devices, node.foreign_gpus):
        return node
    return replace(node, foreign_devices=tuple(sorted(whole)), foreign_gpus=shares)


def items_of(id: str, team: str, profile: str) -> tuple[Item, ...]:
    """Return what a workload is left out by."""
    return ("workload", id), ("queue", f"{team}/{profile}"), ("team", team), ("profile", profile)


def queue_of(workload: Workload) -> str:
    """Return the queue of a workload, as `team/profile`."""
    return f"{workload.team}/{workload.profile}"


def _try(snapshot: Snapshot, make_plan: MakePlan, faulty: Faulty) -> tuple[IncrementalEngine, Plan] | Exception:
    try:
        return make_plan(without(snapshot, faulty))
    except Exception as error:
        return error


def _items(snapshot: Snapshot) -> list[Item]:
    """List what may be faulty: pools, teams, profiles, nodes, then what runs, then what waits, each by name."""
    order = sorted(snapshot.workloads, key=lambda workload: (workload.state not in ADMITTED, workload.id))
    names: tuple[tuple[Kind, list[str]], ...] = (
        ("pool", sorted(pool.name for pool in snapshot.pools)),
        ("team", _parents_first(snapshot.policies)),
        ("profile", sorted(profile.name for profile in snapshot.profiles)),
        ("node", sorted(node.name for node in snapshot.nodes)),
        ("workload", [workload.id for workload in order]),
    )
    return [(kind, name) for kind, names_of_kind in names for name in names_of_kind]


def _parents_first(policies: Iterable[TeamQuota]) -> list[str]:
    known = {policy.name: policy for policy in policies}
    return sorted(known, key=lambda name: (len(_departments(name, known)), name))


def _departments(name: str, known: Mapping[str, TeamQuota]) -> list[str]:
    """Return the departments of a policy, nearest first."""
    result: list[str] = []
    parent = known[name].parent
    while parent is not None and parent in known and parent not in result:
        result.append(parent)
        parent = known[parent].parent
    return result


def _first_faulty(snapshot: Snapshot, make_plan: MakePlan, faulty: Faulty) -> Item | None:
    """Return the last item of the shortest list with which planning fails; None where it fails with nothing, too."""
    rest = without(snapshot, faulty)
    items = [item for item in _items(rest) if item[1] not in faulty.stand_ins]

    def fails(number: int) -> bool:
        kept = set(items[:number])
        pools = tuple(pool for pool in rest.pools if ("pool", pool.name) in kept)
        part = replace(
            rest,
            pools=pools,
            policies=tuple(policy for policy in rest.policies if ("team", policy.name) in kept),
            profiles=tuple(profile for profile in rest.profiles if ("profile", profile.name) in kept),
            nodes=tuple(node for node in rest.nodes if ("node", node.name) in kept),
            workloads=tuple(
                workload
                for workload in rest.workloads
                if ("workload", workload.id) in kept or workload.id in faulty.stand_ins
            ),
        )
        return isinstance(_try(part, make_plan, Faulty()), Exception)

    low, high = 0, len(items)
    if not items or fails(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return items[high - 1]


def _widened(reasons: Mapping[Item, Exception], snapshot: Snapshot) -> dict[Item, Exception]:
    """Return what is left out, a queue in place of many of its workloads, a team or profile in place of its queues."""
    by_id = {workload.id: workload for workload in snapshot.workloads}
    result = dict(reasons)
    of_queue = _grouped((queue_of(by_id[name]), (kind, name)) for kind, name in result if kind == "workload")
    for queue, members in of_queue.items():
        if len(members) >= MIN_WIDENED:
            result = _replaced(result, members, ("queue", queue))
    queues = [(kind, name) for kind, name in result if kind == "queue"]
    of_team = _grouped((name.rpartition("/")[0], (kind, name)) for kind, name in queues)
    of_profile = _grouped((name.rpartition("/")[2], (kind, name)) for kind, name in queues)
    wider: tuple[tuple[Kind, Mapping[str, list[Item]]], ...] = (("team", of_team), ("profile", of_profile))
    for kind, groups in wider:
        for name, members in groups.items():
            if len(members) >= MIN_WIDENED:
                result = _replaced(result, members, (kind, name))
    return result


def _grouped(pairs: Iterable[tuple[str, Item]]) -> dict[str, list[Item]]:
    groups: defaultdict[str, list[Item]] = defaultdict(list)
    for name, item in pairs:
        groups[name].append(item)
    return groups


def _replaced(reasons: Mapping[Item, Exception], members: Collection[Item], by: Item) -> dict[Item, Exception]:
    error = next((reasons[item] for item in members if item in reasons), None)
    kept = {item: why for item, why in reasons.items() if item not in members}
    return kept if error is None else {**kept, by: error}


def _stand_ins(snapshot: Snapshot, reasons: Mapping[Item, Exception], make_plan: MakePlan) -> Faulty:
    """Choose how what is left out and holds GPUs is counted: in a simple form that can be planned, or as taken."""
    reasons = dict(reasons)
    known = {policy.name: policy for policy in snapshot.policies} if reasons else {}
    for name in known:  # without its department a team would have no limit of it
        for above in _departments(name, known):
            if ("team", above) in reasons:
                reasons.setdefault(("team", name), reasons["team", above])
    faulty = Faulty(reasons)
    for workload in snapshot.workloads if reasons else ():
        if workload.state not in ADMITTED or faulty.of(workload) is None:
            continue
        simple = simplest(workload)
        alone = ("workload", workload.id) in reasons and simple != workload
        rest = Faulty({item: error for item, error in reasons.items() if item[0] != "workload"})
        if alone and not isinstance(_try(replace(snapshot, workloads=(simple,)), make_plan, rest), Exception):
            faulty.stand_ins[workload.id] = simple
        else:
            faulty.taken[workload.id] = workload
    held = on_nodes(faulty.taken.values())
    faulty.nodes = {node.name: node for node in snapshot.nodes if node.name in held}
    return faulty


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
        earlier_runtime=0.0,
        avoid=(),
    )
