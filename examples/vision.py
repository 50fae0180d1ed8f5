"""Train a classifier of pictures with PyTorch: augmentation in worker processes, a scheduler, averaged weights."""

from __future__ import annotations

import os

import torch
from data import Pictures
from makeway import checkpoint
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

EPOCHS = int(os.environ.get("EPOCHS", "3"))
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.LazyLinear(3)
).to(device)
model(torch.zeros(2, 1, 16, 16, device=device))  # gives the last layer its size
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Pictures(640), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)
validation = DataLoader(Pictures(96, seed=1), batch_size=32)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * len(loader))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))

state = checkpoint.torch_state(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, every="5m")

for epoch in state.epochs(EPOCHS):
    model.train()
    for pictures, shapes in state.batches(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pictures.to(device)), shapes.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
        checkpoint.report(loss=loss)

    ema.eval()
    right = 0
    for pictures, shapes in state.watch(validation):
        with torch.no_grad():
            right += (ema(pictures.to(device)).argmax(1).cpu() == shapes).sum().item()
    print(f"epoch {epoch}: {right / len(validation.dataset):.1%} right", flush=True)

torch.save(ema.state_dict(), "vision.pt")
