"""Run `%%train --local`: the same cell, files and variables as a process of this notebook; nothing is submitted."""

from __future__ import annotations

import base64
import codecs
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import payload
from .pacing import Output
from .problems import CellStopped, JobError
from .submission import Submission

JOB_ONLY = (
    "MAKEWAY_JOB_ID", "MAKEWAY_JOB_NAME", "MAKEWAY_ATTEMPT", "MAKEWAY_JOB_DIR", "MAKEWAY_CHECKPOINT_DIR",
    "MAKEWAY_STOP_FILE", "MAKEWAY_PROGRESS_FILE",
)  # fmt: skip
POLL_SECONDS = 0.05
"""Seconds between two writes into the notebook"""
READ = 65_536
END_SECONDS = 10.0
"""Seconds that the cell has to end after the stop button"""


def run(submission: Submission) -> Any:
    """Run the cell to its end and print its output; return its result, or raise JobError with its exception."""
    files = submission.collect_files()
    for note in submission.check():
        print(note)
    with tempfile.TemporaryDirectory(prefix="makeway-local-") as name:
        folder = Path(name)
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(file.data))
            if file.executable:
                path.chmod(0o755)
        result, error = folder / ".makeway/result.pkl", folder / ".makeway/error.json"
        env = {**_environment(), **submission.env}
        env |= {"MAKEWAY_RESULT_FILE": str(result), "MAKEWAY_ERROR_FILE": str(error)}
        code = _watch([sys.executable, "-u", ".makeway/run.py"], folder, env)
        if code:
            raise _failure(code, error)
        return payload.result_of(result.read_bytes()) if result.exists() else None


def _environment() -> dict[str, str]:
    """Return the environment of this kernel without the variables of its own job and its Matplotlib backend."""
    env = {key: value for key, value in os.environ.items() if key not in JOB_ONLY}
    if env.get("MPLBACKEND", "").startswith("module://matplotlib_inline"):
        del env["MPLBACKEND"]
    return env


def _watch(command: list[str], folder: Path, env: dict[str, str]) -> int:
    """Print what the process writes, until it has ended; return its exit code, negative for a signal."""
    with _process_in_own_group(command, folder, env) as process:
        try:
            _forward_output(process, Output())
            return process.wait()
        except KeyboardInterrupt:
            _signal(process, signal.SIGTERM)
            _forward_output(process, Output(), time.monotonic() + END_SECONDS)
            raise CellStopped("Stopped. The cell ran in this notebook, so it has ended.") from None


@contextmanager
def _process_in_own_group(command: list[str], folder: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the running process; it and what it has left behind are killed at the end."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(OSError):
        os.killpg(process.pid, number)


def _forward_output(process: subprocess.Popen[bytes], output: Output, deadline: float = float("inf")) -> None:
    """Print the output as it comes, until the process has ended; its own children may keep the pipe open."""
    assert process.stdout is not None
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    ended, open_ = False, True
    while open_ and not ended and time.monotonic() < deadline:
        ended = process.poll() is not None  # before the last look, so that nothing is left in the pipe
        if not ended:
            select.select([pipe], [], [], POLL_SECONDS)
        data, open_ = _read(pipe)
        if text := decode(data):
            output.write(text)
        if not ended and data:
            time.sleep(POLL_SECONDS)
    output.write(decode(b"", final=True))
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(1.0, max(0.0, deadline - time.monotonic())))


def _read(pipe: int) -> tuple[bytes, bool]:
    """Return what is in the pipe, and whether it is still open."""
    parts: list[bytes] = []
    for _ in range(16):  # 1 MB, the size of the largest pipe: a fast writer has to wait for what is shown
        try:
            data = os.read(pipe, READ)
        except BlockingIOError:
            return b"".join(parts), True
        if not data:
            return b"".join(parts), False
        parts.append(data)
    return b"".join(parts), True


def _failure(code: int, error: Path) -> JobError:
    """Return the cell's exception without its traceback, which was printed already."""
    if error.exists():
        report = json.loads(error.read_text())
        return JobError("", report["type"], report["message"])
    if code < 0:
        return JobError("", "Killed", f"the cell's process was ended by signal {-code}")
    return JobError("", "Failed", f"the cell ended with exit code {code}")
