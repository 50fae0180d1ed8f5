"""Data for the examples, made here: pictures of shapes, and sentences of a small language. Nothing is downloaded."""

from __future__ import annotations

import random

import torch
from torch.utils.data import Dataset

SIZE = 16
SHAPES = ("bar", "square", "cross")
WORDS = [
    "the",
    "a",
    "small",
    "big",
    "red",
    "blue",
    "cat",
    "dog",
    "bird",
    "sees",
    "chases",
    "hears",
    "near",
    "behind",
    "tree",
    "house",
]


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of shapes at random places; each time with other noise, as augmentation does."""

    def __init__(self, number: int, seed: int = 0) -> None:
        drawn = random.Random(seed)
        self.items = [(drawn.randrange(3), drawn.randrange(8), drawn.randrange(8)) for _ in range(number)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        shape, top, left = self.items[index]
        picture = 0.3 * torch.randn(1, SIZE, SIZE)
        if SHAPES[shape] == "square":
            picture[:, top : top + 8, left : left + 8] += 1
        else:
            picture[:, top + 3 : top + 5, left : left + 8] += 1
        if SHAPES[shape] == "cross":
            picture[:, top : top + 8, left + 3 : left + 5] += 1
        return picture, shape


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences such as "the red dog chases a small bird near the tree", as numbers of words."""

    def __init__(self, number: int, seed: int = 0) -> None:
        drawn = random.Random(seed)
        self.items = [torch.tensor(self._sentence(drawn)) for _ in range(number)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.items[index], "labels": self.items[index]}

    @staticmethod
    def _sentence(drawn: random.Random) -> list[int]:
        def thing(names: str) -> list[str]:
            return [
                drawn.choice(["the", "a"]),
                drawn.choice(["small", "big", "red", "blue"]),
                drawn.choice(names.split()),
            ]

        animals, places = "cat dog bird", "tree house"
        verb, where = drawn.choice(["sees", "chases", "hears"]), drawn.choice(["near", "behind"])
        return [WORDS.index(word) for word in [*thing(animals), verb, *thing(animals), where, *thing(places)]]
