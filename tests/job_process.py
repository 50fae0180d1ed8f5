"""A process of a job without its launcher: a fresh `makeway.checkpoint`, the stop file, and the progress file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

CODE = Path(__file__).parents[1] / "widgets" / "makeway" / "checkpoint.py"
VARIABLES = (
    "MAKEWAY_STOP_FILE",
    "MAKEWAY_JOB_ID",
    "MAKEWAY_CHECKPOINT_DIR",
    "MAKEWAY_PROGRESS_FILE",
    "MAKEWAY_ATTEMPT",
)


def fresh() -> ModuleType:
    """Return a new copy of the module, as a new process would have it."""
    module = ModuleType("checkpoint_under_test")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(CODE.read_text(), str(CODE), "exec"), module.__dict__)
    return module


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return the environment of a job in this folder."""
    values = (tmp_path / "stop.json", "j-1", tmp_path / "kept", tmp_path / "progress.json", "1")
    return {**dict(zip(VARIABLES, map(str, values), strict=True)), **more}


def ask(tmp_path: Path, **more: object) -> None:
    """Write the notice of a preemption."""
    notice = {"reason": "bo wants it", "by_team": "devops", "at": time.time(), "deadline": time.time() + 20, **more}
    (tmp_path / "stop.json").write_text(json.dumps(notice))


def progress(tmp_path: Path) -> dict[str, Any]:
    """Return what the process has reported."""
    result: dict[str, Any] = json.loads((tmp_path / "progress.json").read_text())
    return result


def names(job: ModuleType) -> list[str]:
    """Return what is in the folder of checkpoints, without what is hidden."""
    return sorted(name for name in os.listdir(job.dir) if not name.startswith("."))


def start(tmp_path: Path, code: str, **more: str) -> subprocess.Popen[str]:
    """Start a process of the job."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment(tmp_path, **more)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
