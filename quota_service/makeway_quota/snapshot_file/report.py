"""Render a plan as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from makeway_api.tables import Column, aligned, text_table

from ..engine import Evict, LineUsage, Move, Plan, Scale, Snapshot, Start, Waiting
from ..engine.snapshot import GPU, Placement, from_milli
from ..wording import IDS, Names, sentence


def titles(snapshot: Snapshot) -> Names:
    """Return the names that a snapshot has: the titles of its policies."""
    labels = {policy.name: policy.label for policy in snapshot.policies}
    return Names(team=lambda name: labels.get(name, name))


def plan_as_json(plan: Plan, names: Names = IDS) -> dict[str, Any]:
    """Return the plan as plain values; GPUs are whole devices (0.5 = half of one), times are ISO 8601."""
    return {
        "start": [
            {
                "id": s.id,
                "pool": s.pool,
                "placement": _places(s.placement),
                "in_quota": s.in_quota,
                **_because(s, names),
            }
            for s in plan.start
        ],
        "evict": [
            {"id": e.id, "for": e.preemptor, "deadline": _time(e.deadline), **_because(e, names)} for e in plan.evict
        ],
        "move": [
            {
                "id": m.id,
                "from": _places(m.source),
                "to": _places(m.to),
                "for": m.preemptor,
                "deadline": _time(m.deadline),
                **_because(m, names),
            }
            for m in plan.move
        ],
        "scale": [
            {"pool": s.pool, "nodes": s.nodes, "for": list(s.workloads), **_because(s, names)} for s in plan.scale
        ],
        "pending": [_waiting(w, names) for w in plan.pending],
        "refused": [
            {"id": r.id, "code": r.code, "message": sentence(r.facts, names), "numbers": dict(r.numbers)}
            for r in plan.refused
        ],
        "keep": list(plan.keep),
        "terminating": list(plan.terminating),
        "usage": [_line(u) for u in plan.usage],
    }


def _because(decision: Start | Evict | Move | Scale, names: Names) -> dict[str, Any]:
    return {"rule": decision.rule, "why": sentence(decision.facts, names), "numbers": dict(decision.numbers)}


def _waiting(waiting: Waiting, names: Names) -> dict[str, Any]:
    return {
        "id": waiting.id,
        "code": waiting.code,
        "message": sentence(waiting.facts, names),
        "not_before": _time(waiting.not_before),
        "waits_for": list(waiting.waits_for),
        "rule": waiting.rule,
        "numbers": dict(waiting.numbers),
    } | ({"awaits": _places(waiting.awaits)} if waiting.awaits else {})


def _line(line: LineUsage) -> dict[str, Any]:
    return {
        "policy": line.team,
        "pools": list(line.pools),
        "reserved": from_milli(line.reserved),
        "limit": None if line.limit is None else from_milli(line.limit),
        "usage": from_milli(line.usage),
        "guaranteed": from_milli(line.guaranteed),
    }


def _places(placement: Placement) -> list[dict[str, Any]]:
    return [
        {"worker": p.worker, "node": p.node, "devices": list(p.devices)}
        | ({} if p.milli_per_device == GPU else {"gpu_share": p.milli_per_device / GPU})
        for p in placement
    ]


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def plan_as_text(plan: Plan, snapshot: Snapshot) -> str:
    """Return the plan as tables, the actions first."""
    names = titles(snapshot)
    owners = {w.id: f"{w.team}/{w.profile}" for w in snapshot.workloads}
    blocks = [
        _actions("Start", ((s.id, owners[s.id], _where(s.placement), sentence(s.facts, names)) for s in plan.start)),
        _actions("Evict", ((e.id, owners[e.id], f"for {e.preemptor}", sentence(e.facts, names)) for e in plan.evict)),
        _actions("Move", ((m.id, owners[m.id], f"to {_where(m.to)}", sentence(m.facts, names)) for m in plan.move)),
        _actions("Scale up", ((s.pool, f"{s.nodes} nodes", "", sentence(s.facts, names)) for s in plan.scale)),
        _actions("Refused", ((r.id, owners[r.id], r.code, sentence(r.facts, names)) for r in plan.refused)),
        _actions("Wait", ((w.id, owners[w.id], w.code, sentence(w.facts, names)) for w in plan.pending)),
        _block("Usage", text_table(USAGE, plan.usage) if plan.usage else ""),
    ]
    text = "\n".join(block for block in blocks if block)
    idle = "Nothing starts, moves or is evicted.\n\n" if not (plan.acts or plan.scale) else ""
    return f"{idle}{text}" if text else "Nothing to plan.\n"


USAGE: Sequence[Column[LineUsage, str]] = (
    Column("policy", lambda line: line.team),
    Column("pools", lambda line: ", ".join(line.pools) or "all"),
    Column("uses", lambda line: str(from_milli(line.usage))),
    Column("reserved", lambda line: str(from_milli(line.reserved))),
    Column("limit", lambda line: "none" if line.limit is None else str(from_milli(line.limit))),
)


def _where(placement: Placement) -> str:
    return ", ".join(f"{p.node}:{'+'.join(map(str, p.devices))}" if p.devices else p.node for p in placement)


def _actions(title: str, rows: Iterable[tuple[str, ...]]) -> str:
    lines = list(rows)
    return _block(title, aligned(lines) if lines else "")


def _block(title: str, body: str) -> str:
    return "\n".join([title, *(f"  {line}" for line in body.splitlines()), ""]) if body else ""
