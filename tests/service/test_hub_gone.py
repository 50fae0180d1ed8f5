"""A service stops with the Hub that started it, also if that was gone before the service looked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

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
