"""A plain loop over steps, with the state that the script itself writes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import data
import moments
import torch
from makeway import checkpoint


def main() -> None:
    data.seed()
    model = data.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = torch.compile(model) if os.environ.get("COMPILED") else model
    dataset = data.Augmented(noisy=False)

    def save(folder: Path) -> None:
        moments.reach("save")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(state, folder / "state.pt")

    def load(folder: Path) -> None:
        moments.reach("load")
        state = torch.load(folder / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])

    for step in checkpoint.loop(30, save=save, load=load, every=7):
        chosen = torch.randint(0, len(dataset), (8,))
        inputs, labels = dataset.inputs[chosen], dataset.labels[chosen]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(forward(inputs), labels).backward()
        optimizer.step()
        moments.trained(step + 1, [inputs, labels])
    moments.finish(model)


if __name__ == "__main__":
    random.seed(0)
    main()
