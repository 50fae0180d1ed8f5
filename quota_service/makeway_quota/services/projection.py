"""Project a world to the state in which its plans change nothing any more, for previews of a policy.

Plans are applied one after the other at the same time of the clock: in the next plan the victims of the last one are
gone, and no workload ends or is submitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..control.world.names import names_of
from ..engine.plan import Evict, Move, Plan, Refusal, Start, Waiting
from ..engine.schedule import schedule
from ..engine.snapshot import ADMITTED, Placement, Snapshot
from ..engine.snapshot import Workload as EngineWorkload
from ..store.records import Workload
from ..wording import sentence

MAX_PLANS = 6
"""The most plans that are applied; two are enough, except for chains of moves."""


@dataclass(slots=True)
class Projection:
    """The workloads whose state changes: id to the sentence with the reason."""

    starts: dict[str, str] = field(default_factory=dict)
    evicts: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    waits: dict[str, tuple[str, str]] = field(default_factory=dict)
    """id to reason code and sentence; evicted workloads are not in it"""


def projection(snapshot: Snapshot, rows: Mapping[str, Workload], *, all_names: bool = True) -> Projection:
    """Carry out plans until nothing changes any more; sentences call jobs by their names.

    Without `all_names` each sentence is one for the team of its workload, which knows no names of others.
    """
    result, names = Projection(), names_of(snapshot.policies, rows)

    def sentence_of(decision: Start | Evict | Move | Refusal | Waiting) -> str:
        return sentence(decision.facts, names if all_names else names.to(rows[decision.id].team))

    admitted = {workload.id for workload in snapshot.workloads if workload.state in ADMITTED}
    for _ in range(MAX_PLANS):
        plan = schedule(snapshot)
        evictions: tuple[Evict | Move, ...] = (*plan.evict, *plan.move)
        for eviction in evictions:
            id, message = eviction.id, sentence_of(eviction)
            if id in admitted:
                result.evicts.setdefault(id, message)
            else:
                result.starts.pop(id, None)
        for start in plan.start:
            if start.id not in admitted:
                result.starts[start.id] = sentence_of(start)
        result.refused |= {refusal.id: sentence_of(refusal) for refusal in plan.refused}
        result.waits = {w.id: (w.code, sentence_of(w)) for w in plan.pending if w.id not in result.evicts}
        if not (plan.start or plan.evict or plan.move or plan.refused or plan.terminating):
            break
        snapshot = replace(snapshot, workloads=tuple(_applied(snapshot, plan)))
    return result


def _applied(snapshot: Snapshot, plan: Plan) -> Iterator[EngineWorkload]:
    """Yield the workloads as they are once the plan is applied and every evicted workload has left."""
    starts = {start.id: start for start in plan.start}
    evicted = {terminating.id for terminating in plan.evict}
    moved = {move.id: move for move in plan.move}
    nominations = {waiting.id: waiting.nomination for waiting in plan.pending}
    refused = {refusal.id for refusal in plan.refused}
    for workload in snapshot.workloads:
        id = workload.id
        if id in refused:
            continue
        if id in starts:
            yield replace(
                workload, state="running", placement=starts[id].placement, nomination=(), started_at=snapshot.now
            )
        elif id in moved:
            yield _pending(workload, nomination=moved[id].to)
        elif id in evicted or workload.state == "checkpointing":
            yield from _requeued(workload)
        elif workload.state == "pending":
            yield replace(workload, nomination=nominations.get(id, ()))
        else:
            yield workload


def _requeued(workload: EngineWorkload) -> Iterator[EngineWorkload]:
    """Requeue an evicted job; end an evicted session."""
    if workload.kind == "job":
        yield _pending(workload, workload.nomination)


def _pending(workload: EngineWorkload, nomination: Placement) -> EngineWorkload:
    return replace(
        workload,
        state="pending",
        placement=(),
        nomination=nomination,
        started_at=None,
        evicted_for=None,
        deadline=None,
        attempt=workload.attempt + 1,
    )
