"""The environment of the frameworks, and jobs that train in it."""

from __future__ import annotations

import os
import random
import socket
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


PORTS = range(20_000, 32_000)
"""Below those that the system gives to outgoing connections, which could take one between two attempts"""
WORKERS = 64
"""The most workers of pytest that get ports of their own"""


@pytest.fixture
def port() -> str:
    """Return a free port at which the ranks of one job meet; tests that run at the same time get different ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    own = PORTS[worker::WORKERS]
    for number in random.SystemRandom().sample(own, len(own)):
        with socket.socket(socket.AF_INET6) as probe:  # both families, as torch listens
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                probe.bind(("::", number))
            except OSError:
                continue
            return str(number)
    raise OSError(f"no port of {own} is free")


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
