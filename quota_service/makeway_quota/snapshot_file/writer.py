"""Write a snapshot as YAML or JSON."""

from __future__ import annotations

import json
from typing import Any

import yaml

from ..engine import Snapshot
from .models import SnapshotTable

DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def write_snapshot(snapshot: Snapshot, format: str = "yaml") -> str:
    """Return a snapshot as `yaml` or `json`; what is read back is the same snapshot."""
    document = snapshot_as_document(snapshot)
    if format == "json":
        return json.dumps(document, indent=2) + "\n"
    return yaml.dump(document, Dumper=DUMPER, sort_keys=False, allow_unicode=True)


def snapshot_as_document(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as the document that `read_snapshot` reads; what has its default is left out."""
    return SnapshotTable.of(snapshot, version=1).written()
