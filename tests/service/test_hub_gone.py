"""A service stops with the Hub that started it, also if that was gone before it looked, and when it is told to."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn
from makeway_quota.main import _Server


async def _serve(server: _Server, seconds: float) -> bool:
    """Whether it stopped by itself."""
    try:
        await asyncio.wait_for(server._watch_parent(), seconds)
    except TimeoutError:
        return False
    return server.should_exit and server.orphaned


@pytest.fixture
def gone() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_a_service_stops_if_its_hub_was_gone_at_its_start(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEWAY_HUB_PID", str(gone))
    assert await _serve(_Server(uvicorn.Config("nothing:app"), lambda: None), 30)


async def test_a_service_keeps_running_while_its_hub_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEWAY_HUB_PID", str(os.getppid()))
    assert not await _serve(_Server(uvicorn.Config("nothing:app"), lambda: None), 1.5)


def opened(files: Path) -> set[str]:
    result = set()
    for file in files.iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            result.add(os.readlink(file))
    return result


def test_a_service_that_still_starts_stops_when_it_is_told_to(tmp_path: Path) -> None:
    """The first process of a container does not end by a signal that it does not handle."""
    lock = tmp_path / "service.lock"
    with lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        environ = {**os.environ, "MAKEWAY_STATE_DIR": str(tmp_path)}
        with subprocess.Popen([sys.executable, "-m", "makeway_quota.main", "serve"], env=environ) as process:
            files = Path(f"/proc/{process.pid}/fd")
            while str(lock) not in opened(files):
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 130
