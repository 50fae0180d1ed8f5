"""The global random generators: of `random`, of numpy and of torch on processors and GPUs.

Used wherever a checkpoint is written or read. What is written holds tensors and numbers only, so that torch reads it
with `weights_only=True`.
"""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import Any

Raw = tuple[Any, Any, Any]
"""The states of `random`, torch and numpy as these have them; None without numpy"""


def raw() -> Raw:
    """Return the states of the global generators of processors: cheap, for every batch."""
    import torch

    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()


def set_raw(states: Raw) -> None:
    """Set the global generators of processors to what `raw` returned."""
    import torch

    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


def portable(states: Raw) -> dict[str, Any]:
    """Return what `raw` returned as tensors and numbers, which `restore` takes."""
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

    result = portable(raw())
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

        own = states["numpy"]
        keys = own["keys"].numpy().astype(numpy.uint32)
        numpy.random.set_state((own["name"], keys, own["position"], own["has_gauss"], own["gauss"]))
    if "cuda" in states and torch.cuda.is_available():
        for number, one in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one.cpu(), number)


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


class Aside:
    """Global generators of its own for a block: those outside of it go on as if the block had drawn nothing."""

    def __init__(self, number: int) -> None:
        self._seed: int | None = number
        self._inside: Raw = (None, None, None)
        self._outside: Raw = (None, None, None)

    def __enter__(self) -> None:
        self._outside = raw()
        if self._seed is not None:
            seed(self._seed)
            self._seed = None
        else:
            set_raw(self._inside)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inside = raw()
        set_raw(self._outside)
