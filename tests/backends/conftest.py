"""The workshop: a local backend on virtual GPUs, whose jobs are all gone after the test."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from workshop import Workshop


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    """Open a backend in an empty state directory."""
    made = Workshop(tmp_path / "state")
    await made.backend.open()
    yield made
    for seen in (await made.backend.observe()).attempts:
        await made.backend.kill(seen.workload, seen.attempt)
        await made.over(seen.workload, seen.attempt)
    await made.backend.close(stop_jobs=False)
    jobs = made.root / "jobs"
    for job in jobs.iterdir() if jobs.exists() else ():
        for pid in made.processes(job.name):
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"a process of {job.name} was left behind")
