"""A snapshot as the document that the reader reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from ..engine import Node, Placed, Snapshot

VERSION = 1


def snapshot_as_document(snapshot: Snapshot) -> dict[str, Any]:
    """Write a snapshot as the document that `read_snapshot` reads; what has its default is left out."""
    return {
        "version": VERSION,
        "now": snapshot.now,
        "settings": _written(snapshot.settings),
        "pools": [_written(pool) for pool in snapshot.pools],
        "nodes": [_written_node(node) for node in snapshot.nodes],
        "profiles": [_written(profile) for profile in snapshot.profiles],
        "policies": [_written(policy) for policy in snapshot.policies],
        "workloads": [_written(workload) for workload in snapshot.workloads],
        "paused": list(snapshot.paused),
    }


_IN_THOUSANDTHS = {"capacity", "reserved", "limit", "lend", "history", "cpu", "node_cpu", "foreign_cpu", "foreign_gpus"}


def _written(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(value):
        each = getattr(value, field.name)
        if each == field.default and field.default is not MISSING:
            continue
        milli = field.name in _IN_THOUSANDTHS or (field.name == "gpus" and not isinstance(value, Node))
        if milli and each is not None:
            each = each // 1000 if each % 1000 == 0 else each / 1000
        if isinstance(value, Placed) and field.name == "milli":
            found["gpu_share"] = each / 1000
        elif isinstance(each, tuple):
            found[field.name] = [_written_item(item) for item in each]
        else:
            found[field.name] = each
    return found


def _written_item(item: Any) -> Any:
    if isinstance(item, Sequence):
        return item if isinstance(item, str) else list(item)
    return _written(item) if hasattr(item, "__dataclass_fields__") else item


def _written_node(node: Node) -> dict[str, Any]:
    plain = _written(node)
    foreign = {key[8:]: plain.pop(key) for key in list(plain) if key.startswith("foreign_")}
    return {**plain, "foreign": foreign} if foreign else plain
