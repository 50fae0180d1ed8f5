"""A job's variables in a folder, for tests that run in the environment of the frameworks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from makeway import checkpoint

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend to be a job; return the file whose existence is the notice."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MAKEWAY_LISTENERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAKEWAY_JOB_ID", "j-1")
    monkeypatch.setenv("MAKEWAY_STOP_FILE", str(tmp_path / "stop.json"))
    monkeypatch.setenv("MAKEWAY_PROGRESS_FILE", str(tmp_path / "progress.json"))
    monkeypatch.setenv("MAKEWAY_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    anew()
    return tmp_path / "stop.json"


def anew() -> None:
    """Forget which states this process has, as a new process would."""
    checkpoint._parts.loops.clear()
