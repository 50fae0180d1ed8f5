"""Train a small language model with the Trainer of Transformers; it accumulates gradients and evaluates each epoch."""

from __future__ import annotations

import os

import torch
from data import WORDS, Sentences
from makeway import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(WORDS), n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)

arguments = TrainingArguments(
    output_dir=checkpoint.transformers_dir(),
    num_train_epochs=float(os.environ.get("EPOCHS", "2")),
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    eval_strategy="epoch",
    save_steps=200,
    save_total_limit=2,
    logging_steps=5,
    disable_tqdm=True,
    report_to=[],
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Sentences(640),
    eval_dataset=Sentences(64, seed=1),
    callbacks=[checkpoint.transformers()],
)
trainer.train(resume_from_checkpoint=checkpoint.transformers_path())
torch.save(model.state_dict(), "language.pt")
