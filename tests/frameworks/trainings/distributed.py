"""A training with DistributedDataParallel, started by torchrun or as a gang of workers."""

from __future__ import annotations

import os

import data
import moments
import torch
import torch.distributed as dist
from makeway import checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    data.seed()
    plain = data.network()
    model = DistributedDataParallel(plain)
    torch.manual_seed(10 + dist.get_rank())  # each rank drops out others
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = data.Augmented()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "0")))
    validation = DataLoader(data.Augmented(24), batch_size=8)
    state = checkpoint.torch_state(model=model, optimizer=optimizer, noted=data.Noted(), every=5)
    for _ in state.epochs(3):
        model.train()
        for inputs, labels in state.batches(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            moments.trained(state.step + 1, [inputs, labels])
        model.eval()
        if dist.get_rank() == 0:  # as many scripts do
            for inputs, _ in state.watch(validation):
                with torch.no_grad():
                    plain(inputs)
                moments.reach("watch")
    # Before each step all ranks get the buffers of rank 0, such as a batch norm's: a checkpoint holds those alone.
    moments.finish(plain if dist.get_rank() == 0 else dict(plain.named_parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
