"""A snapshot in a file: read it, write it, and show the plan that the engine makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import yaml

from ..engine import Snapshot, schedule
from .records import PARTS
from .report import plan_as_json, plan_as_text, titles
from .values import SnapshotError
from .writer import VERSION, snapshot_as_document

__all__ = [
    "SnapshotError",
    "plan_as_json",
    "plan_as_text",
    "plan_command",
    "read_snapshot",
    "snapshot_as_document",
    "titles",
    "write_snapshot",
]


def read_snapshot(text: str) -> Snapshot:
    """Read a snapshot from JSON or YAML; SnapshotError names what is wrong and where."""
    try:
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise SnapshotError(f"not readable as JSON or YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise SnapshotError("the file must hold a mapping with version, now, pools, nodes, …")
    document = dict(document)
    if document.pop("version", None) != VERSION:
        raise SnapshotError(f"version: this program reads version {VERSION}")
    for key in document:
        if key not in PARTS:
            raise SnapshotError(f"unknown key {key!r} at the top; known are version, {', '.join(PARTS)}")
    if "now" not in document:
        raise SnapshotError("now is missing")
    snapshot = Snapshot(**{key: PARTS[key](value, key) for key, value in document.items()})
    _consistent(snapshot)
    return snapshot


def _consistent(snapshot: Snapshot) -> None:
    for kind, names in (
        ("pools", [p.name for p in snapshot.pools]),
        ("nodes", [n.name for n in snapshot.nodes]),
        ("profiles", [p.name for p in snapshot.profiles]),
        ("policies", [p.name for p in snapshot.policies]),
        ("workloads", [w.id for w in snapshot.workloads]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise SnapshotError(f"{kind}: {twice[0]!r} is there more than once")
    pools = {p.name for p in snapshot.pools}
    policies = {p.name for p in snapshot.policies}
    named = [(f"nodes[{at}].pool", n.pool, pools) for at, n in enumerate(snapshot.nodes)]
    named += [(f"profiles[{at}].pools", pool, pools) for at, p in enumerate(snapshot.profiles) for pool in p.pools]
    for at, policy in enumerate(snapshot.policies):
        named += [(f"policies[{at}].quotas", pool, pools) for line in policy.quotas for pool in line.pools]
        named += [(f"policies[{at}].parent", policy.parent, policies)] if policy.parent else []
    for place, name, known in named:
        if name not in known:
            raise SnapshotError(f"{place}: there is no {name!r}; known are {', '.join(sorted(known)) or 'none'}")


def write_snapshot(snapshot: Snapshot, format: str = "yaml") -> str:
    """Write a snapshot as `yaml` or `json`; what is read back is the same snapshot."""
    document = snapshot_as_document(snapshot)
    if format == "json":
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def plan_command(argv_path: str, format: str, out: IO[str]) -> int:
    """Show the plan for a snapshot file as `text` or `json`; 0 with a plan, 2 with one line on bad input."""
    try:
        snapshot = read_snapshot(Path(argv_path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        out.write(f"makeway-quota plan: {argv_path}: {reason}\n")
        return 2
    except SnapshotError as error:
        out.write(f"makeway-quota plan: {argv_path}: {error}\n")
        return 2
    plan = schedule(snapshot)
    if format == "json":
        out.write(json.dumps(plan_as_json(plan, titles(snapshot)), indent=2, ensure_ascii=False) + "\n")
    else:
        out.write(plan_as_text(plan, snapshot))
    return 0
