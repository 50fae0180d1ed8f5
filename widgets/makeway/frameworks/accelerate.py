"""Save and resume a training loop with Hugging Face's accelerate.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    state = checkpoint.accelerate(accelerator, every="5m")
    for epoch in state.epochs(10):
        for batch in state.batches(loader):
            with accelerator.accumulate(model):
                …

The parts are those that the accelerator knows: what it has prepared, and what was registered with
`register_for_checkpointing`. `makeway.checkpoint` imports this module when `accelerate` is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from makeway import checkpoint

from .snapshot import Snapshot
from .state import TrainingState

FOLDER = "accelerate"


def accelerate(
    accelerator: Any,
    every: int | str | None = None,
    *,
    skip: str = "exact",
    name: str = "",
    keep: int = checkpoint.KEEP,
) -> AcceleratedState:
    """Return the state of a training, resumed from the newest checkpoint; iterate as with `torch_state`.

    Call it after `prepare`. While gradients are accumulated it neither saves nor leaves.
    """
    return AcceleratedState(accelerator, every=every, skip=skip, name=name, keep=keep)


class AcceleratedState(TrainingState):
    """A training whose parts the accelerator saves and loads."""

    def __init__(self, accelerator: Any, *, every: int | str | None, skip: str, name: str, keep: int) -> None:
        self._accelerator = accelerator
        super().__init__({}, every=every, skip=skip, name=name, keep=keep)

    def _between(self, edge: Snapshot | None) -> None:
        if self._accelerator.sync_gradients:  # the same on all ranks
            super()._between(edge)

    def _states(self) -> dict[str, Any]:
        """Return what tells whether a validation has changed the parts; they are saved by the accelerator."""
        known = [*self._accelerator._models, *self._accelerator._optimizers]
        return {str(number): part.state_dict() for number, part in enumerate(known)}

    def _write(self, folder: Path, state: Snapshot) -> None:
        self._accelerator.save_state(str(folder / FOLDER))

    def _read(self, folder: Path) -> None:
        self._accelerator.load_state(str(folder / FOLDER))
