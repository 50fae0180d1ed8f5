"""Train on several GPUs or workers with DistributedDataParallel; all ranks make way at the same step.

On one node, `torchrun --nproc-per-node 2 gang.py`; as a gang, `%%train --workers 2`.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from data import Pictures
from makeway import checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(392, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
pictures = Pictures(640)
loader = DataLoader(pictures, batch_size=32, sampler=DistributedSampler(pictures))

state = checkpoint.torch_state(model=model, optimizer=optimizer, every=200)  # after init_process_group

for epoch in state.epochs(int(os.environ.get("EPOCHS", "3"))):  # calls set_epoch of the sampler
    for batch, shapes in state.batches(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), shapes)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "gang.pt")
dist.destroy_process_group()
