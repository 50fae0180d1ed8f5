"""Write a snapshot as the document that the reader reads."""

from __future__ import annotations

import json
from typing import Any

import yaml

from ..engine import Node, Placed, Snapshot, Workload
from ..policy.models import QuotaTable, SettingsTable
from .models import FileForeign, FileNode, FilePlaced, FilePolicy, FilePool, FileProfile, FileTable, FileWorkload

DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def write_snapshot(snapshot: Snapshot, format: str = "yaml") -> str:
    """Return a snapshot as `yaml` or `json`; what is read back is the same snapshot."""
    document = snapshot_as_document(snapshot)
    if format == "json":
        return json.dumps(document, indent=2) + "\n"
    return yaml.dump(document, Dumper=DUMPER, sort_keys=False, allow_unicode=True)


def snapshot_as_document(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as the document that `read_snapshot` reads; what has its default is left out."""
    return FileTable.of(
        snapshot,
        version=1,
        settings=SettingsTable.of(snapshot.settings),
        pools=tuple(FilePool.of(pool) for pool in snapshot.pools),
        nodes=tuple(_node(node) for node in snapshot.nodes),
        profiles=tuple(FileProfile.of(profile) for profile in snapshot.profiles),
        policies=tuple(
            FilePolicy.of(policy, quotas=tuple(QuotaTable.of(line) for line in policy.quotas))
            for policy in snapshot.policies
        ),
        workloads=tuple(_workload(work) for work in snapshot.workloads),
    ).written()


def _node(node: Node) -> FileNode:
    foreign = {key: getattr(node, f"foreign_{key}") for key in FileForeign.model_fields}
    return FileNode.of(node, foreign=FileForeign.of(**foreign))


def _workload(work: Workload) -> FileWorkload:
    placed = {"placement": _placement(work.placement), "nomination": _placement(work.nomination)}
    return FileWorkload.of(work, **placed)


def _placement(placement: tuple[Placed, ...]) -> tuple[FilePlaced, ...]:
    return tuple(FilePlaced.of(placed, gpu_share=placed.milli) for placed in placement)
