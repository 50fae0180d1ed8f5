"""Read how far a worker is, and how it ended, from what its job wrote; used by `remote.py`."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from .attempt import Attempt
from .files import read_json

MAX_PROGRESS = 16_000
"""Bytes of the progress in a report, which `makeway.checkpoint` bounds to less"""
FLAGS = ("killed", "acknowledged", "completed", "timed_out", "storage_failed")
"""What a report says about an end"""


def report_of(attempt: Attempt, status: dict[str, Any] | None) -> dict[str, Any]:
    """Return how far the worker is, and (with a status) how it ended; the job may have written anything there."""
    progress = read_json(attempt.path("progress.json"))
    report: dict[str, Any] = {
        "started_at": time_of(read_json(attempt.path("running.json")).get("at")),
        "step": _step(progress.get("step")),
        "saved_at": time_of(progress.get("saved_at")),
        "progress": _bounded(progress.get("progress")),
        "noticed": os.path.exists(attempt.path("stop.json")),
    }
    if status is not None:
        report["noticed"] = bool(status["noticed"])
        report["exit"] = {
            **{key: bool(status.get(key)) for key in FLAGS},
            "exit_code": int(status["exit_code"]),
            "ended_at": time_of(status["ended_at"]) or 0.0,
            "message": _text(str(status["message"] or ""))[:4000],
        }
    return report


def without_progress(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without the progress, which alone is sent less often."""
    return {key: value for key, value in report.items() if key != "progress"}


def _bounded(value: object) -> object:
    """Return what the job wrote about its progress if it is small; the service checks what is in it."""
    if not isinstance(value, dict):
        return None
    try:
        small = len(json.dumps(value, allow_nan=False)) <= MAX_PROGRESS
    except (TypeError, ValueError, RecursionError):
        return None
    return value if small else None


def time_of(value: object) -> float | None:
    """Return a time in Unix seconds, or a duration, if a value is one that the service can read."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value < 1e11 else None


def _step(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
