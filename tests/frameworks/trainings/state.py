"""A training with `torch_state`: AMP's scaler, a scheduler, averaged weights, accumulation and a validation."""

from __future__ import annotations

import os

import data
import moments
import torch
from makeway import checkpoint
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

EPOCHS = int(os.environ.get("EPOCHS", "3"))
WORKERS = os.environ.get("WORKERS", "0")
ACCUMULATE = int(os.environ.get("ACCUMULATE", "1"))


def main() -> None:
    data.seed()
    model = data.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=400)
    by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    options = {"num_workers": 0 if WORKERS == "0" else 2, "persistent_workers": WORKERS == "persistent"}
    if context := os.environ.get("START_METHOD"):
        options["multiprocessing_context"] = context
    loader = DataLoader(data.Augmented(), batch_size=8, shuffle=True, **options)
    validation = DataLoader(data.Augmented(32), batch_size=8, shuffle=True, num_workers=0)
    state = checkpoint.torch_state(
        model=model,
        optimizer=optimizer,
        scheduler=[scheduler, by_epoch],
        scaler=scaler,
        ema=ema,
        noted=data.Noted(),
        skip=os.environ.get("SKIP", "exact"),
        every=7,
    )
    for epoch in state.epochs(EPOCHS):
        moments.reach("epoch", epoch)
        model.train()
        for inputs, labels in state.batches(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss).backward()
            if (state.batch + 1) % ACCUMULATE == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                ema.update_parameters(model)
            scheduler.step()
            moments.trained(state.step + 1, [inputs, labels])
        by_epoch.step()
        if os.environ.get("SWAP"):  # validates the averaged weights in the model's place
            kept = {name: one.clone() for name, one in model.state_dict().items()}
            model.load_state_dict(ema.module.state_dict())
        model.eval()
        total = 0.0
        for inputs, labels in state.watch(validation):
            with torch.no_grad():
                total += torch.nn.functional.cross_entropy(model(inputs), labels).item()
            moments.reach("watch")
        if os.environ.get("SWAP"):
            model.load_state_dict(kept)
        moments.note("validated", f"{epoch} {total!r}")
    moments.finish(model, ema=moments.fingerprint(ema.state_dict()), rate=optimizer.param_groups[0]["lr"])


if __name__ == "__main__":
    main()
