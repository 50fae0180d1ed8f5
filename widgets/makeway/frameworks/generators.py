"""The global random generators: of `random`, of numpy and of torch on processors and GPUs.

Used wherever a checkpoint is written or read. What is written holds tensors and numbers only, so that torch reads it
with `weights_only=True`.
"""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Python 3.8 cannot evaluate it
    CpuStates = tuple[Any, Any, Any]
    """The states of `random`, torch and numpy as these have them; None without numpy"""


def cpu_states() -> CpuStates:
    """Return the states of the global generators of processors: cheap, for every batch."""
    import torch

    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()


def set_cpu_states(states: CpuStates) -> None:
    """Set the global generators of processors to what `cpu_states` returned."""
    import torch

    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


def portable(states: CpuStates) -> dict[str, Any]:
    """Return what `cpu_states` returned as tensors and numbers, which `restore` takes."""
    import torch

    version, words, gauss = states[0]
    python = {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}
    result: dict[str, Any] = {"python": python, "torch": states[1]}
    if isinstance(states[2], tuple):  # a dictionary where the user has put another generator in its place
        name, keys, position, has_gauss, cached = states[2]
        result["numpy"] = {
            "name": str(name),
            "keys": torch.from_numpy(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        }
    return result


def state() -> dict[str, Any]:
    """Return the states of all global generators, as tensors and numbers."""
    import torch

    result = portable(cpu_states())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        result["cuda"] = torch.cuda.get_rng_state_all()
    return result


def restore(states: dict[str, Any]) -> None:
    """Set all global generators to what `state` returned; those of GPUs that are not here are left out."""
    import torch

    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy

        saved = states["numpy"]
        keys = saved["keys"].numpy().astype(numpy.uint32)
        numpy.random.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))
    if "cuda" in states and torch.cuda.is_available():
        for number, gpu_state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(gpu_state.cpu(), number)


def seed(number: int) -> None:
    """Seed all global generators of this process; those of GPUs are left alone."""
    import torch

    random.seed(number)
    torch.default_generator.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


def draw() -> int:
    """Return a seed drawn from torch's generator."""
    import torch

    return int(torch.empty((), dtype=torch.int64).random_().item())


class IsolatedGenerators:
    """Global generators of its own for a block: those outside of it go on as if the block had drawn nothing."""

    def __init__(self, number: int) -> None:
        self._seed: int | None = number
        self._inside: CpuStates = (None, None, None)
        self._outside: CpuStates = (None, None, None)

    def __enter__(self) -> None:
        self._outside = cpu_states()
        if self._seed is not None:
            seed(self._seed)
            self._seed = None
        else:
            set_cpu_states(self._inside)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inside = cpu_states()
        set_cpu_states(self._outside)
