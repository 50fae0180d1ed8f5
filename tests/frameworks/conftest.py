"""The environment of the frameworks, and jobs that train in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_jobs as jobs


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    """Skip the tests without the environment; with CI set, fail."""
    if not jobs.PYTHON.exists():
        reason = "the frameworks are not installed: run `make test-frameworks`"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., jobs.Job]:
    """Return what makes a job of a training beside this file, in a folder of its own."""
    made: list[int] = []

    def make(script: str | Path, *before: str, **options: Any) -> jobs.Job:
        made.append(1)
        path = script if isinstance(script, Path) else jobs.TRAININGS / script
        command = [str(jobs.PYTHON), *before, str(path)]
        return jobs.Job(tmp_path / f"run-{len(made)}", command, **options)

    return make


collect_ignore = ["units", "trainings", "environment"]
