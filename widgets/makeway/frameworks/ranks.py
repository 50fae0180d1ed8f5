"""What the ranks of a training do together: agree on what is due, and see the same checkpoint.

Used by the adapters. The exchange is that of `makeway.checkpoint`: through torch.distributed where it is initialised,
else through files in a folder that all ranks see, as in a gang whose processes know only RANK and WORLD_SIZE.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from makeway import checkpoint
from makeway.checkpointing.folder import common
from makeway.checkpointing.loop import Interval
from makeway.checkpointing.loop import claim as claim_name
from makeway.checkpointing.ranks import check_size, rank_and_size

__all__ = ["Agreement", "check_size", "claim", "completed", "exchange", "newest", "rank_and_size", "rank_file", "same"]


class Agreement:
    """Decides with all ranks, at the same step, whether to save and whether to leave."""

    def __init__(self, every: int | str | None) -> None:
        self._interval = Interval.of(every)
        self._saved_at = time.monotonic()
        self._steps = 0

    def saved(self, step: int) -> None:
        """Begin a new interval, after a checkpoint of `step`."""
        self._saved_at, self._steps = time.monotonic(), step

    def ask(self, step: int) -> tuple[bool, bool]:
        """Return whether to save, and whether to leave then; all ranks get the same answer and have to ask together."""
        if not checkpoint._on_cluster():
            return False, False
        due, leave = exchange([self._interval.is_due(step, self._steps, self._saved_at), checkpoint.requested()])
        if leave:
            checkpoint._parts.heard()
        return bool(due or leave), bool(leave)

    @contextlib.contextmanager
    def going_on(self, step: int) -> Iterator[None]:
        """Turn a failed save into a warning: the training is well, and older checkpoints are as they were."""
        try:
            yield
        except Exception as error:
            self.saved(step)  # try again after the interval, not after each step
            text = f"Makeway: step {step} was not saved, and the training goes on: {type(error).__name__}: {error}"
            print(text, file=sys.stderr, flush=True)


def exchange(values: list[Any]) -> list[int]:
    """Return the maximum of each number over all ranks."""
    return checkpoint._parts.ranks.exchange([int(value) for value in values])


def newest(name: str = "") -> Path | None:
    """Return the newest checkpoint, the same on all ranks; RuntimeError where one finds another.

    None outside of a job: a script that is tried in a notebook begins anew.
    """
    if not checkpoint._on_cluster():
        return None
    return common(lambda: checkpoint.latest(name), checkpoint._parts.ranks)


def same(newest: Path | None) -> None:
    """Raise RuntimeError where the ranks, which all call this, have found different checkpoints."""
    if checkpoint._on_cluster():
        common(lambda: newest, checkpoint._parts.ranks)


def claim(name: str, caller: str) -> None:
    """Take a name for a state of this process; RuntimeError where a loop or another state has it."""
    if checkpoint._on_cluster():
        claim_name(checkpoint._parts.loops, name, caller)


def completed(ended: bool) -> None:
    """Report whether the work of the job is done."""
    if checkpoint._on_cluster():
        checkpoint._parts.completed(ended)


def rank_file(folder: Path) -> Path:
    """Return the file of this rank in a checkpoint."""
    return folder / f"rank-{rank_and_size()[0]}.pt"
