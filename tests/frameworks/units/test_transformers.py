"""The checkpoints that Transformers' Trainer writes count when they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway import checkpoint
from makeway.frameworks.transformers import COMPLETE


def written(step: int, complete: str | None = "1") -> Path:
    folder = Path(checkpoint.transformers_dir()) / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    if complete is not None:
        (folder / COMPLETE).write_text(complete)
    return folder


def test_without_a_checkpoint_there_is_no_path(job: Path) -> None:
    assert checkpoint.transformers_path() is None


def test_the_newest_complete_checkpoint_is_taken(job: Path) -> None:
    written(9)
    newest = written(20)
    written(100, complete=None)
    written(90, complete="")
    (newest.parent / "checkpoint-best").mkdir()
    (newest.parent / "checkpoint-300").write_text("a file")
    assert checkpoint.transformers_path() == str(newest)


def test_another_number_of_ranks_is_refused(job: Path) -> None:
    written(9, complete="2")
    with pytest.raises(ValueError, match="saved by 2 ranks, and now there is 1"):
        checkpoint.transformers_path()


def test_each_trainer_has_a_folder(job: Path) -> None:
    written(9)
    assert checkpoint.transformers_path("tuned") is None


def test_outside_of_a_job_training_begins_anew(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(9)
    monkeypatch.delenv("MAKEWAY_JOB_ID")
    assert checkpoint.transformers_path() is None
