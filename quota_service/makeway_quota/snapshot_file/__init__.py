"""Read and write snapshot files, and print the engine's plan for one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import IO

from ..engine import Snapshot, reference, schedule
from .reader import SnapshotError, read_snapshot
from .report import plan_as_json, plan_as_text, titles
from .writer import snapshot_as_document, write_snapshot

log = logging.getLogger(__name__)

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


def plan_command(path: str, format: str, out: IO[str], engine: str = "fast") -> int:
    """Write the plan for a snapshot file as `text` or `json` and return the exit code 0; or an error and 2.

    Bad input, and an error of the engine, is reported in one line; the traceback is in the log, at level debug.
    """
    try:
        snapshot = read_snapshot(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        out.write(f"makeway-quota plan: {path}: {reason}\n")
        return 2
    except SnapshotError as error:
        out.write(f"makeway-quota plan: {error}\n")
        return 2
    try:
        out.write(_formatted_plan(snapshot, format, engine))
    except Exception as error:
        log.debug("The engine failed", exc_info=True)
        what = " ".join(f"{type(error).__name__} {error}".split())
        out.write(
            f"makeway-quota plan: {path}: the engine failed: {what}. Please report it with this file; "
            "--log-level debug before plan shows where it happened\n"
        )
        return 2
    return 0


def _formatted_plan(snapshot: Snapshot, format: str, engine: str) -> str:
    plan = ENGINES[engine](snapshot)
    if format == "json":
        return json.dumps(plan_as_json(plan, titles(snapshot)), indent=2, ensure_ascii=False) + "\n"
    return plan_as_text(plan, snapshot)
