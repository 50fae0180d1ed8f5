"""Data and a model for the trainings beside it: made up, small, and random wherever trainings are random."""

from __future__ import annotations

import random
from typing import Any

import moments
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

torch.set_num_threads(1)
SAMPLES, FEATURES, CLASSES = 96, 8, 3


class Augmented(Dataset[Any]):
    """Samples with noise from each of the three libraries that data sets draw from."""

    def __init__(self, samples: int = SAMPLES, noisy: bool = True) -> None:
        made = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(samples, FEATURES, generator=made)
        self.labels = torch.randint(0, CLASSES, (samples,), generator=made)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        moments.reach("item")
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item() if self.noisy else 0.0
        return self.inputs[index] + 0.1 * noise, self.labels[index]


def network() -> nn.Sequential:
    """Return a network with dropout and batch statistics, both of which a resume may get wrong."""
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


def seed() -> None:
    """Seed all generators, as scripts do."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


class Noted:
    """A part of a training that notes when its state is taken."""

    def state_dict(self) -> dict[str, int]:
        moments.reach("save")
        return {"noted": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        moments.reach("load")
