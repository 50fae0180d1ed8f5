"""Plan one more request without applying the plan: when it would start, its victims, or why it would not (what-if)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from .incremental import IncrementalEngine
from .index.cluster import Cluster
from .index.pending import Pending
from .plan import Demand, Evict, Fact, Facts, Move, Numbers, Offer, OfferVictim, Plan, Start, Waiting
from .snapshot import ADMITTED, Kind, Node, Profile, Snapshot, Workload, from_milli

ASKING = "?"
"""The id of the workload that an offer adds to the snapshot."""


class WhatIf:
    """Answer what-if requests about a snapshot, each as if it were the only one.

    Not thread-safe. `pause` is called between the steps of a search for victims, and may block.
    """

    def __init__(self, snapshot: Snapshot, pause: Callable[[], None] | None = None) -> None:
        self._pause = pause
        self.snapshot = replace(snapshot, nodes=(), workloads=())
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._workloads = {workload.id: workload for workload in snapshot.workloads}
        self._preemptors = Counter(w.evicted_for for w in snapshot.workloads if w.state == "checkpointing")
        """The number of workloads that terminate for each id."""
        self._incremental: dict[bool, IncrementalEngine] = {}
        self._shown: dict[bool, set[str]] = {}
        """The ids of the workloads that each engine holds."""

    def renew(self, snapshot: Snapshot) -> None:
        """Apply a newer snapshot; workloads and nodes that are the same objects as before are left alone."""
        workloads, nodes = {w.id for w in snapshot.workloads}, {node.name for node in snapshot.nodes}
        self.change(
            snapshot,
            [w for w in snapshot.workloads if self._workloads.get(w.id) is not w],
            self._workloads.keys() - workloads,
            [node for node in snapshot.nodes if self._nodes.get(node.name) is not node],
            self._nodes.keys() - nodes,
        )

    def change(
        self,
        snapshot: Snapshot,
        changed: Iterable[Workload] = (),
        gone: Iterable[str] = (),
        nodes: Iterable[Node] = (),
        gone_nodes: Iterable[str] = (),
    ) -> None:
        """Apply new and changed workloads and nodes, the ids of removed ones, and all else of a snapshot."""
        self.snapshot = replace(snapshot, nodes=(), workloads=())
        new, removed, come, away = {w.id: w for w in changed}, set(gone), tuple(nodes), tuple(gone_nodes)
        touched = self._take(new, removed)
        self._nodes.update((node.name, node) for node in come)
        for name in away:
            self._nodes.pop(name, None)
        for non_preemptible, incremental in self._incremental.items():
            shown = self._shown[non_preemptible]
            there = {id for id in touched if self._matters(id, non_preemptible)}
            not_there = (touched - there) & shown
            incremental.use(self.snapshot)
            if come or away:
                incremental.change_nodes(come, away)
            incremental.change([self._workloads[id] for id in there if id in new or id not in shown], not_there)
            shown |= there
            shown -= not_there

    def _take(self, changed: Mapping[str, Workload], gone: Collection[str]) -> set[str]:
        """Apply workloads; return the ids of these, and of those that they terminated for or terminate for now."""
        touched = {*changed, *gone}
        for id in tuple(touched):
            for workload, sign in ((self._workloads.pop(id, None), -1), (changed.get(id), 1)):
                if workload is not None and workload.state == "checkpointing" and workload.evicted_for is not None:
                    self._preemptors[workload.evicted_for] += sign
                    touched.add(workload.evicted_for)
        self._workloads.update(changed)
        return touched

    def offer(
        self,
        team: str,
        profile: str,
        kind: Kind = "session",
        owner: str = "",
        *,
        preemptible: bool | None = None,
        priority: int = 0,
    ) -> Offer:
        """Return what a request would get right now, from a plan with it."""
        request = Workload(
            ASKING,
            team,
            profile,
            owner=owner,
            kind=kind,
            priority=priority,
            preemptible=preemptible,
            submitted_at=self.snapshot.now,
        )
        incremental = self._engine_for(request.non_preemptible)
        incremental.change([request])
        try:
            plan = incremental.plan(self.snapshot.now)
            return _read(incremental.cluster, request, plan, incremental.in_quota(request))
        finally:
            incremental.change((), [ASKING])

    def _engine_for(self, non_preemptible: bool) -> IncrementalEngine:
        """Return the engine for requests of this kind; it is built once."""
        if non_preemptible not in self._incremental:
            shown = self._shown[non_preemptible] = {id for id in self._workloads if self._matters(id, non_preemptible)}
            workloads = tuple(workload for id, workload in self._workloads.items() if id in shown)
            snapshot = replace(self.snapshot, nodes=tuple(self._nodes.values()), workloads=workloads)
            self._incremental[non_preemptible] = IncrementalEngine(snapshot, True, self._pause)
        return self._incremental[non_preemptible]

    def _matters(self, id: str, non_preemptible: bool) -> bool:
        """Whether a workload can change an offer; pending jobs cannot change the offer for a session, but cost time."""
        workload = self._workloads.get(id)
        if workload is None:
            return False
        return workload.state in ADMITTED or self._preemptors[id] > 0 or _served_before(workload, non_preemptible)


def _served_before(workload: Workload, non_preemptible: bool) -> bool:
    """Whether a pending workload may be served before a request of this kind."""
    if workload.state != "pending":
        return False
    return not non_preemptible or workload.non_preemptible or bool(workload.nomination)


def _read(cluster: Cluster, request: Workload, plan: Plan, in_quota: bool) -> Offer:
    """Return the plan's decision for the added workload as an offer; `in_quota` holds if it waits."""
    for start in plan.start:
        if start.id == ASKING:
            offer = _answer(request, start.facts, start.numbers, start.in_quota)
            return replace(offer, code="ready_now", reason="starting", facts=_ready(start))
    for refusal in plan.refused:
        if refusal.id == ASKING:
            offer = _answer(request, refusal.facts, refusal.numbers, False)
            return replace(offer, code="refused", reason=refusal.code)
    waiting = _waiting(plan, request)
    offer = _answer(request, waiting.facts, waiting.numbers, in_quota)
    if waiting.code == "reclaiming":
        return _reclaiming(cluster, offer, plan, waiting)
    code: Literal["refused", "wait"] = "refused" if waiting.code in ("queue_closed", "too_large") else "wait"
    return replace(offer, code=code, reason=waiting.code, demand=_demand(plan))


def _demand(plan: Plan) -> tuple[Demand, ...]:
    """Return the demand in the order of rights, up to the request's own; nothing where no machine could run it."""
    at = next((at for at, one in enumerate(plan.demand) if one.id == ASKING), None)
    return () if at is None else plan.demand[: at + 1]


def _waiting(plan: Plan, request: Workload) -> Waiting:
    """Return why the request waits, without writing the reasons of all others."""
    pending = plan.pending
    if isinstance(pending, Pending):
        return pending.of(request)
    return next(waiting for waiting in pending if waiting.id == request.id)


def _answer(request: Workload, facts: Facts, numbers: Numbers, in_quota: bool) -> Offer:
    return Offer(request.team, request.profile, "wait", "no_free_gpus", facts, in_quota=in_quota, numbers=numbers)


def _reclaiming(cluster: Cluster, offer: Offer, plan: Plan, waiting: Waiting) -> Offer:
    wait = max(0.0, (waiting.not_before or cluster.now) - cluster.now)
    victims = _named(cluster, [eviction for eviction in plan.evict if eviction.preemptor == ASKING])
    moves = [move for move in plan.move if move.preemptor == ASKING]
    moved = _named(cluster, moves)
    smaller = sum(move.rule == "shrink" for move in moves)
    return replace(
        offer,
        code="ready_after_reclaim",
        reason="reclaiming",
        facts=_after(victims, len(moved) - smaller, smaller, wait),
        seconds=wait,
        victims=victims,
        moved=moved,
    )


def _named(cluster: Cluster, terminating: Sequence[Evict | Move]) -> tuple[OfferVictim, ...]:
    workloads = [cluster.workloads[change.id] for change in terminating]
    return tuple(OfferVictim(w.id, w.owner, w.team, _held(w, cluster.profiles.get(w.profile))) for w in workloads)


def _held(workload: Workload, profile: Profile | None) -> int:
    named = sum(placed.milli_per_device * len(placed.devices) for placed in workload.placement)
    gpus_each = workload.gpus if workload.gpus is not None else profile.gpus if profile else 0
    return named or gpus_each * max(1, len(workload.placement))


def _ready(start: Start) -> Facts:
    return (Fact("ready_now" if start.in_quota else "ready_now_over_quota"),)


def _after(victims: Sequence[OfferVictim], moved: int, smaller: int, wait: float) -> Facts:
    """Return when the request would be ready, and by which victims, moves and shrunk gangs."""
    ready = Fact("ready_after_reclaim", {"within": wait, "moved": moved, "shrunk": smaller})
    return (
        ready,
        *(
            Fact(
                "by_victim",
                {"victim": v.id, "kind": "job", "owner": v.owner, "team": v.team, "gpus": from_milli(v.gpus)},
            )
            for v in victims
        ),
    )
