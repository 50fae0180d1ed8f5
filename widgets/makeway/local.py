"""Run `%%train --local`: the same cell, files and variables as a process of this notebook; nothing is submitted."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .problems import JobError, Refused, WatchStopped
from .submission import Submission

JOB_ONLY = (
    "MAKEWAY_JOB_ID", "MAKEWAY_JOB_NAME", "MAKEWAY_ATTEMPT", "MAKEWAY_JOB_DIR", "MAKEWAY_CHECKPOINT_DIR",
    "MAKEWAY_STOP_FILE", "MAKEWAY_PROGRESS_FILE",
)  # fmt: skip


def run(submission: Submission) -> Any:
    """Run the cell to its end and print its output; return its result, or raise JobError with its exception."""
    files = submission.collect_files()
    with tempfile.TemporaryDirectory(prefix="makeway-local-") as name:
        folder = Path(name)
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(file.data))
        result, error = folder / ".makeway/result.pkl", folder / ".makeway/error.json"
        env = {key: value for key, value in os.environ.items() if key not in JOB_ONLY}
        env |= {**submission.env, "MAKEWAY_RESULT_FILE": str(result), "MAKEWAY_ERROR_FILE": str(error)}
        code = _watch([sys.executable, "-u", ".makeway/run.py"], folder, env)
        if code:
            raise _failure(code, error)
        return _value(result)


def _watch(command: list[str], folder: Path, env: dict[str, str]) -> int:
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                print(line, end="", flush=True)
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise WatchStopped("Stopped. The cell ran in this notebook, so it has ended.") from None


def _failure(code: int, error: Path) -> JobError:
    """Return the cell's exception without its traceback, which was printed already."""
    if error.exists():
        report = json.loads(error.read_text())
        return JobError("", report["type"], report["message"])
    if code < 0:
        return JobError("", "Killed", f"the cell's process was ended by signal {-code}")
    return JobError("", "Failed", f"the cell ended with exit code {code}")


def _value(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:
        raise Refused(
            f"the cell succeeded, but its result cannot be read here ({type(error).__name__}: {error})."
        ) from None
