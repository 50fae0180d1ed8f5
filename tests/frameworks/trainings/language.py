"""A training with the Trainer of Transformers: masked language, whose collator draws, with accumulation."""

from __future__ import annotations

import os
from typing import Any

import moments
import torch
from makeway import checkpoint
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH, MASK = 40, 12, 1


class Sentences(Dataset[Any]):
    def __init__(self, number: int) -> None:
        made = torch.Generator().manual_seed(number)
        self.words = torch.randint(2, VOCABULARY, (number, LENGTH), generator=made)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index]}


def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch with other words masked each time."""
    words = torch.stack([sample["input_ids"] for sample in samples])
    hidden = torch.rand(words.shape) < 0.3
    hidden[:, 0] = True
    return {"input_ids": words.masked_fill(hidden, MASK), "labels": words.masked_fill(~hidden, -100)}


class Noting(TrainerCallback):
    """Reaches the moments, before the callback of Makeway polls."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        moments.trained(state.global_step)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        moments.reach("watch")

    def on_save(self, *_: Any, **__: Any) -> None:
        moments.reach("save")


def main() -> None:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
    model = BertForMaskedLM(config)
    model.register_load_state_dict_pre_hook(lambda *_: moments.reach("load"))
    arguments = TrainingArguments(
        output_dir=checkpoint.transformers_dir(),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=int(os.environ.get("ACCUMULATE", "2")),
        dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
        eval_strategy=os.environ.get("EVALUATE", "epoch"),
        eval_steps=5,
        save_strategy="steps",
        save_steps=9,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=2,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Sentences(64),
        eval_dataset=Sentences(16),
        data_collator=masked,
        callbacks=[Noting(), checkpoint.transformers()],
    )
    trainer.train(resume_from_checkpoint=checkpoint.transformers_path())
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    moments.finish(model, step=trainer.state.global_step, evaluations=losses)


if __name__ == "__main__":
    main()
