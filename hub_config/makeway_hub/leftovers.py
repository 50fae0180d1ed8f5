"""What an earlier run left behind: a Hub or proxy that nobody stopped, because their parent was killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from .settings import Settings

PATIENCE = 10.0


def clear(settings: Settings) -> list[str]:
    """Stop what an earlier run from this state directory left, and say what; notebooks stay, the new Hub adopts them.

    Only called while this process holds the state directory, so nobody needs them any more.
    """
    told = []
    for name, pid_file, word in (
        ("the Hub", settings.state.root / "hub.pid", "jupyterhub"),
        ("its proxy", settings.state.proxy_pid, "configurable-http-proxy"),
    ):
        pid = _read(pid_file)
        if pid and word in _command(pid):
            stop(pid)
            told.append(f"{name} (process {pid})")
        pid_file.unlink(missing_ok=True)
    return told


def stop(pid: int, patience: float = PATIENCE) -> None:
    """Ask a process to end, wait, and then make it."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _command(pid):
            time.sleep(0.05)


def _read(path: Path) -> int:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
