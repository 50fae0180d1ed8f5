"""A training with accelerate: accumulation, a scheduler, and a validation."""

from __future__ import annotations

import os

import data
import moments
import torch
from accelerate import Accelerator
from makeway import checkpoint
from torch.utils.data import DataLoader


def main() -> None:
    data.seed()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(os.environ.get("ACCUMULATE", "1")))
    plain = data.network()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200)
    loader = DataLoader(data.Augmented(), batch_size=8, shuffle=True, num_workers=int(os.environ.get("WORKERS", "0")))
    validation = DataLoader(data.Augmented(24), batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(plain, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(data.Noted())
    state = checkpoint.accelerate(accelerator, every=7)
    for epoch in state.epochs(3):
        model.train()
        for inputs, labels in state.batches(loader):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            moments.trained(state.step + 1, [inputs, labels])
        model.eval()
        total = 0.0
        for inputs, labels in state.watch(validation):
            with torch.no_grad():
                total += torch.nn.functional.cross_entropy(model(inputs), labels).item()
            moments.reach("watch")
        moments.note("validated", f"{epoch} {total!r}")
    moments.finish(plain)


if __name__ == "__main__":
    main()
