"""Train a classifier of pictures with Lightning."""

from __future__ import annotations

import os
from typing import Any

import pytorch_lightning as lightning
import torch
from data import Pictures
from makeway import checkpoint
from torch import nn
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """A convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(392, 3))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("right", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(0)
model = Classifier()
loader = DataLoader(Pictures(640), batch_size=32, shuffle=True)
validation = DataLoader(Pictures(96, seed=1), batch_size=32)

trainer = lightning.Trainer(
    max_epochs=int(os.environ.get("EPOCHS", "2")),
    callbacks=[checkpoint.lightning(every="10m")],
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(model, checkpoint.resumable(loader), validation, ckpt_path=checkpoint.lightning_path())
torch.save(model.state_dict(), "lightning.pt")
