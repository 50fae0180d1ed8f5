"""Read and write snapshot files, and print the engine's plan for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from ..engine import reference, schedule
from .reader import SnapshotError, read_snapshot
from .report import plan_as_json, plan_as_text, titles
from .writer import snapshot_as_document, write_snapshot

ENGINES = {"fast": schedule, "reference": reference.schedule}
"""The engine that the service runs, and the same rules in plain code."""

__all__ = [
    "ENGINES",
    "SnapshotError",
    "plan_as_json",
    "plan_as_text",
    "plan_command",
    "read_snapshot",
    "snapshot_as_document",
    "titles",
    "write_snapshot",
]


def plan_command(argv_path: str, format: str, out: IO[str], engine: str = "fast") -> int:
    """Write the plan for a snapshot file as `text` or `json`, and return 0; or one line on bad input, and 2."""
    try:
        snapshot = read_snapshot(Path(argv_path).read_text(encoding="utf-8"), argv_path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        out.write(f"makeway-quota plan: {argv_path}: {reason}\n")
        return 2
    except SnapshotError as error:
        out.write(f"makeway-quota plan: {error}\n")
        return 2
    plan = ENGINES[engine](snapshot)
    if format == "json":
        out.write(json.dumps(plan_as_json(plan, titles(snapshot)), indent=2, ensure_ascii=False) + "\n")
    else:
        out.write(plan_as_text(plan, snapshot))
    return 0
