"""The state of a training at one moment: taken in memory without a copy of its tensors, written to and read from files.

Used by the states of `torch_state` and `accelerate`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SHARDED = {"DTensor", "ShardedTensor"}
"""Tensors of which each rank has a part"""


class Snapshot:
    """The states of all parts and the progress; tensors are those of the parts, so that a later step changes them."""

    def __init__(self, parts: dict[str, Any], gradients: dict[str, Any], progress: dict[str, Any]) -> None:
        self.parts = _copied(parts)
        self.gradients = gradients
        self.progress = progress
        self.step = int(progress["step"])
        self.key = self.key_of(progress)
        self._versions = [(tensor, tensor._version) for tensor in _tensors(self.parts) if not tensor.is_inference()]

    def is_changed(self) -> bool:
        """Whether a tensor was written to since."""
        return any(tensor._version != version for tensor, version in self._versions)

    @staticmethod
    def key_of(progress: Mapping[str, Any]) -> tuple[int, ...]:
        """Return what identifies a moment of the training."""
        position = progress["position"]
        place = (0, 0) if position is None else (int(position["done"]), int(position["complete"]))
        return int(progress["epoch"]), int(progress["phase"]), int(progress["step"]), *place


class Gradients:
    """The gradients that no optimizer has used yet, because they are accumulated over several batches."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._used: set[int] = set()
        for part in parts.values():
            if hasattr(part, "register_step_post_hook"):
                part.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._used.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])

    def forget(self) -> None:
        """Begin a batch, after which `waiting` has what the optimizers did not use in it."""
        self._used.clear()

    def waiting(self) -> dict[str, Any]:
        """Return the gradients by the names of their parameters."""
        named = self._named().items()
        return {name: one.grad for name, one in named if one.grad is not None and id(one) not in self._used}

    def load(self, gradients: Mapping[str, Any]) -> None:
        """Set the gradients of all parameters."""
        for name, parameter in self._named().items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _named(self) -> dict[str, Any]:
        return {
            f"{name}.{key}": parameter
            for name, part in self._parts.items()
            if hasattr(part, "named_parameters")
            for key, parameter in part.named_parameters()
        }


def write(value: Any, path: Path) -> None:
    """Write tensors, numbers and containers of them."""
    import torch

    torch.save(value, path)


def read(path: Path) -> Any:
    """Return what `write` wrote, on the processor; it has to be a file of this job; other objects are read, too."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # a part has more in its state: the folder is this job's own
        return torch.load(path, map_location="cpu", weights_only=False)


def _copied(value: Any) -> Any:
    """Return a copy in which only the tensors are the same."""
    import torch

    if isinstance(value, torch.Tensor):
        if type(value).__name__ in SHARDED:
            raise TypeError(
                "a part is sharded over the ranks (FSDP): save it with torch.distributed.checkpoint inside "
                "checkpoint.saving(step, together=True), as the page on checkpoints shows"
            )
        return value.detach()
    if isinstance(value, dict):
        new = copy.copy(value)  # an OrderedDict of torch carries versions of its modules
        for key, one in value.items():
            new[key] = _copied(one)
        return new
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return copy.deepcopy(value)


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
