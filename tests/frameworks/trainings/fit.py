"""A training with Lightning's Trainer, alone or with DDP on two processes."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import data
import moments
import pytorch_lightning as lightning
import torch
from makeway import checkpoint
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
RANKS = int(os.environ.get("RANKS", "1"))
WORKERS = int(os.environ.get("WORKERS", "0"))


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = data.network()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.network(inputs), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        if self.trainer.sanity_checking:
            return
        moments.reach("watch")
        inputs, labels = batch
        self.log("validation", torch.nn.functional.cross_entropy(self.network(inputs), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        by_step = {
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200),
            "interval": "step",
        }
        return [optimizer], [by_step]

    def on_save_checkpoint(self, state: Any) -> None:
        moments.reach("save")

    def on_load_checkpoint(self, state: Any) -> None:
        moments.reach("load")


class Noting(lightning.Callback):
    """Notes each optimizer's step, before the callback of Makeway polls."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            moments.trained(trainer.global_step, batch)


def main() -> None:
    data.seed()
    loader = DataLoader(data.Augmented(), batch_size=8, shuffle=True, num_workers=WORKERS)
    validation = DataLoader(data.Augmented(24), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
        val_check_interval=float(os.environ.get("VALIDATE", "1.0")),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Noting(), checkpoint.lightning(every=7)],
    )
    model = Classifier()
    trainer.fit(model, checkpoint.resumable(loader), validation, ckpt_path=checkpoint.lightning_path())
    moments.finish(model, step=trainer.global_step)


if __name__ == "__main__":
    main()
