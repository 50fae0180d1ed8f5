"""How the records of a snapshot file are read: pools, nodes, profiles, policies, workloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from ..engine import Node, Placed, Policy, Pool, Profile, QuotaLine, Settings, Workload
from ..engine.state import WEIGHTS
from .values import (
    Reader,
    SnapshotError,
    fail,
    gpus_each,
    integer,
    listed,
    maybe,
    maybe_text,
    moment,
    name,
    not_negative,
    one_of,
    priority,
    ranks,
    thousandths,
    whole,
    yes_no,
)


def _record(kind: type[Any], known: Mapping[str, tuple[str, Reader]]) -> Reader:
    """Make a reader of a mapping: each key with the field it fills and how its value is read."""
    needed = [key for key, (name, _) in known.items() if _has_no_default(kind, name)]

    def read(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise fail(place, "a mapping", value)
        for key in value:
            if key not in known:
                raise SnapshotError(f"{place}: unknown key {key!r}; known are {', '.join(known)}")
        for key in needed:
            if key not in value:
                raise SnapshotError(f"{place}: {key} is missing")
        return kind(**{known[key][0]: known[key][1](each, f"{place}.{key}") for key, each in value.items()})

    return read


def _has_no_default(kind: type[Any], name: str) -> bool:
    found = {field.name: field for field in fields(kind)}[name]
    return found.default is MISSING and found.default_factory is MISSING


def _same(**readers: Reader) -> dict[str, tuple[str, Reader]]:
    return {key: (key, reader) for key, reader in readers.items()}


_settings = _record(
    Settings,
    _same(
        consolidation=yes_no,
        victim_order=one_of("newest", "cheapest"),
        starvation_after=not_negative,
        history_half_life=not_negative,
        user_fairness=yes_no,
        fair_share=one_of("order", "reclaim"),
        in_team_preemption=yes_no,
        yields_after=not_negative,
        grace=not_negative,
    ),
)
_pool = _record(
    Pool,
    _same(
        name=name,
        resource=name,
        capacity=maybe(thousandths),
        kind=one_of("static", "autoscaled"),
        strategy=one_of("pack", "spread"),
        profiles=listed(name),
        consolidation=yes_no,
        max_nodes=whole,
        booting=whole,
        node_gpus=whole,
        node_cpu=thousandths,
        node_memory=whole,
    ),
)


def _foreign(value: Any, place: str) -> Any:
    known = {"gpus": thousandths, "cpu": thousandths, "memory": whole, "devices": listed(whole)}
    if not isinstance(value, dict):
        raise fail(place, "a mapping", value)
    for key in value:
        if key not in known:
            raise SnapshotError(f"{place}: unknown key {key!r}; known are {', '.join(known)}")
    return {f"foreign_{key}": known[key](each, f"{place}.{key}") for key, each in value.items()}


_plain_node = _record(
    Node,
    _same(
        name=name,
        pool=name,
        gpus=whole,
        cpu=thousandths,
        memory=whole,
        ready=yes_no,
        cordoned=yes_no,
        devices=listed(whole),
        model=maybe_text,
    )
    | {f"foreign_{key}": (f"foreign_{key}", lambda value, _: value) for key in ("gpus", "cpu", "memory", "devices")},
)


def _node(value: Any, place: str) -> Node:
    if isinstance(value, dict):
        for key in value:
            if str(key).startswith("foreign_"):
                raise SnapshotError(f"{place}: unknown key {key!r}; write foreign: {{{str(key)[8:]}: …}}")
        value = dict(value)
        value.update(_foreign(value.pop("foreign", {}), f"{place}.foreign"))
    node: Node = _plain_node(value, place)
    return node


_profile = _record(
    Profile,
    _same(
        name=name,
        gpus=gpus_each,
        workers=whole,
        min_workers=maybe(whole),
        cpu=thousandths,
        memory=whole,
        pools=listed(name),
        policies=ranks,
        min_runtime=not_negative,
        reclaim_after=not_negative,
        grace=maybe(not_negative),
        time_limit=maybe(not_negative),
        models=listed(name),
    ),
)
_line = _record(
    QuotaLine, _same(pools=listed(name), reserved=thousandths, limit=maybe(thousandths), lend=maybe(thousandths))
)
_policy = _record(
    Policy,
    _same(
        name=name,
        weight=one_of(*WEIGHTS),
        priority=integer,
        parent=maybe(name),
        history=thousandths,
        title=maybe_text,
        quotas=listed(_line),
    ),
)
_placed = _record(Placed, _same(node=name, worker=whole, devices=listed(whole)) | {"gpu_share": ("milli", thousandths)})


def _placement(value: Any, place: str) -> tuple[Placed, ...]:
    if isinstance(value, list):
        value = [{"worker": at, **each} if isinstance(each, dict) else each for at, each in enumerate(value)]
    found: tuple[Placed, ...] = listed(_placed)(value, place)
    return found


_workload = _record(
    Workload,
    _same(
        id=name,
        kind=one_of("session", "job"),
        policy=name,
        profile=name,
        owner=maybe_text,
        priority=priority,
        preemptible=maybe(yes_no),
        submitted_at=moment,
        state=one_of("pending", "starting", "running", "checkpointing", "succeeded", "failed", "cancelled", "stopped"),
        started_at=maybe(moment),
        placement=_placement,
        attempt=whole,
        last_checkpoint_at=maybe(moment),
        evicted_for=maybe(name),
        deadline=maybe(moment),
        nomination=_placement,
        paused=yes_no,
        failed_node=maybe(name),
        gpus=maybe(gpus_each),
        workers=maybe(whole),
        min_workers=maybe(whole),
        cpu=maybe(thousandths),
        memory=maybe(whole),
        time_limit=maybe(not_negative),
        expected=maybe(not_negative),
        ran=not_negative,
        avoid=listed(name),
    ),
)
PARTS: dict[str, Reader] = {
    "now": moment,
    "settings": _settings,
    "pools": listed(_pool),
    "nodes": listed(_node),
    "profiles": listed(_profile),
    "policies": listed(_policy),
    "workloads": listed(_workload),
    "paused": listed(name),
}
